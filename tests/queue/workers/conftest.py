"""A worker's surroundings: a SQLite store, a folder of artifacts, engines that play a script."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import av
import psutil
import pytest

from longtake.queue.artifacts import Artifacts, open_artifacts
from longtake.queue.broker import EmbeddedBroker
from longtake.queue.client import Client
from longtake.queue.database import open_database, upgrade
from longtake.queue.engine import EngineDied
from longtake.queue.messages import (
    ChunkDone,
    EngineMessage,
    Failed,
    File,
    Finished,
    LatentsStored,
    Planned,
    Ready,
    Stage,
    StepDone,
    StepStarted,
    Stopped,
    Work,
)
from longtake.queue.outcomes import Ran
from longtake.queue.policy import Policy
from longtake.queue.records import ArtifactKind, ErrorCode, Job, NewJob, WorkerRecord
from longtake.queue.runner import JobRunner
from longtake.queue.store import Store
from longtake.queue.ticks import Ticker, send_outbox
from longtake.settings import Settings

CHUNKS, STEPS, FRAMES = 3, 2, 12
# what a script yields beside messages: the process dies with this exit code
Death = int


@dataclass
class ScriptedEngine:
    """Speaks ``messages``, keeps to a script, and has no device.

    ``before`` is called with every message before the runner gets it. It may raise ``EngineDied``,
    change the store, or wait.
    """

    before: Callable[[EngineMessage, ScriptedEngine], EngineMessage | None] | None = None
    alive: bool = True
    killed: bool = False
    pid: int = 0
    stop_asked: threading.Event = field(default_factory=threading.Event)
    keep: bool = False
    done: list[str] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    _script: Iterator[EngineMessage] | None = None

    def start(self) -> Ready:
        return Ready(self.pid, "cpu", 1000)

    def send(self, work: Work) -> None:
        self.stop_asked.clear()
        self.works.append(work)
        self._script = play(work, self)

    def receive(self, timeout_s: float) -> EngineMessage | None:
        if self.killed:
            raise EngineDied(-9)
        if self._script is None:
            return None
        message = next(self._script, None)
        if message is not None and self.before is not None:
            message = self.before(message, self)
        if message is None:
            self.stop_asked.wait(timeout_s)
            return None
        self.done.append(describe(message))
        if isinstance(message, Finished | Stopped | Failed):
            self._script = None
        return message

    def ask_stop(self, *, keep: bool = False) -> None:
        self.keep = keep
        self.stop_asked.set()

    def kill(self) -> None:
        self.killed, self.alive = True, False

    def die(self, exit_code: int) -> None:
        self.alive = False
        raise EngineDied(exit_code)


def describe(message: EngineMessage) -> str:
    """A message in a word, with its chunk and step."""
    parts = [type(message).__name__]
    parts += [str(getattr(message, name)) for name in ("chunk", "step") if hasattr(message, name)]
    return " ".join(parts)


def play(work: Work, engine: ScriptedEngine) -> Iterator[EngineMessage]:
    """A rollout as the real engine tells it; goes on from stored chunks, stops when asked."""
    yield Planned({}, CHUNKS, STEPS)
    yield Stage("generating")
    frames = 0
    for chunk in range(CHUNKS):
        latents = work.folder / "latents" / f"chunk-{chunk}"
        segment = work.folder / "segments" / f"segment-{chunk}"
        reused = latents.exists()
        if not reused:
            for step in range(STEPS):
                if engine.stop_asked.is_set():
                    yield stopped(work, engine, frames)
                    return
                yield StepStarted(chunk, step)
                yield StepDone(chunk, CHUNKS, step + 1, STEPS)
            files = [write(latents, ArtifactKind.LATENTS)]
            if chunk == 0:
                files.append(write(latents.with_name("rollout.json"), ArtifactKind.ROLLOUT))
            yield LatentsStored(chunk, tuple(files))
        if segment.exists():
            frames += FRAMES
            continue
        if engine.stop_asked.is_set():
            yield stopped(work, engine, frames)
            return
        frames += FRAMES
        files = [write(segment, ArtifactKind.SEGMENT)]
        if chunk == 0:
            files.append(write(segment.with_name("init.mp4"), ArtifactKind.INIT))
        yield ChunkDone(chunk, FRAMES, frames, reused, {"decode": 0.5}, tuple(files))
    yield Stage("finishing")
    video = write(work.folder / "video.mp4", ArtifactKind.VIDEO)
    yield Finished(frames, (video,), {"total": 1.0}, 2000)


def stopped(work: Work, engine: ScriptedEngine, frames: int) -> Stopped:
    """What the engine says when it stops, with what it was told to keep."""
    kept = (write(work.folder / "video.mp4", ArtifactKind.VIDEO),) if engine.keep and frames else ()
    return Stopped(frames, kept, 2000)


def write(path: Path, kind: ArtifactKind) -> File:
    """A small file as the engine makes one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(f"{kind} {path.parent.parent.name}".encode())
    return File(kind, path, "application/octet-stream")


def failed(code: ErrorCode, message: str = "no", **more: Any) -> Failed:
    """The engine's last word about an attempt that raised."""
    values: dict[str, Any] = {"stage": "generating", "chunk": 1, "memory_bytes": 2000}
    return Failed(code, message, **(values | more))


@dataclass
class Rig:
    """Everything around a worker."""

    settings: Settings
    store: Store
    artifacts: Artifacts
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)

    failed = staticmethod(failed)
    until = staticmethod(lambda found, *needed: until(found, *needed))
    write = staticmethod(write)

    def submit(self, **changes: Any) -> Job:
        """A queued job."""
        values: dict[str, Any] = {
            "owner": "local",
            "request": {"prompt": "a red ball", "seed": 7},
            "plan": {"chunks": CHUNKS},
            "model": "papercut",
            "mode": "hybrid",
            "prompt": "a red ball",
        }
        [job] = self.store.submissions.submit([NewJob(**(values | changes))], {})
        return job

    def ask(self, **request: Any) -> Job:
        """A job of the default model, through the client, and its tick."""
        client = Client(self.store, self.settings)
        new = client.new_job({"prompt": "a red ball", "seed": 7, **request})
        [job] = self.store.submissions.submit([new], {})
        ticker = Ticker(self.settings.broker)
        assert send_outbox(self.store, ticker)
        ticker.close()
        return job

    def pixels(self, job: Job) -> bytes:
        """Decoded pixels of a job's video."""
        return frames_of(self, job)

    def claim(self, worker: str = "worker-1") -> Job:
        """The next job, running."""
        job = self.store.leases.claim(worker, "default", lease_s=self.settings.lease_s)
        assert job is not None
        return job

    def runner(self, engine: ScriptedEngine | None = None) -> JobRunner:
        """A runner on the scripted engine."""
        return JobRunner(self.store, self.artifacts, engine or self.engine, self.settings)

    def run(self, before: Any = None, **changes: Any) -> Ran:
        """Claim the next job, or a new one, and run one attempt."""
        self.engine = ScriptedEngine(before, **changes)
        if not self.store.outbox.queues_with_work():
            self.submit()
        return self.runner().run(self.claim())

    def job(self, job_id: str | None = None) -> Job:
        """A job as it is now; the only one if none is named."""
        if job_id is not None:
            return self.store.listings.get(job_id)
        [job] = self.store.listings.page(None).jobs
        return job

    def told(self, job: Job) -> list[str]:
        """Types of the job's events, in order, without ``video.``."""
        events = self.store.events.read(0, job_id=job.id)
        return [event.type.removeprefix("video.") for event in events]

    def files(self) -> list[str]:
        """Every file of the artifacts' folder."""
        root = Path(self.settings.artifacts)
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    def keys(self, job: Job) -> list[str]:
        """Every file of a job that the store knows of."""
        return sorted(artifact.key for artifact in self.store.files.of_job(job.id))

    def after(self, *, seconds: float) -> None:
        """Let a job's ``not_before`` pass."""
        until = time.monotonic() + seconds
        while not self.store.outbox.queues_with_work():
            if time.monotonic() > until:
                pytest.fail("nothing became claimable")
            time.sleep(0.01)


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Make a worker's surroundings with changes to the settings."""
    rigs: list[Rig] = []

    def make(**changes: Any) -> Rig:
        values: dict[str, Any] = {
            "data_dir": tmp_path / "data",
            "min_free_bytes": 0,
            "retry_delay_s": 0.05,
            "preload": False,
        }
        settings = Settings(**(values | changes))
        upgrade(settings.database)
        store = Store(open_database(settings.database), Policy.of(settings))
        rigs.append(Rig(settings, store, open_artifacts(settings)))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.store.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """A worker's surroundings."""
    return make_rig()


@pytest.fixture
def valkey(rig: Rig) -> Iterator[EmbeddedBroker]:
    """The rig's broker, running."""
    broker = EmbeddedBroker(rig.settings.data_dir, rig.settings.broker_socket)
    broker.start()
    yield broker
    broker.stop()


@dataclass
class RealWorker:
    """A ``longtake worker`` process with its engine, on a rig."""

    process: subprocess.Popen[bytes]
    rig: Rig

    def record(self) -> WorkerRecord | None:
        """What it says of itself, None before it does."""
        return next((w for w in self.rig.store.workers.list() if w.pid == self.process.pid), None)

    def engine(self) -> psutil.Process:
        """Its engine process, once it is there."""

        def found() -> int | None:
            record = self.record()
            return None if record is None else record.engine_pid

        return psutil.Process(until(found, self.process))


T = TypeVar("T")
REAL_WAIT_S = 240.0


def until(found: Callable[[], T | None], *needed: subprocess.Popen[bytes]) -> T:
    """Wait until there is something; processes that are needed for it must live."""
    pause = threading.Event()
    for _ in range(int(REAL_WAIT_S / 0.02)):
        if value := found():
            return value
        for process in needed:
            if process.poll() is not None:
                pytest.fail(f"{process.args!r} ended with {process.returncode}")
        pause.wait(0.02)
    pytest.fail("it did not come to that")


@pytest.fixture
def start_worker(
    make_model: Callable[..., Path], tmp_path: Path
) -> Iterator[Callable[..., RealWorker]]:
    """Start ``longtake worker`` with the tiny model; what is left of it is killed at the end."""
    running: list[subprocess.Popen[bytes]] = []

    def start(rig: Rig, **variables: str) -> RealWorker:
        told = {f"LONGTAKE_{name.upper()}": value for name, value in variables.items()}
        command = [sys.executable, "-m", "longtake", "worker", "--data", rig.settings.data_dir]
        environment = {**os.environ, "LONGTAKE_PRELOAD": "false", "OMP_NUM_THREADS": "1", **told}
        process = subprocess.Popen([str(part) for part in command], env=environment)
        running.append(process)
        return RealWorker(process, rig)

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def tiny(make_model: Callable[..., Path], make_rig: Callable[..., Rig]) -> Rig:
    """A rig that knows the tiny model."""
    folder = make_model("tiny")
    return make_rig(models=(str(folder),), default_model=str(folder), retry_delay_s=0.0)


def frames_of(rig: Rig, job: Job) -> bytes:
    """Decoded pixels of a job's video."""
    [video] = rig.store.files.of_job(job.id, ArtifactKind.VIDEO)
    path = rig.artifacts.local_path(video.key)
    assert path is not None
    with av.open(str(path)) as file:
        return b"".join(
            frame.to_ndarray(format="rgb24").tobytes() for frame in file.decode(video=0)
        )
