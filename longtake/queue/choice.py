"""Which job is next: by priority, owner served longest ago, loaded model, then place."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Float, Select, String, and_, bindparam, case, func, select

from longtake.queue.database import Database
from longtake.queue.records import JobState
from longtake.queue.tables import jobs, owners
from longtake.queue.transitions import transition

# how many of an owner's next jobs are looked at for one of the loaded model
AFFINITY_WINDOW = 100


def claimable(db: Database, table: Any = jobs) -> ColumnElement[bool]:
    """Condition: a worker could take the job now."""
    return and_(
        table.c.state == JobState.QUEUED,
        ~table.c.paused,
        table.c.not_before <= db.now,
    )


def next_job(db: Database, *, by_model: bool) -> Select[tuple[str]]:
    """SELECT the id of the job that is to be claimed next, of the queue ``from_queue``.

    ``by_model`` prefers jobs of ``loaded_model`` until another has waited ``affinity_s``. Every
    step walks ``ix_jobs_claim``, so a long queue costs no more than a short one.
    """
    queue = bindparam("from_queue", type_=String)
    one, other = jobs.alias("one"), jobs.alias("other")
    priority = (
        select(func.min(one.c.priority))
        .where(one.c.queue == queue, claimable(db, one))
        .scalar_subquery()
    )
    owner = (
        select(owners.c.owner)
        .where(
            select(1)
            .where(
                other.c.queue == queue,
                claimable(db, other),
                other.c.priority == priority,
                other.c.owner == owners.c.owner,
            )
            .exists()
        )
        .order_by(owners.c.served_at, owners.c.owner)
        .limit(1)
        .scalar_subquery()
    )
    place = (jobs.c.position, jobs.c.id)
    candidates = (
        select(jobs.c.id)
        .where(
            jobs.c.queue == queue,
            claimable(db),
            jobs.c.priority == priority,
            jobs.c.owner == owner,
        )
        .order_by(*place)
    )
    if not by_model:
        return candidates.limit(1)
    age_s = db.now - jobs.c.created_at
    waits = and_(
        jobs.c.model != bindparam("loaded_model", type_=String),
        age_s < bindparam("affinity_s", type_=Float(53)),
    )
    window = candidates.limit(AFFINITY_WINDOW).subquery()
    return (
        select(jobs.c.id)
        .where(jobs.c.id.in_(select(window.c.id)))
        .order_by(case((waits, 1), else_=0), *place)
        .limit(1)
    )


def claims(db: Database) -> dict[tuple[bool, bool], Any]:
    """UPDATEs that take the next job for ``worker`` and ``lease_s``, by (by_model, skip_locked)."""
    lease_s = bindparam("lease_s", type_=Float(53))
    values = {
        "lease_owner": bindparam("worker", type_=String),
        "lease_until": db.now + lease_s,
        "fence": jobs.c.fence + 1,
        "attempt": jobs.c.attempt + 1,
        "started_at": func.coalesce(jobs.c.started_at, db.now),
    }
    made = {}
    for by_model in (False, True):
        for skip in (True, False):
            choice = next_job(db, by_model=by_model).with_for_update(skip_locked=skip)
            made[by_model, skip] = transition(
                db,
                [JobState.QUEUED],
                JobState.RUNNING,
                jobs.c.id == choice.scalar_subquery(),
                values=values,
            )
    return made
