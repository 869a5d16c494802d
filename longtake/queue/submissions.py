"""The owner's side of the store: submit, edit, cancel, retry, trash and delete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, select, update

from longtake.errors import ConflictError, NotFoundError
from longtake.queue.database import Database, again
from longtake.queue.edits import apply_changes
from longtake.queue.endings import Endings
from longtake.queue.events import Events, NewEvent
from longtake.queue.intake import Intake, Submission
from longtake.queue.ledger import Ledger
from longtake.queue.listings import deleted
from longtake.queue.outbox import Outbox
from longtake.queue.policy import Policy
from longtake.queue.quotas import Quotas
from longtake.queue.records import Batch, Job, JobState, NewJob, Relation
from longtake.queue.rows import columns_of, job_of
from longtake.queue.tables import events, idempotency, jobs
from longtake.queue.transitions import move

UPDATED = "video.updated"


class Submissions:
    """Everything an owner does to jobs; ``owner`` None acts for anybody's."""

    def __init__(
        self,
        db: Database,
        events: Events,
        files: Ledger,
        outbox: Outbox,
        intake: Intake,
        endings: Endings,
        policy: Policy,
    ) -> None:
        self._db = db
        self._events = events
        self._files = files
        self._outbox = outbox
        self._intake = intake
        self._endings = endings
        self._policy = policy

    def submit(
        self,
        new: Sequence[NewJob],
        limits: Mapping[str, int] | None = None,
        *,
        idempotency: tuple[str, str] | None = None,
        batch: Batch | None = None,
    ) -> list[Job]:
        """Store jobs of one owner, all or none; once this returns they are not lost.

        Args:
            new: the jobs; more than one only with a ``batch`` or without ``idempotency``.
            limits: max_queued, max_running_s (a day) and max_bytes; 0 or absent is none.
            idempotency: a key and what the request was; the same again returns the jobs made then.
            batch: stored with the jobs; each of them names its id.

        Raises:
            LimitError: a quota is used up.
            ConflictError: ``idempotency_mismatch``: the key came with another request.
            NotFoundError: an input is not there, or what the key made was deleted.
        """
        if not new and batch is None:
            return []
        owner = new[0].owner if new else batch.owner if batch else ""
        if any(job.owner != owner for job in new):
            raise ValueError("one submission has jobs of one owner")
        if idempotency is not None and batch is None and len(new) != 1:
            raise ValueError("an idempotency key is for one job or one batch")
        return self._intake.take(Submission(owner, new, limits or {}, idempotency, batch))

    @again
    def edit(self, job_id: str, owner: str | None, changes: Mapping[str, Any]) -> Job:
        """Change a job, see ``edits.apply_changes`` for what and when.

        Raises:
            NotFoundError, RequestError: no such job; a field or value that is not legal.
            ConflictError: its state does not allow it.
        """
        with self._db.write() as conn:
            job = self._locked(conn, job_id, owner)
            if not changes:
                return job
            job = apply_changes(self._db, conn, self._files, job, changes)
            if job.state == JobState.QUEUED:
                self._outbox.add(conn, [job.queue])
            self._tell(conn, job, fields=sorted(changes))
        return job

    @again
    def cancel(self, job_id: str, owner: str | None, keep_chunks: bool = False) -> Job:
        """Stop a job: at once while it is queued, by a request to its worker while it runs.

        A finished job is returned as it is.

        Raises:
            NotFoundError: there is no such job of this owner.
        """
        with self._db.write() as conn:
            job, entries = self._cancel(conn, self._locked(conn, job_id, owner), keep_chunks)
            self._events.extend(conn, entries)
        return job

    @again
    def retry(self, job_id: str, owner: str | None, limits: Mapping[str, int] | None = None) -> Job:
        """Queue a failed or cancelled job again; it goes on from the chunks it has.

        Raises:
            NotFoundError: there is no such job of this owner.
            LimitError: a quota is used up, as for ``submit``.
            ConflictError: it is queued, running or completed; ``in_use`` as for ``delete``.
        """
        with self._db.write() as conn:
            job = self._locked(conn, job_id, owner)
            if job.state not in (JobState.FAILED, JobState.CANCELLED):
                raise ConflictError(f"a {job.state} video cannot be tried again", "not_finished")
            _check_unused(conn, job)
            queued, entry = self._queue_again(conn, job, limits, "retry", self._db.now)
            self._events.extend(conn, [entry])
        return queued

    @again
    def trash(self, job_id: str, owner: str | None) -> Job:
        """Put a job into the trash, from where it is deleted later; one that goes on is cancelled.

        What is finished of it stays until then, so that ``restore`` can have it go on.

        Raises:
            NotFoundError: there is no such job of this owner.
        """
        with self._db.write() as conn:
            job = self._locked(conn, job_id, owner)
            if job.trashed_at is not None:
                return job
            # in this order: its times tell ``restore`` that the trash has ended it
            job = self._set(conn, job_id, trashed_at=self._db.now)
            job, entries = self._cancel(conn, job, keep_chunks=True)
            self._tell(conn, job, *entries, fields=["trashed_at"])
        return job

    @again
    def restore(
        self, job_id: str, owner: str | None, limits: Mapping[str, int] | None = None
    ) -> Job:
        """Take a job out of the trash; one that was cancelled by it is queued again, at its place.

        Raises:
            NotFoundError: there is no such job of this owner.
            LimitError: it is to be queued again, and a quota is used up, as for ``submit``.
        """
        with self._db.write() as conn:
            job = self._locked(conn, job_id, owner)
            if job.trashed_at is None:
                return job
            entries = []
            ended_at = job.completed_at or 0.0
            if job.state == JobState.CANCELLED and ended_at >= job.trashed_at:
                job, entry = self._queue_again(conn, job, limits, "restore", job.position)
                entries.append(entry)
            else:
                job = self._set(conn, job_id, trashed_at=None)
            self._tell(conn, job, *entries, fields=["trashed_at"])
        return job

    @again
    def delete(self, job_id: str, owner: str | None) -> None:
        """Remove a job and all it made; a worker that still has it finds its lease lost.

        Raises:
            NotFoundError: there is no such job of this owner.
            ConflictError: ``in_use``, an extension or edit of it is not finished and needs it.
        """
        with self._db.write() as conn:
            job = self._locked(conn, job_id, owner)
            _check_unused(conn, job)
            if job.state == JobState.RUNNING:
                self._endings.close_attempt(conn, job, "deleted", None)
            self._files.drop_job(conn, job.id)
            conn.execute(delete(jobs).where(jobs.c.id == job.id))
            conn.execute(delete(events).where(events.c.job_id == job.id))
            self._events.extend(conn, [deleted(job)])

    @again
    def forget_idempotency(self) -> int:
        """Remove idempotency keys whose time is over."""
        with self._db.write() as conn:
            old = idempotency.c.created_at < self._db.now - self._policy.idempotency_s
            return conn.execute(delete(idempotency).where(old)).rowcount

    def _queue_again(
        self,
        conn: Connection,
        job: Job,
        limits: Mapping[str, int] | None,
        reason: str,
        position: object,
    ) -> tuple[Job, NewEvent]:
        Quotas(self._db, conn, self._files).admit(job.owner, limits or {}, 1)
        queued = move(
            self._db,
            conn,
            [job.state],
            JobState.QUEUED,
            jobs.c.id == job.id,
            values={
                "position": position,
                "not_before": 0.0,
                "attempt": 0,
                "strikes": 0,
                "strike_chunk": None,
                "paused": False,
                "cancel_requested": False,
                "keep_chunks": False,
                "error": None,
                "completed_at": None,
                "expires_at": None,
                "trashed_at": None,
                "progress": {},
            },
        )
        if queued is None:
            raise ConflictError("the video changed in the meantime; try again")
        self._outbox.add(conn, [queued.queue])
        return queued, NewEvent(job.id, job.owner, "video.requeued", {"reason": reason})

    def _cancel(self, conn: Connection, job: Job, keep_chunks: bool) -> tuple[Job, list[NewEvent]]:
        if job.state == JobState.QUEUED:
            job = self._set(conn, job.id, keep_chunks=keep_chunks)
            ended = self._endings.cancel(conn, job)
            if ended is None:
                raise ConflictError("the video changed in the meantime; try again")
            return ended[0], [ended[1]]
        if job.state == JobState.RUNNING and not job.cancel_requested:
            job = self._set(conn, job.id, cancel_requested=True, keep_chunks=keep_chunks)
            return job, [NewEvent(job.id, job.owner, "video.cancelling")]
        return job, []

    def _locked(self, conn: Connection, job_id: str, owner: str | None) -> Job:
        """The job, which nobody else can change until the transaction ends."""
        row = conn.execute(
            select(*columns_of(Job)).where(jobs.c.id == job_id).with_for_update()
        ).one_or_none()
        if row is None or (owner is not None and row.owner != owner):
            raise NotFoundError("video", job_id)
        return job_of(row)

    def _set(self, conn: Connection, job_id: str, **values: object) -> Job:
        statement = (
            update(jobs)
            .where(jobs.c.id == job_id)
            .values(updated_at=self._db.now, **values)
            .returning(*columns_of(Job))
        )
        return job_of(conn.execute(statement).one())

    def _tell(self, conn: Connection, job: Job, *before: NewEvent, fields: list[str]) -> None:
        updated = NewEvent(job.id, job.owner, UPDATED, {"fields": fields})
        self._events.extend(conn, [*before, updated])


def _check_unused(conn: Connection, job: Job) -> None:
    """Refuse to take away what an extension or edit that was accepted is made from."""
    users = (
        select(jobs.c.id)
        .where(
            jobs.c.parent_id == job.id,
            jobs.c.relation.in_((Relation.EXTEND, Relation.EDIT)),
            jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING)),
        )
        .order_by(jobs.c.created_at)
    )
    if found := conn.execute(users.limit(1)).scalar():
        message = f"video {found} is to be made from this one: wait for it or cancel it first"
        raise ConflictError(message, "in_use")
