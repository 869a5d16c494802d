"""A worker: ticks and polls, states, engines that are replaced, and its warm stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from longtake.errors import ServiceError
from longtake.queue.messages import EngineMessage, Finished, Ready, StepDone
from longtake.queue.records import Job, JobState, WorkerRecord
from longtake.queue.worker import Worker

if TYPE_CHECKING:
    from tests.queue.workers.conftest import Rig, ScriptedEngine

WAIT_S = 30.0
NEVER = 3600.0


@dataclass
class Ticks:
    """A broker that only remembers."""

    published: list[str] = field(default_factory=list)

    def publish(self, queue: str, count: int = 1) -> bool:
        self.published += [queue] * count
        return True


@dataclass
class Bench:
    """A worker on a rig, with what it made of engines."""

    rig: Rig
    make_engine: Callable[[], Any]
    ticks: Ticks = field(default_factory=Ticks)
    engines: list[Any] = field(default_factory=list)

    def worker(self) -> Worker:
        """A worker that is not started."""
        rig = self.rig
        return Worker(rig.store, rig.artifacts, rig.settings, self.ticks, self._make)  # type: ignore[arg-type]

    def _make(self) -> Any:
        self.engines.append(self.make_engine())
        return self.engines[-1]

    def until(self, done: Callable[[], object]) -> None:
        """Wait until something holds."""
        pause = threading.Event()
        for _ in range(int(WAIT_S / 0.01)):
            if done():
                return
            pause.wait(0.01)
        pytest.fail("it did not come to that")

    def done(self, job: Job) -> bool:
        """True once a job is finished."""
        return self.rig.job(job.id).finished

    def record(self) -> WorkerRecord:
        """What the only worker says of itself."""
        [record] = self.rig.store.workers.list()
        return record


NewBench = Callable[..., Bench]


@pytest.fixture
def bench(make_rig: Callable[..., Rig]) -> Iterator[NewBench]:
    """Make a bench whose workers are stopped at the end."""
    benches: list[Bench] = []
    workers: list[Worker] = []

    def make(engine: Callable[[], Any] | None = None, **changes: Any) -> Bench:
        rig = make_rig(**({"poll_s": NEVER, "reconcile_s": NEVER} | changes))
        made = Bench(rig, engine or type(rig.engine))
        plain = made.worker

        def worker() -> Worker:
            workers.append(plain())
            return workers[-1]

        made.worker = worker  # type: ignore[method-assign]
        benches.append(made)
        return made

    yield make
    for one in workers:
        one.close()


def test_a_tick_runs_everything_that_is_claimable(bench: NewBench) -> None:
    at = bench()
    worker = at.worker()
    worker.start()
    at.until(lambda: worker.state == "idle")
    jobs = [at.rig.submit() for _ in range(3)]
    worker.tick()
    assert [at.rig.job(job.id).state for job in jobs] == [JobState.COMPLETED] * 3
    assert len(at.engines) == 1


def test_ticks_that_come_twice_change_nothing(bench: NewBench) -> None:
    at = bench()
    worker = at.worker()
    worker.start()
    job = at.rig.submit()
    for _ in range(5):
        worker.tick()
    assert at.rig.job(job.id).fence == 1
    assert len(at.rig.store.listings.attempts(job.id)) == 1


def test_a_worker_says_that_its_engine_is_loaded_again(bench: NewBench) -> None:
    go_on = threading.Event()
    at = bench(poll_s=0.05)
    plain = at.make_engine
    worker = at.worker()
    worker.start()
    first = at.rig.submit()
    at.until(lambda: at.done(first) and worker.state == "idle")

    def slow() -> Any:
        assert go_on.wait(WAIT_S)
        return plain()

    at.make_engine = slow
    at.engines[0].kill()
    second = at.rig.submit()
    at.until(lambda: at.record().state == "loading")
    go_on.set()
    at.until(lambda: at.done(second) and at.record().state == "idle")


def test_a_lost_tick_is_made_up_for_by_polling(bench: NewBench) -> None:
    at = bench(poll_s=0.05)
    worker = at.worker()
    worker.start()
    at.until(lambda: worker.state == "idle")
    job = at.rig.submit()
    at.until(lambda: at.done(job))


def test_a_busy_worker_passes_a_tick_on(bench: NewBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtake.queue.worker.Reconciler.run", lambda _: None)
    go_on = threading.Event()

    def slow(message: EngineMessage, _: ScriptedEngine) -> EngineMessage:
        if isinstance(message, Finished):
            assert go_on.wait(WAIT_S)
        return message

    at = bench()
    at.make_engine = lambda: type(at.rig.engine)(before=slow)
    worker = at.worker()
    job = at.rig.submit()
    worker.start()
    at.until(lambda: at.record().state == "busy")
    assert at.record().job_id == job.id  # with the first word of it, not with the next beat
    tick = threading.Thread(target=worker.tick)
    tick.start()
    at.until(lambda: at.ticks.published)
    assert tick.is_alive()
    go_on.set()
    tick.join(WAIT_S)
    assert at.done(job)
    assert at.ticks.published == ["default"]


def test_two_workers_make_every_job_once(bench: NewBench) -> None:
    at = bench(poll_s=0.02)
    jobs = [at.rig.submit() for _ in range(8)]
    for _ in range(2):
        at.worker().start()
    at.until(lambda: all(at.done(job) for job in jobs))
    for job in jobs:
        assert len(at.rig.store.listings.attempts(job.id)) == 1


def test_a_warm_stop_gives_the_job_back(bench: NewBench) -> None:
    stopping = threading.Event()

    def wait(message: EngineMessage, engine: ScriptedEngine) -> EngineMessage:
        if isinstance(message, StepDone) and message.chunk == 1 and not stopping.is_set():
            stopping.set()
            assert engine.stop_asked.wait(WAIT_S)
        return message

    at = bench()
    at.make_engine = lambda: type(at.rig.engine)(before=wait)
    worker = at.worker()
    job = at.rig.submit()
    worker.start()
    assert stopping.wait(WAIT_S)
    worker.stop()
    assert worker.state == "stopping"
    worker.close()
    back = at.rig.job(job.id)
    assert (back.state, back.attempt, back.chunks_done) == (JobState.QUEUED, 0, 1)
    assert at.engines[0].done[-2:] == ["StepDone 1 1", "Stopped"]
    assert at.engines[0].killed
    assert at.rig.store.workers.list() == []

    other = at.worker()
    other.start()
    other.tick()
    assert at.rig.job(job.id).state is JobState.COMPLETED


def test_an_engine_that_cannot_start_burns_no_tries(
    bench: NewBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtake.queue.keeper.FIRST_BACKOFF_S", 0.05)
    at = bench(poll_s=0.02)
    fit: list[bool] = []

    class Balky(type(at.rig.engine)):  # type: ignore[misc]
        def start(self) -> Ready:
            if not fit:
                raise ServiceError("no such device: cuda:7")
            return Ready(1, "cpu", 1000)

    at.make_engine = Balky
    worker = at.worker()
    job = at.rig.submit()
    worker.start()
    at.until(lambda: len(at.engines) > 1 and at.record().state == "broken")
    assert "no such device" in at.record().details["reason"]
    assert (at.rig.job(job.id).state, at.rig.job(job.id).fence) == (JobState.QUEUED, 0)
    fit.append(True)
    at.until(lambda: at.done(job))
    at.until(lambda: at.record().state == "idle")
    assert at.record().details["reason"] is None


def test_a_full_disk_stops_new_work_until_there_is_space(
    bench: NewBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = bench(poll_s=0.02, min_free_bytes=1000)
    monkeypatch.setattr(at.rig.artifacts, "free_bytes", lambda: 999)
    job = at.rig.submit()
    worker = at.worker()
    worker.start()
    at.until(lambda: at.record().state == "disk_full")
    assert at.rig.job(job.id).state is JobState.QUEUED
    monkeypatch.setattr(at.rig.artifacts, "free_bytes", lambda: 1000)
    at.until(lambda: at.done(job))
    at.until(lambda: at.record().state == "idle")


def test_an_engine_is_replaced_after_its_jobs(bench: NewBench) -> None:
    at = bench(engine_max_jobs=2)
    for _ in range(5):
        at.rig.submit()
    worker = at.worker()
    worker.start()
    worker.tick()
    assert [len(engine.works) for engine in at.engines] == [2, 2, 1]
    assert [engine.killed for engine in at.engines] == [True, True, False]


def test_an_engine_that_grows_is_replaced(bench: NewBench) -> None:
    sizes = iter([1000, 1900, 2100, 1000])

    def grow(message: EngineMessage, _: ScriptedEngine) -> EngineMessage:
        if isinstance(message, Finished):
            return Finished(message.frames, message.files, message.timings, next(sizes))
        return message

    at = bench()
    at.make_engine = lambda: type(at.rig.engine)(before=grow)
    for _ in range(4):
        at.rig.submit()
    worker = at.worker()
    worker.start()
    worker.tick()
    assert [len(engine.works) for engine in at.engines] == [3, 1]


def test_an_engine_that_died_is_replaced(bench: NewBench) -> None:
    def die(message: EngineMessage, engine: ScriptedEngine) -> EngineMessage:
        if isinstance(message, StepDone) and len(at.engines) == 1:
            engine.die(-9)
        return message

    at = bench(poll_s=0.02)
    at.make_engine = lambda: type(at.rig.engine)(before=die)
    job = at.rig.submit()
    worker = at.worker()
    worker.start()
    at.until(lambda: at.done(job))
    assert len(at.engines) == 2
    assert at.rig.job(job.id).state is JobState.COMPLETED


def test_the_roster_says_what_a_worker_does(bench: NewBench) -> None:
    told: list[WorkerRecord] = []

    def look(message: EngineMessage, _: ScriptedEngine) -> EngineMessage:
        if isinstance(message, Finished):
            at.until(lambda: at.record().state == "busy" and at.record().step_at)
            told.append(at.record())
        return message

    at = bench(heartbeat_s=0.02)
    at.make_engine = lambda: type(at.rig.engine)(before=look)
    worker = at.worker()
    job = at.rig.submit()
    worker.start()
    worker.tick()
    [busy] = told
    assert (busy.id, busy.job_id, busy.queue) == (worker.id, job.id, "default")
    assert busy.memory_bytes > 0
    at.until(lambda: at.record().state == "idle")
    assert (at.record().job_id, at.record().model) == (None, "papercut")
    assert at.record().details["jobs_done"] == 1


def test_a_fault_in_a_round_does_not_end_the_worker(
    bench: NewBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("longtake.queue.worker.PAUSE_S", 0.0)
    at = bench(poll_s=0.02)
    faults = [ZeroDivisionError("oops")]
    free_bytes = at.rig.artifacts.free_bytes

    def fault() -> int | None:
        if faults:
            raise faults.pop()
        return free_bytes()

    monkeypatch.setattr(at.rig.artifacts, "free_bytes", fault)
    job = at.rig.submit()
    at.worker().start()
    at.until(lambda: at.done(job))
    assert "a fault in the worker" in caplog.text
