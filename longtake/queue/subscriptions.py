"""Webhooks and what is to be delivered to them; a delivery is written with the event it tells."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, insert, select, tuple_, update

from longtake.errors import NotFoundError
from longtake.queue.database import Database, again
from longtake.queue.ids import new_id
from longtake.queue.records import Delivery, Webhook
from longtake.queue.rows import columns_of, read_row, webhook_of
from longtake.queue.tables import deliveries, webhooks

EVENT_TYPES = ("video.completed", "video.failed", "video.cancelled")
PENDING, DELIVERED, FAILED = "pending", "delivered", "failed"
SECRET_BYTES = 32
RESPONSE_CHARACTERS = 2000
Deliveries = list[Delivery]
_EDITABLE = frozenset({"name", "url", "event_types", "enabled"})


class Subscriptions:
    """Endpoints, and the deliveries they are owed."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._ready = select(deliveries.c.id).where(
            deliveries.c.state == PENDING,
            deliveries.c.next_at <= db.now,
            deliveries.c.claimed_until <= db.now,
        )

    @again
    def create(self, owner: str, name: str, url: str, event_types: Sequence[str]) -> Webhook:
        """A new, enabled endpoint with a secret of its own."""
        statement = (
            insert(webhooks)
            .values(
                id=new_id("wh"),
                owner=owner,
                name=name,
                url=url,
                event_types=list(event_types),
                secret=_secret(),
                enabled=True,
                created_at=self._db.now,
            )
            .returning(*columns_of(Webhook))
        )
        with self._db.write() as conn:
            return webhook_of(conn.execute(statement).one())

    def get(self, webhook_id: str, owner: str | None = None) -> Webhook:
        """One endpoint.

        Raises:
            NotFoundError: there is none, or it is another owner's.
        """
        statement = select(*columns_of(Webhook)).where(*_whose(webhook_id, owner))
        with self._db.read() as conn:
            row = conn.execute(statement).one_or_none()
        if row is None:
            raise NotFoundError("webhook", webhook_id)
        return webhook_of(row)

    def list(self, owner: str | None) -> list[Webhook]:
        """All endpoints of an owner, oldest first."""
        statement = select(*columns_of(Webhook)).order_by(webhooks.c.created_at, webhooks.c.id)
        if owner is not None:
            statement = statement.where(webhooks.c.owner == owner)
        with self._db.read() as conn:
            return [webhook_of(row) for row in conn.execute(statement)]

    def update(self, webhook_id: str, owner: str | None, changes: Mapping[str, Any]) -> Webhook:
        """Change name, url, event_types or enabled.

        Raises:
            NotFoundError: there is no such endpoint of this owner.
            ValueError: another field is named.
        """
        if unknown := set(changes) - _EDITABLE:
            raise ValueError(f"a webhook has no {', '.join(sorted(unknown))} to change")
        if not changes:
            return self.get(webhook_id, owner)
        values = dict(changes)
        if "event_types" in values:
            values["event_types"] = [*values["event_types"]]
        return self._change(webhook_id, owner, values)

    def rotate(self, webhook_id: str, owner: str | None, *, keep_old: bool = True) -> Webhook:
        """A new secret; the one before still signs beside it for a day, with ``keep_old``."""
        return self._change(
            webhook_id,
            owner,
            {
                "secret": _secret(),
                "previous_secret": webhooks.c.secret if keep_old else None,
                "rotated_at": self._db.now,
            },
        )

    @again
    def delete(self, webhook_id: str, owner: str | None) -> None:
        """Remove an endpoint and its deliveries.

        Raises:
            NotFoundError: there is no such endpoint of this owner.
        """
        with self._db.write() as conn:
            gone = conn.execute(delete(webhooks).where(*_whose(webhook_id, owner)))
        if not gone.rowcount:
            raise NotFoundError("webhook", webhook_id)

    def enqueue(self, conn: Connection, owner: str, event_type: str, job_id: str) -> None:
        """Owe ``event_type`` about a job to every endpoint of its owner that wants it."""
        wanting = conn.execute(
            select(webhooks.c.id, webhooks.c.event_types).where(
                webhooks.c.owner == owner, webhooks.c.enabled
            )
        )
        for row in wanting.all():
            if event_type in row.event_types:
                self._owe(conn, row.id, event_type, {"id": job_id})

    @again
    def send_test(self, webhook_id: str, owner: str | None, event_type: str) -> Delivery:
        """Owe one delivery that tells of no real job."""
        self.get(webhook_id, owner)
        with self._db.write() as conn:
            return self._owe(conn, webhook_id, event_type, {"id": "video_test"})

    @again
    def due(self, limit: int, lease_s: float) -> Deliveries:
        """Claim deliveries whose time has come for ``lease_s`` seconds; counts the try."""
        # asked every second, mostly in vain: only what is due is worth a transaction that writes
        with self._db.read() as conn:
            if conn.execute(self._ready.limit(1)).first() is None:
                return []
        ready = (
            self._ready.order_by(deliveries.c.next_at)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        statement = (
            update(deliveries)
            .where(deliveries.c.id.in_(ready.scalar_subquery()))
            .values(claimed_until=self._db.now + lease_s, attempt=deliveries.c.attempt + 1)
            .returning(*columns_of(Delivery))
        )
        with self._db.write() as conn:
            claimed = [read_row(Delivery, row) for row in conn.execute(statement)]
        return sorted(claimed, key=lambda one: one.next_at)

    @again
    def claim(self, delivery_id: str, lease_s: float) -> Delivery | None:
        """Claim one delivery as ``due`` does; None where somebody else has it or it is over."""
        now = self._db.now
        statement = (
            update(deliveries)
            .where(
                deliveries.c.id == delivery_id,
                deliveries.c.state == PENDING,
                deliveries.c.claimed_until <= now,
            )
            .values(claimed_until=now + lease_s, attempt=deliveries.c.attempt + 1)
            .returning(*columns_of(Delivery))
        )
        with self._db.write() as conn:
            row = conn.execute(statement).one_or_none()
        return read_row(Delivery, row) if row is not None else None

    @again
    def finish(
        self,
        delivery_id: str,
        state: str,
        status_code: int | None,
        response: str | None,
        next_at: float | None = None,
    ) -> None:
        """Tell how a try went: ``delivered``, ``failed``, or ``pending`` until ``next_at``."""
        values: dict[str, Any] = {
            "state": state,
            "status_code": status_code,
            "response": response[:RESPONSE_CHARACTERS] if response is not None else None,
            "claimed_until": 0.0,
        }
        if state == PENDING:
            values["next_at"] = next_at if next_at is not None else self._db.now
        else:
            values["finished_at"] = self._db.now
        with self._db.write() as conn:
            conn.execute(
                update(deliveries)
                .where(deliveries.c.id == delivery_id, deliveries.c.state == PENDING)
                .values(**values)
            )

    def deliveries(self, webhook_id: str, after: str | None = None, limit: int = 20) -> Deliveries:
        """The delivery log of an endpoint, newest first, from after the one named."""
        place = tuple_(deliveries.c.created_at, deliveries.c.id)
        statement = select(*columns_of(Delivery)).where(deliveries.c.webhook_id == webhook_id)
        if after is not None:
            last = select(deliveries.c.created_at, deliveries.c.id).where(deliveries.c.id == after)
            statement = statement.where(place < last.scalar_subquery())
        newest = deliveries.c.created_at.desc(), deliveries.c.id.desc()
        with self._db.read() as conn:
            rows = conn.execute(statement.order_by(*newest).limit(limit))
            return [read_row(Delivery, row) for row in rows]

    @again
    def prune(self, keep_s: float) -> int:
        """Remove finished deliveries older than ``keep_s`` seconds."""
        old = deliveries.c.finished_at < self._db.now - keep_s
        with self._db.write() as conn:
            return conn.execute(delete(deliveries).where(old)).rowcount

    @again
    def _change(self, webhook_id: str, owner: str | None, values: Mapping[str, Any]) -> Webhook:
        statement = (
            update(webhooks)
            .where(*_whose(webhook_id, owner))
            .values(**values)
            .returning(*columns_of(Webhook))
        )
        with self._db.write() as conn:
            row = conn.execute(statement).one_or_none()
        if row is None:
            raise NotFoundError("webhook", webhook_id)
        return webhook_of(row)

    def _owe(
        self, conn: Connection, webhook_id: str, event_type: str, data: Mapping[str, Any]
    ) -> Delivery:
        """One delivery; its id is the payload's and the webhook-id header's."""
        delivery_id = new_id("evt")
        now = float(conn.execute(select(self._db.now)).scalar_one())
        payload = {
            "id": delivery_id,
            "object": "event",
            "type": event_type,
            "created_at": int(now),
            "timestamp": datetime.fromtimestamp(now, UTC).isoformat().replace("+00:00", "Z"),
            "data": dict(data),
        }
        statement = (
            insert(deliveries)
            .values(
                id=delivery_id,
                webhook_id=webhook_id,
                type=event_type,
                payload=payload,
                state=PENDING,
                next_at=now,
                created_at=now,
            )
            .returning(*columns_of(Delivery))
        )
        return read_row(Delivery, conn.execute(statement).one())


def _secret() -> str:
    """A signing secret as Standard Webhooks writes it."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def _whose(webhook_id: str, owner: str | None) -> list[ColumnElement[bool]]:
    one = webhooks.c.id == webhook_id
    return [one] if owner is None else [one, webhooks.c.owner == owner]
