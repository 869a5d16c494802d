"""Ticks to send: written with the job, sent by whoever reaches the broker, lost without harm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, and_, delete, insert, or_, select

from longtake.queue.choice import claimable
from longtake.queue.database import Database, again
from longtake.queue.records import JobState
from longtake.queue.tables import jobs, outbox


@dataclass(frozen=True, slots=True)
class Tick:
    """One row of the outbox: ``queue`` has work."""

    id: int
    queue: str


class Outbox:
    """Ticks that wait for the broker."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._insert = insert(outbox).values(created_at=db.now)

    def add(self, conn: Connection, queues: Iterable[str]) -> None:
        """One tick for every different queue."""
        rows = [{"queue": queue} for queue in dict.fromkeys(queues)]
        if rows:
            conn.execute(self._insert, rows)

    def pending(self, limit: int = 500) -> list[Tick]:
        """Ticks not sent yet, oldest first."""
        statement = select(outbox.c.id, outbox.c.queue).order_by(outbox.c.id).limit(limit)
        with self._db.read() as conn:
            return [Tick(row.id, row.queue) for row in conn.execute(statement)]

    @again
    def sent(self, ids: Sequence[int]) -> None:
        """Forget ticks that the broker has."""
        if ids:
            with self._db.write() as conn:
                conn.execute(delete(outbox).where(outbox.c.id.in_(ids)))

    def queues_with_work(self) -> list[str]:
        """Queues from which a worker could claim something now."""
        waiting = claimable(self._db)
        left = and_(jobs.c.state == JobState.RUNNING, jobs.c.lease_until < self._db.now)
        statement = select(jobs.c.queue).where(or_(waiting, left)).distinct()
        with self._db.read() as conn:
            return sorted(conn.execute(statement).scalars())
