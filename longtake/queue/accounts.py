"""API keys: the secret is shown once, its hash is stored."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from sqlalchemy import bindparam, delete, insert, select, update

from longtake.errors import ConflictError, NotFoundError
from longtake.queue.database import Database, Turn, again
from longtake.queue.ids import new_id, random_text
from longtake.queue.records import LOCAL_OWNER, ApiKey, JobState
from longtake.queue.rows import columns_of, read_row
from longtake.queue.tables import (
    api_keys,
    artifacts,
    batches,
    events,
    idempotency,
    jobs,
    owners,
    webhooks,
)

SCHEME = "lt"
PREFIX_LENGTH = 8
REST_LENGTH = 52  # five random bits a character: 260 bits, so a plain hash is enough


class Accounts:
    """Keys by name and by secret."""

    def __init__(self, db: Database) -> None:
        self._db = db

    @again
    def create(self, name: str, limits: Mapping[str, int] | None = None) -> tuple[ApiKey, str]:
        """A new key and its secret, ``lt_<prefix>_<rest>``, which cannot be had again."""
        prefix = random_text(PREFIX_LENGTH)
        secret = f"{SCHEME}_{prefix}_{random_text(REST_LENGTH)}"
        statement = (
            insert(api_keys)
            .values(
                id=new_id("key"),
                name=name,
                prefix=prefix,
                hash=_hash(secret),
                created_at=self._db.now,
                limits=dict(limits or {}),
            )
            .returning(*columns_of(ApiKey))
        )
        with self._db.write() as conn:
            return read_row(ApiKey, conn.execute(statement).one()), secret

    def find(self, secret: str) -> ApiKey | None:
        """The key of a secret; None for an unknown or revoked one."""
        digest = _hash(secret)
        statement = select(*columns_of(ApiKey), api_keys.c.hash).where(
            api_keys.c.hash == digest, api_keys.c.revoked_at.is_(None)
        )
        with self._db.read() as conn:
            row = conn.execute(statement).one_or_none()
        if row is None or not hmac.compare_digest(row.hash, digest):
            return None
        return read_row(ApiKey, row)

    def list(self) -> list[ApiKey]:
        """All keys, revoked ones too, oldest first."""
        statement = select(*columns_of(ApiKey)).order_by(api_keys.c.created_at, api_keys.c.id)
        with self._db.read() as conn:
            return [read_row(ApiKey, row) for row in conn.execute(statement)]

    @again
    def move(self, source: str, target: str) -> int:
        """Hand everything of one owner to another; returns how many videos that are.

        Engine seconds that were used stay where they were counted.

        Args:
            source: a key's id, of a revoked one too, or ``LOCAL_OWNER``: made without a key.
            target: the id of a key that is not revoked.

        Raises:
            NotFoundError: there is no such key.
            ConflictError: ``not_finished``, a video of ``source`` is being made.
        """
        with self._db.write() as conn:
            for owner in sorted({source, target}):
                self._db.take_turn(conn, Turn.OWNER, owner)
            known = select(api_keys.c.revoked_at).where(api_keys.c.id == bindparam("key"))
            if source != LOCAL_OWNER and conn.execute(known, {"key": source}).first() is None:
                raise NotFoundError("key", source)
            row = conn.execute(known, {"key": target}).first()
            if row is None or row.revoked_at is not None or source == target:
                raise NotFoundError("key", target)
            mine = jobs.c.owner == source
            states = conn.execute(select(jobs.c.state).where(mine).with_for_update()).scalars()
            if JobState.RUNNING in states:
                # its worker writes in the name of the owner that it knows
                reason = "a video of this owner is being made; wait, or stop the workers"
                raise ConflictError(reason, "not_finished")
            conn.execute(self._db.insert(owners).values(owner=target).on_conflict_do_nothing())
            moved = conn.execute(update(jobs).where(mine).values(owner=target)).rowcount
            both = idempotency.alias()
            taken = select(both.c.key).where(both.c.owner == target)
            from_source = idempotency.c.owner == source
            conn.execute(delete(idempotency).where(from_source, idempotency.c.key.in_(taken)))
            for table in (artifacts, batches, webhooks, events, idempotency):
                conn.execute(update(table).where(table.c.owner == source).values(owner=target))
        return moved

    @again
    def revoke(self, key_id: str) -> ApiKey:
        """Let a key open nothing any more; its videos stay.

        Raises:
            NotFoundError: there is no such key, or it is revoked already.
        """
        statement = (
            update(api_keys)
            .where(api_keys.c.id == key_id, api_keys.c.revoked_at.is_(None))
            .values(revoked_at=self._db.now)
            .returning(*columns_of(ApiKey))
        )
        with self._db.write() as conn:
            row = conn.execute(statement).one_or_none()
        if row is None:
            raise NotFoundError("key", key_id)
        return read_row(ApiKey, row)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
