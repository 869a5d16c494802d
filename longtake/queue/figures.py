"""Figures about the whole service for its metrics, counted by the database.

What grows for ever is counted over the last hour, so that the answer is the same from every API
process and after a restart, and does not jump when videos are deleted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import Connection, Select, func, select

from longtake.queue.database import Database
from longtake.queue.records import JobState
from longtake.queue.tables import attempts, chunks, deliveries, jobs, outbox

WINDOW_S = 3600
MAX_CHUNKS = 5000  # newest chunks that seconds by stage are added up from


@dataclass(frozen=True, slots=True)
class Figures:
    """One look.

    Attributes:
        jobs: by (queue, state).
        oldest_s: seconds since the oldest queued job of each queue was made.
        attempts: ended in the last hour, by outcome; ``lost`` are leases that were lost.
        finished: jobs that ended in the last hour, by state.
        stage_s: seconds by stage, of chunks of jobs that were completed in the last hour.
        frames: pixel frames of those chunks.
        deliveries: webhook deliveries by state.
        ticks: outbox rows that wait for the broker.
    """

    jobs: dict[tuple[str, str], int]
    oldest_s: dict[str, float]
    attempts: dict[str, int]
    finished: dict[str, int]
    stage_s: dict[str, float]
    frames: int
    deliveries: dict[str, int]
    ticks: int


def read_figures(db: Database) -> Figures:
    """All figures, in one transaction."""
    since = db.now - WINDOW_S
    by_state = select(jobs.c.queue, jobs.c.state, func.count()).group_by(jobs.c.queue, jobs.c.state)
    oldest = (
        select(jobs.c.queue, db.now - func.min(jobs.c.created_at))
        .where(jobs.c.state == JobState.QUEUED)
        .group_by(jobs.c.queue)
    )
    ended = (
        select(attempts.c.outcome, func.count())
        .where(attempts.c.ended_at >= since, attempts.c.outcome.is_not(None))
        .group_by(attempts.c.outcome)
    )
    finished = (
        select(jobs.c.state, func.count())
        .where(jobs.c.completed_at >= since)
        .group_by(jobs.c.state)
    )
    owed = select(deliveries.c.state, func.count()).group_by(deliveries.c.state)
    made = (
        select(chunks.c.timings, chunks.c.frames)
        .join(jobs, jobs.c.id == chunks.c.job_id)
        .where(jobs.c.completed_at >= since, jobs.c.state == JobState.COMPLETED)
        .limit(MAX_CHUNKS)
    )
    with db.read() as conn:
        counted = {(queue, str(state)): n for queue, state, n in conn.execute(by_state)}
        ages = {queue: max(float(age), 0.0) for queue, age in conn.execute(oldest)}
        seconds: dict[str, float] = defaultdict(float)
        frames = 0
        for timings, count in conn.execute(made):
            frames += count
            for stage, taken in timings.items():
                seconds[stage] += taken
        return Figures(
            jobs=counted,
            oldest_s=ages,
            attempts=_counts(conn, ended),
            finished=_counts(conn, finished),
            stage_s=dict(seconds),
            frames=frames,
            deliveries=_counts(conn, owed),
            ticks=conn.execute(select(func.count()).select_from(outbox)).scalar_one(),
        )


def _counts(conn: Connection, statement: Select[str, int]) -> dict[str, int]:
    return {str(name): count for name, count in conn.execute(statement)}
