"""Reading jobs: one, a page, counts, and how long the queue is. Every list walks an index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Text,
    bindparam,
    cast,
    func,
    literal,
    select,
    true,
    tuple_,
    union_all,
)
from sqlalchemy.dialects.postgresql import JSONB

from longtake.errors import NotFoundError
from longtake.queue.choice import claimable
from longtake.queue.database import Database
from longtake.queue.events import NewEvent
from longtake.queue.ledger import Ledger
from longtake.queue.quotas import Usage, usage_in
from longtake.queue.records import AttemptRecord, ChunkRecord, Job, JobState
from longtake.queue.rows import columns_of, job_of, read_row
from longtake.queue.tables import attempts, chunks, events, jobs, owners

Order = Literal["asc", "desc"]
DELETED = "video.deleted"


@dataclass(frozen=True, slots=True)
class Filters:
    """Which jobs a page shows; what is None does not matter.

    Attributes:
        text: words that are all in the prompt, as parts of it, in any order and case.
        trashed: only those in the trash, or, by default, only those that are not.
        created_after, created_before: seconds since 1970, the first included.
    """

    state: JobState | None = None
    model: str | None = None
    text: str | None = None
    batch_id: str | None = None
    parent_id: str | None = None
    starred: bool | None = None
    trashed: bool | None = False
    tag: str | None = None
    seed: int | None = None
    created_after: float | None = None
    created_before: float | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Some jobs, and whether there are more."""

    jobs: list[Job]
    has_more: bool


class Listings:
    """The reading side of the store; ``owner`` None sees everybody's."""

    def __init__(self, db: Database, files: Ledger) -> None:
        self._db = db
        self._files = files
        self._get = select(*columns_of(Job)).where(jobs.c.id == bindparam("id"))
        self._chunks = (
            select(*columns_of(ChunkRecord))
            .where(chunks.c.job_id == bindparam("id"))
            .order_by(chunks.c.index)
        )

    def get(self, job_id: str, owner: str | None = None) -> Job:
        """One job.

        Raises:
            NotFoundError: there is none, or it is another owner's.
        """
        with self._db.read() as conn:
            row = conn.execute(self._get, {"id": job_id}).one_or_none()
        if row is None or (owner is not None and row.owner != owner):
            raise NotFoundError("video", job_id)
        return job_of(row)

    def page(
        self,
        owner: str | None,
        after: str | None = None,
        limit: int = 20,
        order: Order = "desc",
        filters: Filters | None = None,
    ) -> Page:
        """Jobs by time of creation, from after the one named, which may be deleted by now.

        Raises:
            NotFoundError: ``after`` names no job of this owner.
        """
        place = tuple_(jobs.c.created_at, jobs.c.id)
        statement = select(*columns_of(Job)).where(*self._conditions(filters or Filters()))
        if owner is not None:
            statement = statement.where(jobs.c.owner == owner)
        if after is not None:
            last = tuple_(self._created_at(after, owner), after)
            statement = statement.where(place < last if order == "desc" else place > last)
        if order == "desc":
            statement = statement.order_by(jobs.c.created_at.desc(), jobs.c.id.desc())
        else:
            statement = statement.order_by(jobs.c.created_at, jobs.c.id)
        with self._db.read() as conn:
            rows = conn.execute(statement.limit(limit + 1)).all()
        return Page([job_of(row) for row in rows[:limit]], len(rows) > limit)

    def position(self, job: Job) -> int | None:
        """How many jobs would be claimed before this one; None for one that is not queued."""
        return self.positions([job]).get(job.id)

    def positions(self, page: Iterable[Job]) -> dict[str, int]:
        """``position`` of every queued job of a page, paused ones apart, in two statements.

        Owners take turns: before the k-th job of one owner, every other with as many jobs of that
        priority has had k, or k - 1 who was served more recently. Which model is loaded is not
        taken into account.
        """
        queued = [job for job in page if job.state == JobState.QUEUED and not job.paused]
        if not queued:
            return {}
        waiting = (
            select(jobs.c.queue, jobs.c.priority, jobs.c.owner, func.count().label("waiting"))
            .where(jobs.c.queue.in_({job.queue for job in queued}), claimable(self._db))
            .group_by(jobs.c.queue, jobs.c.priority, jobs.c.owner)
            .subquery()
        )
        turns = select(waiting, func.coalesce(owners.c.served_at, 0.0).label("served_at"))
        turns = turns.select_from(waiting.outerjoin(owners, owners.c.owner == waiting.c.owner))
        groups = defaultdict(list)
        with self._db.read() as conn:
            between = {row.id: row.ahead for row in conn.execute(self._steps(queued))}
            for row in conn.execute(turns):
                groups[row.queue].append(row)
        found: dict[str, int] = {}
        for line in _lines(queued):
            ahead = 0
            for job in line:
                ahead += between[job.id]
                found[job.id] = _turns(job, ahead, groups[job.queue])
        return found

    def counts(self, owner: str | None = None) -> dict[JobState, int]:
        """How many jobs are in each state."""
        statement = select(jobs.c.state, func.count()).group_by(jobs.c.state)
        if owner is not None:
            statement = statement.where(jobs.c.owner == owner)
        with self._db.read() as conn:
            found = {JobState(state): count for state, count in conn.execute(statement)}
        return {state: found.get(state, 0) for state in JobState}

    def queue_age(self) -> float:
        """Seconds since the oldest job that could be claimed was made; 0 for an empty queue."""
        oldest = select(self._db.now - func.min(jobs.c.created_at)).where(claimable(self._db))
        with self._db.read() as conn:
            return max(conn.execute(oldest).scalar() or 0.0, 0.0)

    def usage(self, owner: str) -> Usage:
        """What counts against an owner's quotas."""
        with self._db.read() as conn:
            return usage_in(self._db, conn, self._files, owner)

    def chunks(self, job_id: str) -> list[ChunkRecord]:
        """The stored chunks of a job, in order."""
        with self._db.read() as conn:
            rows = conn.execute(self._chunks, {"id": job_id}).all()
        return [read_row(ChunkRecord, row) for row in rows]

    def attempts(self, job_id: str) -> list[AttemptRecord]:
        """The tries of a job so far, in order."""
        statement = (
            select(*columns_of(AttemptRecord))
            .where(attempts.c.job_id == job_id)
            .order_by(attempts.c.fence)
        )
        with self._db.read() as conn:
            return [read_row(AttemptRecord, row) for row in conn.execute(statement)]

    def _conditions(self, filters: Filters) -> list[ColumnElement[bool]]:
        found: list[ColumnElement[bool]] = []
        for name in ("state", "model", "batch_id", "parent_id"):
            value = getattr(filters, name)
            if value is not None:
                found.append(jobs.c[name] == str(value))
        for word in dict.fromkeys((filters.text or "").split()):
            found.append(jobs.c.prompt.icontains(word, autoescape=True))
        if filters.starred is not None:
            found.append(jobs.c.starred if filters.starred else ~jobs.c.starred)
        if filters.trashed is not None:
            trashed = jobs.c.trashed_at
            found.append(trashed.is_not(None) if filters.trashed else trashed.is_(None))
        if filters.tag is not None:
            found.append(self._has_tag(filters.tag))
        if filters.seed is not None:
            # as text: a seed may be larger than any column type
            found.append(cast(jobs.c.request["seed"].as_string(), Text) == str(filters.seed))
        if filters.created_after is not None:
            found.append(jobs.c.created_at >= filters.created_after)
        if filters.created_before is not None:
            found.append(jobs.c.created_at < filters.created_before)
        return found

    def _has_tag(self, tag: str) -> ColumnElement[bool]:
        if self._db.dialect == "postgresql":
            return cast(jobs.c.tags, JSONB).contains([tag])
        each = func.json_each(jobs.c.tags).table_valued("value")
        return select(1).select_from(each).where(cast(each.c.value, Text) == tag).exists()

    def _created_at(self, job_id: str, owner: str | None) -> float:
        """When a job was made, also one that is deleted: the log tells."""
        one = select(jobs.c.owner, jobs.c.created_at).where(jobs.c.id == job_id)
        gone = select(events.c.owner, events.c.data).where(
            events.c.job_id == job_id, events.c.type == DELETED
        )
        with self._db.read() as conn:
            row = conn.execute(one).one_or_none()
            if row is not None:
                whose, created_at = row.owner, row.created_at
            else:
                tombstone = conn.execute(gone).first()
                if tombstone is None:
                    raise NotFoundError("video", job_id)
                whose, created_at = tombstone.owner, tombstone.data["created_at"]
        if owner is not None and whose != owner:
            raise NotFoundError("video", job_id)
        return float(created_at)

    def _steps(self, queued: Sequence[Job]) -> Any:
        """How many jobs of the same owner and priority lie between each job and the one before.

        Each part of the queue is counted once, however many jobs of it are asked for.
        """
        parts = []
        for line in _lines(queued):
            for before, job in zip([None, *line], line, strict=False):
                parts.append(
                    select(literal(job.id).label("id"), func.count().label("ahead")).where(
                        jobs.c.queue == job.queue,
                        claimable(self._db),
                        jobs.c.priority == job.priority,
                        jobs.c.owner == job.owner,
                        jobs.c.position < job.position,
                        jobs.c.position >= before.position if before is not None else true(),
                    )
                )
        return union_all(*parts)


def deleted(job: Job) -> NewEvent:
    """The event of a deleted job, which keeps its place for those who page through a list."""
    return NewEvent(job.id, job.owner, DELETED, {"created_at": job.created_at})


def _lines(queued: Iterable[Job]) -> list[list[Job]]:
    """Jobs by queue, owner and priority, each list in the order of its places."""
    lines: dict[tuple[str, str, int], list[Job]] = defaultdict(list)
    for job in sorted(queued, key=lambda one: one.position):
        lines[job.queue, job.owner, job.priority].append(job)
    return list(lines.values())


def _turns(job: Job, own_ahead: int, groups: Sequence[Any]) -> int:
    """Jobs before ``job``, whose owner has ``own_ahead`` before it, when owners take turns."""
    served_at = max((one.served_at for one in groups if one.owner == job.owner), default=0.0)
    before = own_ahead
    for one in groups:
        if one.priority < job.priority:
            before += one.waiting
        elif one.priority == job.priority and one.owner != job.owner:
            first = (one.served_at, one.owner) < (served_at, job.owner)
            before += min(one.waiting, own_ahead + 1 if first else own_ahead)
    return before
