"""Who works on what: claim, end and free, each by a statement that carries the fence.

A fence grows with every claim. A write names the fence it was claimed under and finds no row once
the job is another's, queued again, finished or deleted: then ``LeaseLostError``, and what was made
is discarded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    insert,
    select,
    update,
)

from longtake.errors import LeaseLostError
from longtake.queue.choice import claims
from longtake.queue.database import Database, Turn, again
from longtake.queue.endings import Endings, Error
from longtake.queue.events import Events, NewEvent
from longtake.queue.held import lost
from longtake.queue.ledger import Ledger
from longtake.queue.policy import Policy
from longtake.queue.records import (
    Artifact,
    ErrorCode,
    Job,
    JobState,
)
from longtake.queue.rows import columns_of, job_of
from longtake.queue.tables import attempts, jobs, owners
from longtake.queue.transitions import moved

EXPIRY_LIMIT = 100


class Leases:
    """The worker's side of the store."""

    def __init__(
        self, db: Database, events: Events, files: Ledger, endings: Endings, policy: Policy
    ) -> None:
        self._db = db
        self._events = events
        self._files = files
        self._endings = endings
        self._policy = policy
        # made once: what every claim and renewal runs
        self._claims = claims(db)
        self._begin = insert(attempts).values(started_at=db.now)
        self._last = update(jobs).where(jobs.c.id == bindparam("whose"))
        self._serve = (
            update(owners).where(owners.c.owner == bindparam("whose")).values(served_at=db.now)
        )

    # ---- claim -------------------------------------------------------------------------------

    @again
    def claim(
        self,
        worker_id: str,
        queue: str,
        *,
        loaded_model: str | None = None,
        affinity_s: float = 0.0,
        lease_s: float = 60.0,
    ) -> Job | None:
        """Take the next job of ``queue`` for ``lease_s`` seconds; None where there is none.

        Order: priority; the owner who was served longest ago; jobs of the loaded model, until
        another has waited ``affinity_s``; position. Leases that ran out are freed first.
        """
        with self._db.write() as conn:
            self._db.take_turn(conn, Turn.CLAIM, queue)
            entries = [event for _, event in self._free_expired(conn, queue)]
            values = {"from_queue": queue, "worker": worker_id, "lease_s": lease_s}
            if loaded_model is not None:
                values |= {"loaded_model": loaded_model, "affinity_s": affinity_s}
            # a row that somebody edits right now is passed over first, and waited for if it is
            # the only one
            job = moved(conn, self._claims[loaded_model is not None, True], values)
            if job is None:
                job = moved(conn, self._claims[loaded_model is not None, False], values)
            if job is not None:
                self._begin_attempt(conn, job, worker_id)
                started = NewEvent(job.id, job.owner, "video.started", {"attempt": job.attempt})
                entries.append(started)
            self._events.extend(conn, entries)
        return job

    def _begin_attempt(self, conn: Connection, job: Job, worker_id: str) -> None:
        conn.execute(self._begin, {"job_id": job.id, "fence": job.fence, "worker": worker_id})
        conn.execute(self._serve, {"whose": job.owner})

    # ---- end ---------------------------------------------------------------------------------

    @again
    def complete(
        self,
        job_id: str,
        fence: int,
        artifacts: Sequence[Artifact],
        details: Mapping[str, Any] | None = None,
        progress: Mapping[str, Any] | None = None,
    ) -> Job:
        """Publish the results. A job is completed once; the same attempt may repeat its call.

        ``details`` goes into the event, ``progress`` is the last. Files of lost attempts become
        garbage.

        Raises:
            LeaseLostError: the job is not this attempt's any more.
        """
        with self._db.write() as conn:
            job = self._held(conn, job_id, fence, JobState.COMPLETED)
            if job.state == JobState.COMPLETED:
                return job
            if progress is not None:
                conn.execute(self._last, {"whose": job_id, "progress": dict(progress)})
            self._files.attach(conn, job_id, artifacts)
            self._files.sweep(conn, job_id)
            ended = self._endings.finish(conn, job, JobState.COMPLETED, details=details)
            return self._commit(conn, ended)

    @again
    def fail(self, job_id: str, fence: int, error: Error) -> Job:
        """Give the job up; its chunks stay, so that ``retry`` can go on from them.

        Raises:
            LeaseLostError: the job is not this attempt's any more.
        """
        with self._db.write() as conn:
            job = self._held(conn, job_id, fence, JobState.FAILED)
            if job.state == JobState.FAILED:
                return job
            return self._commit(conn, self._endings.finish(conn, job, JobState.FAILED, error))

    @again
    def cancelled(self, job_id: str, fence: int, artifacts: Sequence[Artifact] = ()) -> Job:
        """The engine has stopped at its owner's wish; ``artifacts`` are of the chunks it kept.

        Raises:
            LeaseLostError: the job is not this attempt's any more.
        """
        with self._db.write() as conn:
            job = self._held(conn, job_id, fence, JobState.CANCELLED)
            if job.state == JobState.CANCELLED:
                return job
            return self._commit(conn, self._endings.cancel(conn, job, artifacts))

    @again
    def release(
        self,
        job_id: str,
        fence: int,
        *,
        counts: bool,
        not_before_in_s: float = 0.0,
        outcome: str = "released",
        error: Error | None = None,
        strike_chunk: int | None = None,
        poison_limit: int | None = None,
    ) -> Job:
        """Give the job back to the queue, after a warm stop or an error that is tried again.

        Args:
            counts: whether this try counts; the last that may ends the job as failed.
            not_before_in_s: how long nobody may claim it.
            outcome: one word for the attempts' table and the event's reason.
            strike_chunk: the chunk in one of whose steps the engine died; as often as
                ``poison_limit`` without a chunk stored between, and the job is failed as poison.

        Raises:
            LeaseLostError: the job is not this attempt's any more.
        """
        with self._db.write() as conn:
            job = self._held(conn, job_id, fence)
            if job.cancel_requested:
                return self._commit(conn, self._endings.cancel(conn, job))
            strikes = _strikes(job, strike_chunk)
            limit = poison_limit if poison_limit is not None else self._policy.poison_limit
            ending: Error | None = None
            if strike_chunk is not None and strikes >= limit:
                ending = {
                    "code": ErrorCode.POISON.value,
                    "message": f"the engine died {strikes} times in a step of chunk "
                    f"{strike_chunk} without getting further",
                }
            elif counts and job.attempt >= job.max_attempts:
                ending = error or {
                    "code": ErrorCode.INTERNAL.value,
                    "message": f"given up after {job.attempt} tries",
                }
            if ending is not None:
                return self._commit(conn, self._endings.finish(conn, job, JobState.FAILED, ending))
            self._endings.close_attempt(conn, job, outcome, error)
            values: dict[str, object] = {
                "attempt": job.attempt if counts else max(job.attempt - 1, 0),
                "not_before": self._db.now + not_before_in_s if not_before_in_s else 0.0,
            }
            if strike_chunk is not None:
                values |= {"strikes": strikes, "strike_chunk": strike_chunk}
            return self._commit(conn, self._endings.requeue(conn, job, outcome, values))

    @again
    def reclaim(self, worker_ids: Collection[str], *, counts: bool = True) -> list[str]:
        """Free at once what workers hold that are known to be gone; returns the jobs' ids."""
        with self._db.write() as conn:
            held = and_(jobs.c.state == JobState.RUNNING, jobs.c.lease_owner.in_(worker_ids))
            freed = self._free(conn, held, counts=counts)
            self._events.extend(conn, [event for _, event in freed])
        return [job.id for job, _ in freed]

    @again
    def expire(self) -> list[Job]:
        """Free leases that ran out; jobs whose tries are used up fail."""
        with self._db.write() as conn:
            freed = self._free_expired(conn, None)
            self._events.extend(conn, [event for _, event in freed])
        return [job for job, _ in freed]

    def _free_expired(self, conn: Connection, queue: str | None) -> list[tuple[Job, NewEvent]]:
        late = and_(jobs.c.state == JobState.RUNNING, jobs.c.lease_until < self._db.now)
        if queue is not None:
            late = and_(late, jobs.c.queue == queue)
        return self._free(conn, late, counts=True)

    def _free(
        self, conn: Connection, which: ColumnElement[bool], *, counts: bool
    ) -> list[tuple[Job, NewEvent]]:
        # by owner, so that two who charge the same owners do so in the same order
        rows = conn.execute(
            select(*columns_of(Job))
            .where(which)
            .order_by(jobs.c.owner, jobs.c.id)
            .limit(EXPIRY_LIMIT)
            .with_for_update(skip_locked=True)
        ).all()
        freed = (self._endings.lose(conn, job_of(row), counts=counts) for row in rows)
        return [one for one in freed if one is not None]

    def _held(
        self, conn: Connection, job_id: str, fence: int, ended: JobState = JobState.RUNNING
    ) -> Job:
        """The job while this attempt holds it, or once this attempt has brought it to ``ended``."""
        row = conn.execute(
            select(*columns_of(Job))
            .where(
                jobs.c.id == job_id,
                jobs.c.fence == fence,
                jobs.c.state.in_([JobState.RUNNING, ended]),
            )
            .with_for_update()
        ).one_or_none()
        if row is None:
            raise lost(job_id, fence)
        return job_of(row)

    def _commit(self, conn: Connection, ended: tuple[Job, NewEvent] | None) -> Job:
        if ended is None:
            raise LeaseLostError("the job is not held any more")
        job, event = ended
        self._events.extend(conn, [event])
        return job


def _strikes(job: Job, chunk: int | None) -> int:
    if chunk is None:
        return job.strikes
    return job.strikes + 1 if chunk == job.strike_chunk else 1
