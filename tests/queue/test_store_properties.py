"""Whatever workers and owners do, in whatever order: one result, no going back, no stale write."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import event

from longtake.errors import ConflictError, LeaseLostError, NotFoundError
from longtake.queue.database import Database, open_database
from longtake.queue.policy import Policy
from longtake.queue.records import TERMINAL, TRANSITIONS, Job, JobState
from longtake.queue.store import Store

if TYPE_CHECKING:
    from tests.queue.conftest import Desk

WORKERS = st.sampled_from(["a", "b", "c"])
MAX_ATTEMPTS, POISON_LIMIT = 4, 3
# states that an operation may pass through on its way from one to the next
REACHABLE = {
    origin: {origin}
    | TRANSITIONS[origin]
    | {far for mid in TRANSITIONS[origin] for far in TRANSITIONS[mid]}
    for origin in JobState
}


class Service(RuleBasedStateMachine):
    """Owners and three workers on a few jobs; every lease may run out at any moment."""

    template: ClassVar[str]
    desk_type: ClassVar[type[Desk]]
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        path = Path(self.folder.name) / "db.sqlite3"
        shutil.copy(self.template.removeprefix("sqlite:///"), path)
        self.db: Database = open_database(f"sqlite:///{path}")
        event.listen(self.db.engine, "connect", _do_not_flush)
        policy = Policy(max_attempts=MAX_ATTEMPTS, poison_limit=POISON_LIMIT)
        self.desk = self.desk_type(Store(self.db, policy))
        self.jobs: list[str] = []
        self.deleted: set[str] = set()
        self.last: dict[str, Job] = {}

    def teardown(self) -> None:
        self.db.dispose()
        self.folder.cleanup()

    @rule(owner=st.sampled_from(["x", "y"]))
    def submit(self, owner: str) -> None:
        if len(self.jobs) < 4:
            self.jobs.append(self.desk.submit(owner=owner).id)

    @rule(target=held, worker=WORKERS)
    def claim(self, worker: str) -> Job | None:
        job = self.desk.store.leases.claim(worker, "default")
        if job is not None:
            before = self.last.get(job.id)
            assert before is None or job.fence > before.fence
            assert job.attempt <= MAX_ATTEMPTS
        return job

    @rule(job=held)
    def lose(self, job: Job | None) -> None:
        self._try(job, lambda one: self.desk.lose(one))

    @rule()
    def expire(self) -> None:
        self.desk.store.leases.expire()

    @rule(worker=WORKERS, counts=st.booleans())
    def reclaim(self, worker: str, counts: bool) -> None:
        self.desk.store.leases.reclaim([worker], counts=counts)

    @rule(job=held, index=st.integers(0, 2))
    def store_chunk(self, job: Job | None, index: int) -> None:
        self._try(job, lambda one: self.desk.store_chunk(one, index))

    @rule(job=held)
    def complete(self, job: Job | None) -> None:
        self._try(job, self.desk.complete, JobState.COMPLETED)

    @rule(job=held)
    def fail(self, job: Job | None) -> None:
        leases = self.desk.store.leases
        self._try(job, lambda one: leases.fail(one.id, one.fence, {"code": "x"}), JobState.FAILED)

    @rule(job=held)
    def cancelled(self, job: Job | None) -> None:
        leases = self.desk.store.leases
        self._try(job, lambda one: leases.cancelled(one.id, one.fence), JobState.CANCELLED)

    @rule(job=held, counts=st.booleans(), chunk=st.none() | st.integers(0, 1))
    def release(self, job: Job | None, counts: bool, chunk: int | None) -> None:
        self._try(
            job,
            lambda one: self.desk.store.leases.release(
                one.id, one.fence, counts=counts, strike_chunk=chunk
            ),
        )

    @rule(which=st.integers(0, 3), keep=st.booleans())
    def cancel(self, which: int, keep: bool) -> None:
        self._own(which, lambda job: self.desk.store.submissions.cancel(job, None, keep))

    @rule(which=st.integers(0, 3))
    def retry(self, which: int) -> None:
        self._own(which, lambda job: self.desk.store.submissions.retry(job, None))

    @rule(which=st.integers(0, 3))
    def delete(self, which: int) -> None:
        def remove(job: str) -> None:
            self.desk.store.submissions.delete(job, None)
            self.deleted.add(job)

        self._own(which, remove)

    @invariant()
    def rules_hold(self) -> None:
        log = self.desk.store.events.read(0, limit=10_000)
        for job_id in set(self.jobs) - self.deleted:
            job = self.desk.store.listings.get(job_id)
            told = [event.type for event in log if event.job_id == job_id]
            assert told.count("video.completed") == (job.state == JobState.COMPLETED)
            files = self.desk.store.files.of_job(job_id)
            assert sum(one.kind == "video" for one in files) <= 1
            assert job.bytes_stored == sum(one.size for one in files)
            assert (job.lease_owner is not None) == (job.state == JobState.RUNNING)
            assert job.attempt <= MAX_ATTEMPTS
            attempts = self.desk.store.listings.attempts(job_id)
            open_ones = [one.fence for one in attempts if one.ended_at is None]
            assert open_ones == ([job.fence] if job.state == JobState.RUNNING else [])
            assert [one.fence for one in attempts] == list(range(1, job.fence + 1))
            before = self.last.get(job_id)
            if before is not None:
                assert job.fence >= before.fence
                assert job.state in REACHABLE[before.state]
            if before is not None and before.state == JobState.COMPLETED:
                assert job == before
            self.last[job_id] = job
        keys = [key for _, key in self.desk.store.files.garbage()]
        kept = {one.key for job in self.jobs for one in self.desk.store.files.of_job(job)}
        assert not kept & set(keys)
        folders = tuple(key for key in keys if key.endswith("/"))
        assert not any(key.startswith(folders) for key in kept if folders)

    def _try(self, job: Job | None, call: object, ended: JobState | None = None) -> None:
        """A worker's write: refused exactly when the job is not its own any more."""
        if job is None:
            return
        now = None
        if job.id not in self.deleted:
            now = self.desk.store.listings.get(job.id)
        ours = now is not None and now.fence == job.fence
        ours = ours and now is not None and now.state in {JobState.RUNNING, ended}
        before = now, self.desk.store.events.latest()
        try:
            call(job)  # type: ignore[operator]  # the callers' lambdas differ in what they return
        except LeaseLostError:
            assert not ours
            if now is not None:
                assert (self.desk.store.listings.get(job.id), before[1]) == (
                    now,
                    self.desk.store.events.latest(),
                )
        else:
            assert ours

    def _own(self, which: int, call: object) -> None:
        """An owner's wish: refused only for a job that is gone or in the wrong state."""
        if which >= len(self.jobs):
            return
        job = self.jobs[which]
        try:
            call(job)  # type: ignore[operator]
        except NotFoundError:
            assert job in self.deleted
        except ConflictError:
            state = self.desk.store.listings.get(job).state
            assert state == JobState.COMPLETED or state not in TERMINAL


def test_any_order_of_calls_keeps_the_promises(sqlite_url: str, sqlite_desk: Desk) -> None:
    Service.template = sqlite_url
    Service.desk_type = type(sqlite_desk)
    run_state_machine_as_test(
        Service,
        settings=settings(
            max_examples=12,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def _do_not_flush(dbapi: Any, _record: object) -> None:
    """Nothing here is about power cuts, and flushing is most of the time."""
    dbapi.execute("PRAGMA synchronous=OFF")
