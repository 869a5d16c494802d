"""The one place where a job changes state: one UPDATE that TRANSITIONS allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, update

from longtake.queue.database import Database
from longtake.queue.records import TRANSITIONS, Job, JobState
from longtake.queue.rows import columns_of, job_of
from longtake.queue.tables import jobs


def transition(
    db: Database,
    origins: Iterable[JobState],
    target: JobState,
    *where: ColumnElement[bool],
    values: Mapping[str, object],
    returning: Sequence[ColumnElement[Any]] = columns_of(Job),
) -> Any:
    """UPDATE that moves the job that ``where`` names from one of ``origins`` to ``target``.

    ``returning`` is what it tells of the job afterwards.

    Raises:
        ValueError: TRANSITIONS does not allow the move.
    """
    states = sorted(origins)
    for origin in states:
        if target not in TRANSITIONS[origin]:
            raise ValueError(f"a {origin} job cannot become {target}")
    return (
        update(jobs)
        .where(jobs.c.state.in_(states), *where)
        .values(state=target.value, updated_at=db.now, **values)
        .returning(*returning)
    )


def move(
    db: Database,
    conn: Connection,
    origins: Iterable[JobState],
    target: JobState,
    *where: ColumnElement[bool],
    values: Mapping[str, object],
) -> Job | None:
    """Run a ``transition``: the job afterwards, or None where none is in one of ``origins``."""
    return moved(conn, transition(db, origins, target, *where, values=values), {})


def moved(conn: Connection, statement: Any, values: Mapping[str, object]) -> Job | None:
    """Run a ``transition`` that was made before, with its parameters."""
    row = conn.execute(statement, values).one_or_none()
    return job_of(row) if row is not None else None
