"""What belongs to the end of an attempt or a job, whoever brings it about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Float, func, literal, null, select, update

from longtake.queue.database import Database
from longtake.queue.events import Events, NewEvent
from longtake.queue.ledger import Ledger
from longtake.queue.policy import Policy
from longtake.queue.records import Artifact, ArtifactKind, ErrorCode, Job, JobState
from longtake.queue.subscriptions import Subscriptions
from longtake.queue.tables import attempts, chunks, jobs, usage
from longtake.queue.transitions import move

HOUR_S = 3600
Error = Mapping[str, Any]
LOST: Error = {
    "code": ErrorCode.WORKER_LOST.value,
    "message": "workers were lost as often as the job may be tried",
}


class Endings:
    """Close attempts, finish jobs, and say so to the log and to webhooks."""

    def __init__(
        self,
        db: Database,
        events: Events,
        files: Ledger,
        webhooks: Subscriptions,
        policy: Policy,
    ) -> None:
        self._db = db
        self._events = events
        self._files = files
        self._webhooks = webhooks
        self._policy = policy

    def finish(
        self,
        conn: Connection,
        job: Job,
        target: JobState,
        error: Error | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> tuple[Job, NewEvent] | None:
        """Move ``job`` as it was read to a terminal state; the event is for the caller to append.

        Returns None where the job has moved on, or another attempt has it.
        """
        keep_s = self._policy.retention_s
        done = move(
            self._db,
            conn,
            [job.state],
            target,
            jobs.c.id == job.id,
            jobs.c.fence == job.fence,
            values={
                "completed_at": self._db.now,
                "expires_at": self._db.now + keep_s if keep_s else null(),
                "lease_owner": None,
                "lease_until": None,
                "cancel_requested": False,
                "error": dict(error) if error is not None else None,
            },
        )
        if done is None:
            return None
        event_type = f"video.{target}"
        if job.state == JobState.RUNNING:
            self.close_attempt(conn, job, target.value, error)
        self._events.drop_fleeting(conn, job.id)
        self._webhooks.enqueue(conn, job.owner, event_type, job.id)
        data = dict(details or {}) | ({"error": dict(error)} if error is not None else {})
        return done, NewEvent(job.id, job.owner, event_type, data)

    def cancel(
        self, conn: Connection, job: Job, kept: Sequence[Artifact] = ()
    ) -> tuple[Job, NewEvent] | None:
        """Finish a job as cancelled; its chunks go unless they were to be kept.

        ``kept`` is the video of the finished chunks and what belongs to it; its length goes into
        the job's progress.
        """
        if kept:
            self._files.attach(conn, job.id, kept)
            self._files.sweep(conn, job.id)
        for video in kept:
            if video.kind is ArtifactKind.VIDEO:
                progress = {**job.progress, "frames": video.details.get("frames")}
                conn.execute(update(jobs).where(jobs.c.id == job.id).values(progress=progress))
        ended = self.finish(conn, job, JobState.CANCELLED)
        if ended is not None and not job.keep_chunks:
            self._files.drop_chunks(conn, job.id)
        return ended

    def requeue(
        self, conn: Connection, job: Job, reason: str, values: Mapping[str, object]
    ) -> tuple[Job, NewEvent] | None:
        """Take a running job from its worker and queue it again."""
        queued = move(
            self._db,
            conn,
            [JobState.RUNNING],
            JobState.QUEUED,
            jobs.c.id == job.id,
            jobs.c.fence == job.fence,
            values={"lease_owner": None, "lease_until": None, **values},
        )
        if queued is None:
            return None
        return queued, NewEvent(job.id, job.owner, "video.requeued", {"reason": reason})

    def lose(self, conn: Connection, job: Job, *, counts: bool) -> tuple[Job, NewEvent] | None:
        """A running job's worker is gone: queue the job again, or end it.

        A try that stored a chunk never counts: the job gets further, whatever ends its workers.
        """
        if job.cancel_requested:
            return self.cancel(conn, job)
        counts = counts and not self._got_further(conn, job)
        if counts and job.attempt >= job.max_attempts:
            return self.finish(conn, job, JobState.FAILED, LOST)
        self.close_attempt(conn, job, "lost", None)
        attempt = job.attempt if counts else max(job.attempt - 1, 0)
        return self.requeue(conn, job, ErrorCode.WORKER_LOST.value, {"attempt": attempt})

    @staticmethod
    def _got_further(conn: Connection, job: Job) -> bool:
        stored = select(1).where(chunks.c.job_id == job.id, chunks.c.fence == job.fence)
        return conn.execute(stored.limit(1)).first() is not None

    def close_attempt(self, conn: Connection, job: Job, outcome: str, error: Error | None) -> None:
        """End the attempt that holds ``job`` and charge its owner for the time it ran.

        A lost attempt is charged until its lease ran out, not until somebody noticed.
        """
        now: ColumnElement[float] = self._db.now
        if outcome == "lost" and job.lease_until is not None:
            earlier = func.least if self._db.dialect == "postgresql" else func.min
            now = earlier(now, literal(job.lease_until, Float(53)), type_=Float(53))
        row = conn.execute(
            update(attempts)
            .where(
                attempts.c.job_id == job.id,
                attempts.c.fence == job.fence,
                attempts.c.ended_at.is_(None),
            )
            .values(ended_at=now, outcome=outcome, error=dict(error) if error else None)
            .returning(attempts.c.started_at, attempts.c.ended_at)
        ).one_or_none()
        if row is None:
            return
        charge = self._db.insert(usage).values(
            owner=job.owner,
            hour=int(row.ended_at // HOUR_S),
            running_s=max(row.ended_at - row.started_at, 0.0),
        )
        conn.execute(
            charge.on_conflict_do_update(
                index_elements=["owner", "hour"],
                set_={"running_s": usage.c.running_s + charge.excluded.running_s},
            )
        )
