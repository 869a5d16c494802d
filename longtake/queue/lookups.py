"""Reading for single answers of the API: repeated submissions, and one segment of many."""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, select

from longtake.errors import ConflictError, NotFoundError
from longtake.queue.database import Database
from longtake.queue.records import Artifact, Job
from longtake.queue.rows import artifact_of, columns_of, job_of
from longtake.queue.tables import artifacts, chunks, idempotency, jobs

DELETED = "the first request with this Idempotency-Key made it, and it was deleted since"


class Lookups:
    """Finds one row by what a request names."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def by_key(self, owner: str, key: str, fingerprint: str, within_s: float) -> Job | None:
        """The job that ``key`` made within ``within_s`` seconds; None for a new key.

        Raises:
            ConflictError: ``idempotency_mismatch``: the key came with another fingerprint.
            NotFoundError: what it made is deleted.
        """
        return self._find(owner, idempotency.c.key == key, fingerprint, within_s)

    def by_tries(self, owner: str, prefix: str, fingerprint: str, within_s: float) -> Job | None:
        """The newest job whose key starts with ``prefix``, which ends in a colon."""
        key = idempotency.c.key
        # a range of the primary key, which LIKE would not use everywhere
        which = and_(key >= prefix, key < f"{prefix[:-1]};")
        return self._find(owner, which, fingerprint, within_s)

    def segment(self, job_id: str, index: int) -> Artifact | None:
        """The decoded segment of one chunk; None where it is not there yet."""
        named = chunks.c.segment_key == artifacts.c.key
        statement = (
            select(*columns_of(Artifact))
            .select_from(chunks.join(artifacts, named))
            .where(chunks.c.job_id == job_id, chunks.c.index == index)
        )
        with self._db.read() as conn:
            row = conn.execute(statement).first()
        return artifact_of(row) if row is not None else None

    def _find(
        self, owner: str, which: ColumnElement[bool], fingerprint: str, within_s: float
    ) -> Job | None:
        newest = (
            select(idempotency.c.fingerprint, idempotency.c.target)
            .where(
                idempotency.c.owner == owner,
                which,
                idempotency.c.created_at >= self._db.now - within_s,
            )
            .order_by(idempotency.c.created_at.desc())
            .limit(1)
        )
        with self._db.read() as conn:
            known = conn.execute(newest).one_or_none()
            if known is None:
                return None
            if known.fingerprint != fingerprint:
                message = "The idempotency key came with another request before."
                raise ConflictError(message, "idempotency_mismatch")
            row = conn.execute(
                select(*columns_of(Job)).where(jobs.c.id == known.target, jobs.c.owner == owner)
            ).first()
        if row is None:
            raise NotFoundError("video", known.target, DELETED)
        return job_of(row)
