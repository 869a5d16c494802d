"""Batches: a manifest's jobs under one id, and the items that made no job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select, tuple_

from longtake.errors import NotFoundError
from longtake.queue.database import Database, again
from longtake.queue.ids import new_id
from longtake.queue.records import Batch, Job, JobState
from longtake.queue.rows import batch_of, columns_of, job_of
from longtake.queue.tables import batches, jobs


@dataclass(frozen=True, slots=True)
class BatchPage:
    """Some batches, and whether there are more."""

    batches: list[Batch]
    has_more: bool


class Batches:
    """Make and read batches; ``submit(..., batch=...)`` writes one together with its jobs."""

    def __init__(self, db: Database) -> None:
        self._db = db

    @staticmethod
    def new(
        owner: str, name: str | None, total: int, invalid: Sequence[Mapping[str, Any]] = ()
    ) -> Batch:
        """A batch that is not stored yet; the store sets ``created_at``."""
        return Batch(new_id("batch"), owner, name, 0.0, total, tuple(dict(one) for one in invalid))

    @again
    def create(
        self,
        owner: str,
        name: str | None,
        total: int,
        invalid: Sequence[Mapping[str, Any]] = (),
    ) -> Batch:
        """Store a batch whose jobs come later, or never."""
        with self._db.write() as conn:
            return self.add(conn, self.new(owner, name, total, invalid))

    def add(self, conn: Connection, batch: Batch) -> Batch:
        """Store a batch in the caller's transaction."""
        statement = (
            insert(batches)
            .values(
                id=batch.id,
                owner=batch.owner,
                name=batch.name,
                created_at=self._db.now,
                total=batch.total,
                invalid=list(batch.invalid),
            )
            .returning(*columns_of(Batch))
        )
        return batch_of(conn.execute(statement).one())

    def get(self, batch_id: str, owner: str | None = None) -> Batch:
        """One batch.

        Raises:
            NotFoundError: there is none, or it is another owner's.
        """
        statement = select(*columns_of(Batch)).where(batches.c.id == batch_id)
        if owner is not None:
            statement = statement.where(batches.c.owner == owner)
        with self._db.read() as conn:
            row = conn.execute(statement).one_or_none()
        if row is None:
            raise NotFoundError("batch", batch_id)
        return batch_of(row)

    def page(self, owner: str | None, after: str | None = None, limit: int = 20) -> BatchPage:
        """Batches, newest first, from after the one named.

        Raises:
            NotFoundError: ``after`` names none.
        """
        place = tuple_(batches.c.created_at, batches.c.id)
        statement = select(*columns_of(Batch))
        if owner is not None:
            statement = statement.where(batches.c.owner == owner)
        if after is not None:
            last = self.get(after, owner)
            statement = statement.where(place < tuple_(last.created_at, last.id))
        newest = batches.c.created_at.desc(), batches.c.id.desc()
        with self._db.read() as conn:
            rows = conn.execute(statement.order_by(*newest).limit(limit + 1)).all()
        return BatchPage([batch_of(row) for row in rows[:limit]], len(rows) > limit)

    def results(self, batch_id: str) -> list[Job]:
        """The jobs of a batch, in the manifest's order; deleted ones are missing."""
        statement = (
            select(*columns_of(Job)).where(jobs.c.batch_id == batch_id).order_by(jobs.c.batch_index)
        )
        with self._db.read() as conn:
            return [job_of(row) for row in conn.execute(statement)]

    def counts(self, ids: Sequence[str]) -> dict[str, dict[JobState, int]]:
        """How many jobs of each batch are in each state that any is in."""
        statement = (
            select(jobs.c.batch_id, jobs.c.state, func.count())
            .where(jobs.c.batch_id.in_(ids))
            .group_by(jobs.c.batch_id, jobs.c.state)
        )
        found: dict[str, dict[JobState, int]] = {one: {} for one in ids}
        with self._db.read() as conn:
            for batch_id, state, count in conn.execute(statement):
                found[batch_id][JobState(state)] = count
        return found
