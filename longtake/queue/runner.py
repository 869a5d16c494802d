"""One attempt at a job: send it to the engine, commit what comes back, settle how it ended.

Everything that is written carries the attempt's fence. Whatever happens, the attempt ends in one
fenced statement (completed, failed, cancelled, released), or in ``LOST`` when another attempt has
the job by then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from longtake.errors import LeaseLostError, RequestError
from longtake.queue.artifacts import Artifacts
from longtake.queue.attempt import Attempt
from longtake.queue.engine import EngineDied
from longtake.queue.lease import LeaseKeeper
from longtake.queue.messages import (
    ChunkDone,
    EngineMessage,
    Failed,
    Finished,
    LatentsStored,
    Pictured,
    Stopped,
    Work,
)
from longtake.queue.outcomes import Outcome, Ran, Stop
from longtake.queue.patience import DATABASE_ERRORS, patiently
from longtake.queue.processes import killed_for_memory
from longtake.queue.records import ErrorCode, Job, JobState
from longtake.queue.settle import Verdict, of_death, of_failure, of_silence, of_storage
from longtake.queue.store import Store
from longtake.queue.tracker import Tracker
from longtake.settings import Settings

T = TypeVar("T")

RECEIVE_S = 0.1
logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What a runner needs of an engine process."""

    @property
    def alive(self) -> bool:
        """True while the process runs."""

    def send(self, work: Work) -> None:
        """Hand over one attempt; clears an earlier stop."""

    def receive(self, timeout_s: float) -> EngineMessage | None:
        """The next message, None if there was none; EngineDied once the process is gone."""

    def ask_stop(self, *, keep: bool = False) -> None:
        """Stop before the next denoising step."""

    def kill(self) -> None:
        """End the process now."""


class JobRunner:
    """Drives attempts, one at a time, on one engine.

    ``stop``, ``nudge`` and the properties may be used from other threads.
    """

    def __init__(
        self, store: Store, artifacts: Artifacts, engine: Engine, settings: Settings
    ) -> None:
        self.tracker = Tracker(settings)
        self.job: Job | None = None
        self._store = store
        self._artifacts = artifacts
        self._engine = engine
        self._settings = settings
        self._lease: LeaseKeeper | None = None
        self._guard = threading.Lock()
        self._stop: Stop | None = None
        self._keep = False
        self._asked_at: float | None = None
        self._sent = False
        self._memory_kills = 0

    def run(self, job: Job) -> Ran:
        """Run one attempt of a claimed job to its end. Raises nothing that a job can cause."""
        self._begin(job)
        attempt: Attempt | None = None
        ran = Ran(Outcome.LOST)
        try:
            attempt = Attempt(self._store, self._artifacts, job)
            ran = self._attempt(attempt)
        except LeaseLostError as lost:
            logger.info("%s: fence %d is over: %s", job.id, job.fence, lost)
            ran = self._quiet_down(Ran(Outcome.LOST))
        except DATABASE_ERRORS as error:
            # nothing can be said about the job; its lease runs out and the sweep collects files
            logger.error("%s: the database stays away, the attempt is given up: %s", job.id, error)
            attempt = None
            ran = self._quiet_down(Ran(Outcome.LOST))
        except Exception:
            # nobody knows what the engine does now; the lease runs out and the job is another's
            logger.exception("%s: the attempt is given up", job.id)
            ran = self._quiet_down(Ran(Outcome.LOST, replace=True))
        finally:
            self._end(attempt)
        return ran

    def stop(self, reason: Stop, *, keep: bool = False) -> None:
        """Have the engine stop before its next step; the first reason counts, but LOST wins."""
        with self._guard:
            if self._stop is None or reason is Stop.LOST:
                self._stop, self._keep = reason, keep
            if self._asked_at is None and self._sent:
                self._asked_at = time.monotonic()
                self._engine.ask_stop(keep=self._keep)

    def nudge(self, job_id: str) -> None:
        """Look at the row of this job now, if it is the one that runs."""
        job, lease = self.job, self._lease
        if job is not None and lease is not None and job.id == job_id:
            lease.nudge()

    def _begin(self, job: Job) -> None:
        self.tracker = Tracker(self._settings, job.chunks_done)
        with self._guard:
            self._sent, self._asked_at = False, None
            if self._stop is not Stop.SHUTDOWN:
                self._stop = None
        self._memory_kills = killed_for_memory()
        self._lease = LeaseKeeper(
            self._store,
            job,
            lease_s=self._settings.lease_s,
            renew_s=self._settings.renew_s,
            on_cancel=lambda keep: self.stop(Stop.CANCEL, keep=keep),
            on_lost=lambda: self.stop(Stop.LOST),
        )
        self._lease.allow(self._settings.start_limit_s)
        self.job = job

    def _end(self, attempt: Attempt | None) -> None:
        self._close_lease()
        if attempt is not None:
            try:
                attempt.close()
            except (*DATABASE_ERRORS, OSError) as error:
                logger.warning("%s: files are left to the sweep: %s", attempt.job.id, error)
        self.job = None

    def _attempt(self, attempt: Attempt) -> Ran:
        """Prepare, send, follow; storage and engine trouble settle the attempt as well."""
        try:
            work = attempt.prepare()
            with self._guard:
                if self._stop is None:
                    self._engine.send(work)
                    self._sent = True
            if not self._sent:
                return self._stopped(attempt, Stopped(0, (), 0))
            if self._lease is not None:
                self._lease.start()
            return self._follow(attempt)
        except RequestError as error:
            verdict = Verdict.fail(ErrorCode.INVALID_REQUEST, str(error))
            return self._settle(attempt, verdict)
        except EngineDied as death:
            if self._stop is not None:
                return self._stopped(attempt, Stopped(0, (), 0), replace=True)
            kills = self._memory_kills
            verdict = of_death(death.exit_code, self.tracker, attempt.job, self._settings, kills)
            return self._settle(attempt, verdict)
        except OSError as error:
            self._quiet_down(Ran(Outcome.REQUEUED))
            verdict = of_storage(str(error), error.errno, attempt.job, self._settings)
            return self._settle(attempt, verdict)

    def _follow(self, attempt: Attempt) -> Ran:
        """Read messages to the last one, committing chunks as they come."""
        heard = time.monotonic()
        while True:
            message = self._engine.receive(RECEIVE_S)
            now = time.monotonic()
            if message is None:
                if self._asked_at is not None and now - self._asked_at > self._grace_s:
                    self._engine.kill()
                    return self._stopped(attempt, Stopped(0, (), 0), replace=True)
                if now - heard > self.tracker.limit_s:
                    self._engine.kill()
                    return self._settle(
                        attempt, of_silence(self.tracker, attempt.job, self._settings)
                    )
                continue
            heard = now
            if isinstance(message, Finished | Stopped | Failed):
                self._sent = False  # the engine waits for work again
            self.tracker.see(message)
            if self._stop is Stop.LOST:
                raise LeaseLostError("the job is another attempt's")
            ran = self._take(attempt, message)
            if ran is not None:
                return ran
            self._alive(self.tracker.limit_s)
            heard = time.monotonic()

    def _take(self, attempt: Attempt, message: EngineMessage) -> Ran | None:
        """Act on one message; what comes of the attempt if it was the last."""
        match message:
            case LatentsStored():
                attempt.latents_made = message
            case ChunkDone(files=files) if files:
                self._store_chunk(attempt, message)
            case Pictured():
                self._store_picture(attempt, message)
            case Finished():
                return self._finished(attempt, message)
            case Stopped():
                return self._stopped(attempt, message)
            case Failed():
                return self._failed(attempt, message)
            case _:
                pass
        return None

    def _store_latents(self, attempt: Attempt) -> None:
        """Store the latents of a chunk whose decode did not come to its end, if they can be.

        What a cancelled video has is kept only where its owner wants it.
        """
        made, job = attempt.latents_made, attempt.job
        attempt.latents_made = None
        if made is None or (self._stop is Stop.CANCEL and not self._keep):
            return
        self._alive(self._settings.finish_limit_s)
        try:
            artifacts = attempt.publish(made.files)
        except OSError as error:
            logger.warning("%s: chunk %d will be made again: %s", job.id, made.chunk, error)
            return
        record = attempt.record(made.chunk, artifacts)
        self._persist(lambda: self._store.held.record_latents(job.id, job.fence, record, artifacts))

    def _store_chunk(self, attempt: Attempt, message: ChunkDone) -> None:
        """Store a chunk: its latents with its segment, unless they are there already."""
        job, progress = attempt.job, self.tracker.progress
        self._alive(self._settings.finish_limit_s)
        made = attempt.latents_made
        latents = made.files if made is not None and made.chunk == message.chunk else ()
        artifacts = attempt.publish((*latents, *message.files))
        record = attempt.record(message.chunk, artifacts, message.frames, message.timings)
        self._persist(
            lambda: self._store.held.record_chunk(job.id, job.fence, record, artifacts, progress)
        )
        attempt.latents_made = None
        self.tracker.stored += 1
        if self._lease is not None:
            self._lease.told()

    def _store_picture(self, attempt: Attempt, message: Pictured) -> None:
        job, lease_s = attempt.job, self._settings.lease_s
        picture = attempt.publish((message.file,))
        self._persist(
            lambda: self._store.held.renew(
                job.id, job.fence, lease_s, self.tracker.progress, picture
            )
        )

    def _finished(self, attempt: Attempt, message: Finished) -> Ran:
        if self._stop is Stop.CANCEL:
            return self._stopped(attempt, Stopped(message.frames, message.files, 0))
        job = attempt.job
        self._alive(self._settings.finish_limit_s)
        artifacts = attempt.publish(message.files)
        self._close_lease()
        details = {"frames": message.frames, "timings": message.timings}
        progress = self.tracker.progress
        self._persist(
            lambda: self._store.leases.complete(job.id, job.fence, artifacts, details, progress)
        )
        return Ran(Outcome.COMPLETED, message.memory_bytes)

    def _stopped(self, attempt: Attempt, message: Stopped, *, replace: bool = False) -> Ran:
        """The engine stopped because it was asked to: settle what it was asked for."""
        job = attempt.job
        if self._stop is Stop.LOST:
            raise LeaseLostError("the job is another attempt's")
        if self._stop is Stop.CANCEL:
            self._alive(self._settings.finish_limit_s)
            self._store_latents(attempt)
            artifacts = attempt.publish(message.files) if self._keep else []
            self._close_lease()
            self._persist(lambda: self._store.leases.cancelled(job.id, job.fence, artifacts))
            return Ran(Outcome.CANCELLED, message.memory_bytes, replace=replace)
        verdict = Verdict.release("preempted", counts=False)
        ran = self._settle(attempt, verdict)
        return Ran(ran.outcome, message.memory_bytes, replace=replace)

    def _failed(self, attempt: Attempt, message: Failed) -> Ran:
        before = self._persist(lambda: self._store.listings.attempts(attempt.job.id))
        verdict = of_failure(message, self.tracker, attempt.job, self._settings, before)
        return self._settle(attempt, verdict, message.memory_bytes)

    def _settle(self, attempt: Attempt, verdict: Verdict, memory_bytes: int = 0) -> Ran:
        """Write a verdict: the job failed, or goes back into the queue."""
        job = attempt.job
        if self._stop is Stop.LOST:
            raise LeaseLostError("the job is another attempt's")
        self._store_latents(attempt)
        self._close_lease()
        outcome = Outcome.FAILED
        if self._stop is Stop.CANCEL:
            outcome = Outcome.CANCELLED
            self._persist(lambda: self._store.leases.cancelled(job.id, job.fence, []))
        elif verdict.final:
            error = verdict.error or {}
            self._persist(lambda: self._store.leases.fail(job.id, job.fence, error))
        else:
            outcome = _outcome(self._persist(lambda: verdict.apply(self._store, job)))
        log = logger.info if verdict.outcome == "preempted" else logger.warning
        log("%s: attempt %d: %s: %s", job.id, job.attempt, verdict.outcome, verdict.error)
        return Ran(
            outcome,
            memory_bytes,
            replace=verdict.replace,
            disk_full=verdict.disk_full,
            broken=verdict.broken,
        )

    def _persist(self, call: Callable[[], T]) -> T:
        """Run a statement, with patience for a database that restarts."""
        return patiently(call, give_up_s=2 * self._settings.lease_s)

    def _quiet_down(self, ran: Ran) -> Ran:
        """Have the engine idle again after an attempt that ends from outside; killed if slow."""
        if not self._sent or not self._engine.alive:
            return ran
        self._engine.ask_stop()
        until = time.monotonic() + self._grace_s
        try:
            while time.monotonic() < until:
                if isinstance(self._engine.receive(RECEIVE_S), Finished | Stopped | Failed):
                    return ran
        except EngineDied:
            return ran
        self._engine.kill()
        return ran

    @property
    def _grace_s(self) -> float:
        return self._settings.stop_grace_s

    def _alive(self, limit_s: float) -> None:
        if self._lease is not None:
            self._lease.allow(limit_s)
            self._lease.report(lambda: self.tracker.progress)

    def _close_lease(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None


def _outcome(released: Job) -> Outcome:
    """A release queues the job, or ends it: tries used up, poison, or cancelled meanwhile."""
    ends = {JobState.FAILED: Outcome.FAILED, JobState.CANCELLED: Outcome.CANCELLED}
    return ends.get(released.state, Outcome.REQUEUED)
