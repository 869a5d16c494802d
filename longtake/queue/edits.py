"""Changing a job that is there: flags, its place in the queue, and the request while it waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, and_, bindparam, func, select, update

from longtake.errors import ConflictError, NotFoundError, RequestError
from longtake.queue.database import Database
from longtake.queue.ledger import Ledger
from longtake.queue.records import Job, JobState
from longtake.queue.rows import columns_of, job_of
from longtake.queue.tables import jobs

REQUEST = frozenset({"request", "plan", "prompt", "model", "mode"})
ANY_TIME = frozenset({"tags", "starred"})
UNFINISHED = frozenset({"priority", "paused"})
QUEUED = REQUEST | {"position", "inputs"}
STEP_S = 1.0  # distance of neighbours once places are dealt out anew


def apply_changes(
    db: Database, conn: Connection, files: Ledger, job: Job, changes: Mapping[str, Any]
) -> Job:
    """Change ``job``, whose row is locked.

    ``tags`` and ``starred`` may change at any time, ``priority`` and ``paused`` until it is
    finished; ``position`` ("first", "last", {"before": id} or {"after": id}) and the request
    (``request``, ``plan``, ``prompt``, ``model``, ``mode``, and ``inputs``: ids of uploads it
    takes) while it is queued. Chunks that were made for the old request are forgotten.

    Raises:
        RequestError: an unknown field, or a position or priority that is none.
        ConflictError: the job's state does not allow it.
        NotFoundError: the neighbour is not a queued job of the same owner.
    """
    for name in changes:
        _check(job, name, changes[name])
    values = {name: changes[name] for name in changes if name not in ("position", "inputs")}
    if "tags" in values:
        values["tags"] = [*values["tags"]]
    if "position" in changes:
        values |= _place(db, conn, job, changes)
    if REQUEST & set(changes):
        files.drop_chunks(conn, job.id)
        values |= {"attempt": 0, "strikes": 0, "strike_chunk": None, "progress": {}}
    if changes.get("inputs"):
        files.check_free(conn, changes["inputs"], job.owner, job.id)
        files.adopt(conn, changes["inputs"], job.id)
    statement = (
        update(jobs)
        .where(jobs.c.id == job.id)
        .values(updated_at=db.now, **values)
        .returning(*columns_of(Job))
    )
    return job_of(conn.execute(statement).one())


def _check(job: Job, name: str, value: object) -> None:
    if name not in ANY_TIME | UNFINISHED | QUEUED:
        raise RequestError(name, value, "a video has no such field to change")
    if name == "priority" and not (isinstance(value, int) and 0 <= value <= 9):
        raise RequestError(name, value, "not a priority", "0 (first) to 9")
    if name in UNFINISHED and job.finished:
        raise ConflictError(f"{name} of a {job.state} video cannot be changed", "finished")
    if name in QUEUED and job.state != JobState.QUEUED:
        raise ConflictError(f"{name} can be changed while a video is queued only", "not_queued")


def _place(
    db: Database, conn: Connection, job: Job, changes: Mapping[str, Any]
) -> dict[str, object]:
    """Position and priority that put ``job`` where ``changes`` wants it among its owner's."""
    wanted = changes["position"]
    priority = changes.get("priority", job.priority)
    if wanted == "first":
        first = _edge(conn, job, priority, func.min)
        return {} if first is None else {"position": first - STEP_S}
    if wanted == "last":
        last = _edge(conn, job, priority, func.max)
        now = float(conn.execute(select(db.now)).scalar_one())
        return {"position": now if last is None else max(now, last + STEP_S)}
    if not (isinstance(wanted, Mapping) and len(wanted) == 1 and {*wanted} <= {"before", "after"}):
        raise RequestError(
            "position", wanted, "not a place", '"first", "last", {"before": id} or {"after": id}'
        )
    [(side, other_id)] = wanted.items()
    if other_id == job.id:
        raise RequestError("position", other_id, "is the video itself", "another queued video")
    for _ in range(2):
        position = _between(conn, job, str(other_id), side)
        if position is not None:
            return {"position": position[0], "priority": position[1]}
        _deal_out(conn, job, str(other_id))
    raise ConflictError("there is no room between these two videos")


def _others(job: Job, priority: int) -> Any:
    """Condition: other queued jobs of the same owner, queue and priority."""
    return and_(
        jobs.c.queue == job.queue,
        jobs.c.state == JobState.QUEUED,
        jobs.c.priority == priority,
        jobs.c.owner == job.owner,
        jobs.c.id != job.id,
    )


def _edge(conn: Connection, job: Job, priority: int, edge: Any) -> float | None:
    found = conn.execute(select(edge(jobs.c.position)).where(_others(job, priority))).scalar()
    return None if found is None else float(found)


def _neighbour(conn: Connection, job: Job, other_id: str) -> Any:
    row = conn.execute(
        select(jobs.c.position, jobs.c.priority).where(
            jobs.c.id == other_id,
            jobs.c.owner == job.owner,
            jobs.c.queue == job.queue,
            jobs.c.state == JobState.QUEUED,
            jobs.c.id != job.id,
        )
    ).one_or_none()
    if row is None:
        raise NotFoundError("queued video", other_id)
    return row


def _between(conn: Connection, job: Job, other_id: str, side: str) -> tuple[float, int] | None:
    """A place next to ``other_id``, and its priority; None where two have no room between them."""
    other = _neighbour(conn, job, other_id)
    others = _others(job, other.priority)
    if side == "before":
        beyond = jobs.c.position < other.position
        edge: Any = func.max(jobs.c.position)
        open_end = other.position - 2 * STEP_S
    else:
        beyond = jobs.c.position > other.position
        edge = func.min(jobs.c.position)
        open_end = other.position + 2 * STEP_S
    found = conn.execute(select(edge).where(others, beyond)).scalar()
    end = open_end if found is None else found
    middle = (other.position + end) / 2
    return None if middle in (other.position, end) else (middle, other.priority)


def _deal_out(conn: Connection, job: Job, other_id: str) -> None:
    """Give the owner's queued jobs of this priority places a step apart, in the same order."""
    priority = _neighbour(conn, job, other_id).priority
    rows = conn.execute(
        select(jobs.c.id, jobs.c.position)
        .where(_others(job, priority))
        .order_by(jobs.c.position, jobs.c.id)
        .with_for_update()
    ).all()
    last = rows[-1].position
    conn.execute(
        update(jobs).where(jobs.c.id == bindparam("one")).values(position=bindparam("place")),
        [
            {"one": row.id, "place": last - STEP_S * (len(rows) - 1 - index)}
            for index, row in enumerate(rows)
        ],
    )
