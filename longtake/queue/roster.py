"""Which workers there are, by their own word, refreshed every few seconds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict

from sqlalchemy import delete, func, select

from longtake.queue.database import Database, again
from longtake.queue.records import WorkerRecord
from longtake.queue.rows import columns_of, read_row
from longtake.queue.tables import workers

Ids = list[str]


class Roster:
    """The workers' table."""

    def __init__(self, db: Database) -> None:
        self._db = db

    @again
    def beat(self, worker: WorkerRecord) -> None:
        """Say that a worker is there; ``seen_at`` is the database's time, not the worker's."""
        values = {**asdict(worker), "seen_at": self._db.now}
        changes = {name: value for name, value in values.items() if name != "id"}
        statement = (
            self._db.insert(workers)
            .values(**values)
            .on_conflict_do_update(index_elements=["id"], set_=changes)
        )
        with self._db.write() as conn:
            conn.execute(statement)

    def list(self, fresh_s: float | None = None) -> list[WorkerRecord]:
        """Workers seen within ``fresh_s`` seconds, or all that were never removed."""
        statement = select(*columns_of(WorkerRecord)).order_by(workers.c.id)
        if fresh_s is not None:
            statement = statement.where(workers.c.seen_at >= self._db.now - fresh_s)
        with self._db.read() as conn:
            return [read_row(WorkerRecord, row) for row in conn.execute(statement)]

    def count(self, queue: str) -> int:
        """How many workers of a queue have signed on and not off."""
        statement = select(func.count()).where(workers.c.queue == queue)
        with self._db.read() as conn:
            return conn.execute(statement).scalar_one()

    @again
    def remove(self, worker_id: str) -> None:
        """A worker has left."""
        with self._db.write() as conn:
            conn.execute(delete(workers).where(workers.c.id == worker_id))

    @again
    def gone(self, host: str, alive_boot_ids: Collection[str]) -> Ids:
        """Remove workers of ``host`` that are not among the living; returns their ids."""
        statement = (
            delete(workers)
            .where(workers.c.host == host, workers.c.boot_id.not_in(alive_boot_ids))
            .returning(workers.c.id)
        )
        with self._db.write() as conn:
            return sorted(conn.execute(statement).scalars())

    @again
    def prune(self, older_than_s: float) -> Ids:
        """Remove workers not seen for ``older_than_s`` seconds; returns their ids."""
        statement = (
            delete(workers)
            .where(workers.c.seen_at < self._db.now - older_than_s)
            .returning(workers.c.id)
        )
        with self._db.write() as conn:
            return sorted(conn.execute(statement).scalars())
