"""A worker: one thread that claims jobs and drives them, and what goes on beside it.

Ticks, polls and the end of a job all come to the same: wake the one thread, which claims from the
database until there is nothing left. So a tick that comes twice changes nothing, and one that is
lost costs at most ``poll_s``.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable

from longtake.logs import bind
from longtake.queue.artifacts import Artifacts
from longtake.queue.engine import EngineProcess
from longtake.queue.ids import random_text
from longtake.queue.keeper import EngineKeeper
from longtake.queue.outcomes import Ran, Stop
from longtake.queue.patience import DATABASE_ERRORS
from longtake.queue.processes import host_name, identify, memory_of
from longtake.queue.reconcile import Reconciler
from longtake.queue.records import WorkerRecord
from longtake.queue.runner import JobRunner
from longtake.queue.store import Store
from longtake.queue.ticks import Ticker
from longtake.settings import Settings

# after a full disk or an error of our own, before looking again
PAUSE_S = 5.0
CLOSE_S = 10.0
JOIN_S = 0.1
logger = logging.getLogger(__name__)


class Worker:
    """Claims and drives jobs until it is stopped.

    Args:
        store, artifacts: where jobs and files are.
        settings: of the service.
        ticker: passes on ticks that came while this worker was busy.
        make_engine: another engine than ``EngineProcess``.
    """

    def __init__(
        self,
        store: Store,
        artifacts: Artifacts,
        settings: Settings,
        ticker: Ticker,
        make_engine: Callable[[], EngineProcess] | None = None,
    ) -> None:
        process = identify(os.getpid())
        self.id = f"worker_{random_text(12)}"
        self._host = host_name()
        self._boot_id = f"{os.getpid()}@{process.started_at if process else 0:.2f}"
        self._store = store
        self._artifacts = artifacts
        self._settings = settings
        self._ticker = ticker
        self._keeper = EngineKeeper(settings, make_engine)
        self._runner: JobRunner | None = None
        self._job_id: str | None = None
        self._reconciler = Reconciler(store, artifacts, settings, ticker)
        self._started_at = time.time()
        self._step_at: float | None = None
        self._done = 0
        self._state = "starting"
        self._reason: str | None = None
        self._pause_until = 0.0
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._beat_now = threading.Event()
        self._idle = threading.Condition()
        self._at_work = False
        self._threads = [
            threading.Thread(target=self._drive, name="jobs"),
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
            threading.Thread(target=self._mend, name="reconcile", daemon=True),
        ]

    @property
    def state(self) -> str:
        """starting, loading, idle, busy, disk_full, broken or stopping."""
        return "stopping" if self._stopping.is_set() else self._state

    def start(self) -> None:
        """Sign on, then begin; whoever claims is in the roster by then."""
        self._say()
        self._wake.set()
        for thread in self._threads:
            thread.start()

    def tick(self) -> None:
        """There is work: returns when this worker has nothing more to do.

        A worker that is busy passes the tick on, once, so that an idle one can have it.
        """
        if self._state == "busy":
            self._ticker.publish(self._settings.queue)
        with self._idle:
            self._wake.set()
            while not self._stopping.is_set() and (self._wake.is_set() or self._at_work):
                self._idle.wait(1.0)

    def nudge(self, job_id: str) -> None:
        """Something about this job has changed."""
        if self._runner is not None:
            self._runner.nudge(job_id)

    def stop(self) -> None:
        """Warm stop: the engine stops before its next step, its job is queued again. At once."""
        self._stopping.set()
        runner = self._runner
        if runner is not None and runner.job is not None:
            runner.stop(Stop.SHUTDOWN)
        else:
            self._keeper.close()
        self._wake.set()
        self._beat_now.set()

    def close(self) -> None:
        """Stop, wait for the job in flight to be released, end the engine and sign off."""
        self.stop()
        until = time.monotonic() + self._settings.stop_grace_s + CLOSE_S
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < until:
                thread.join(JOIN_S)
                if self._state != "busy":
                    self._keeper.close()  # again: an engine may have been about to start
        self._keeper.close()
        try:
            self._store.workers.remove(self.id)
        except DATABASE_ERRORS as error:
            logger.warning("cannot sign off: %s", error)

    def _drive(self) -> None:
        """The thread that runs jobs; nothing that goes wrong in a round ends it."""
        while not self._stopping.is_set():
            with self._idle:
                self._wake.clear()
                self._at_work = True
            try:
                self._round()
            except DATABASE_ERRORS as error:
                logger.warning("jobs cannot be claimed just now: %s", error)
            except Exception:
                logger.exception("a fault in the worker; it goes on")
                self._pause_until = time.monotonic() + PAUSE_S
            self._set_state(self._resting_state())
            with self._idle:
                self._at_work = False
                self._idle.notify_all()
            self._wake.wait(self._settings.poll_s * random.uniform(0.8, 1.2))  # noqa: S311
        self._keeper.close()

    def _round(self) -> None:
        """Claim and run until nothing is claimable or this worker cannot run anything."""
        while not self._stopping.is_set() and self._fit():
            if self._keeper.pid is None and self._done:
                self._set_state("loading")  # the engine is replaced, and jobs wait for it
            engine = self._keeper.ensure()
            if engine is None:
                return
            job = self._store.leases.claim(
                self.id,
                self._settings.queue,
                loaded_model=self._keeper.model,
                affinity_s=self._settings.affinity_s,
                lease_s=self._settings.lease_s,
            )
            if job is None:
                return
            runner = JobRunner(self._store, self._artifacts, engine, self._settings)
            self._runner, self._job_id = runner, job.id
            self._set_state("busy")
            if self._stopping.is_set():
                runner.stop(Stop.SHUTDOWN)
            with bind({"job_id": job.id}):
                ran = runner.run(job)
                logger.info("attempt %d: %s", job.attempt, ran.outcome.value)
            self._job_id = None
            self._step_at = runner.tracker.step_at or self._step_at
            self._done += 1
            self._keeper.after(job.model, ran)
            self._note(ran)

    def _note(self, ran: Ran) -> None:
        if ran.disk_full:
            self._reason = "disk_full"
            self._pause_until = time.monotonic() + PAUSE_S

    def _fit(self) -> bool:
        """True if new work can be stored; a full disk is looked at again with every poll."""
        if time.monotonic() < self._pause_until:
            return False
        free = self._artifacts.free_bytes()
        full = free is not None and free < self._settings.min_free_bytes
        if full and self._reason is None:
            logger.error("%s bytes free, below %s", free, self._settings.min_free_bytes)
        self._reason = "disk_full" if full else None
        return not full

    def _resting_state(self) -> str:
        if self._keeper.broken is not None:
            return "broken"
        if self._reason is not None:
            return self._reason
        return "idle" if self._keeper.pid is not None else "starting"

    def _set_state(self, state: str) -> None:
        if state != self._state:
            self._state = state
            self._beat_now.set()

    def _beat(self) -> None:
        """Say that the worker is there, every few seconds and whenever its state changes."""
        while True:
            self._beat_now.clear()
            self._say()
            if self._stopping.is_set():
                return
            self._beat_now.wait(self._settings.heartbeat_s)

    def _say(self) -> None:
        try:
            self._store.workers.beat(self._record())
        except DATABASE_ERRORS as error:
            logger.warning("no heartbeat just now: %s", error)

    def _mend(self) -> None:
        while not self._stopping.is_set():
            self._reconciler.run()
            self._stopping.wait(self._settings.reconcile_s * random.uniform(0.8, 1.2))  # noqa: S311

    def _record(self) -> WorkerRecord:
        runner = self._runner
        step_at = runner.tracker.step_at if runner is not None else None
        engine_pid = self._keeper.pid
        return WorkerRecord(
            id=self.id,
            host=self._host,
            pid=os.getpid(),
            boot_id=self._boot_id,
            queue=self._settings.queue,
            state=self.state,
            model=self._keeper.model,
            job_id=self._job_id,
            engine_pid=engine_pid,
            memory_bytes=memory_of(os.getpid()) + memory_of(engine_pid),
            started_at=self._started_at,
            seen_at=time.time(),
            step_at=step_at or self._step_at,
            details={
                "jobs_done": self._done,
                "reason": self._keeper.broken or self._reason,
                "device": self._settings.device or "auto",
                "engine_memory_bytes": memory_of(engine_pid),
            },
        )
