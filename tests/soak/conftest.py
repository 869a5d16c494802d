"""A whole service of real processes on the tiny model, as a client and as its data show it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import av
import httpx
import psutil
import pytest

from longtake.queue.database import upgrade
from longtake.queue.listings import Filters
from longtake.queue.records import Job, JobState
from longtake.queue.store import Store, open_store
from longtake.settings import Settings

if TYPE_CHECKING:
    from tests.queue.conftest import PostgresServer

WAIT_S = 240.0
POLL_S = 0.05
STOP_S = 60
# in the environment of every process of a service, so that none escapes
MARK = "LONGTAKE_SOAK_RUN"
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What kind of service: its database, how many workers, further settings."""

    model: Path
    database_url: str | None = None
    workers: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)


class Served:
    """A running ``longtake serve``; ``store`` reads the same database."""

    def __init__(self, data: Path, options: Options) -> None:
        self.data = data
        self.options = options
        settings = Settings(data_dir=data, database_url=options.database_url)
        upgrade(settings.database)
        self.store: Store = open_store(settings)
        variables = {
            "DATA_DIR": str(data),
            "MODELS": json.dumps([str(options.model)]),
            "DEFAULT_MODEL": str(options.model),
            "RETRY_DELAY_S": "0.2",
            "RECONCILE_S": "1",
            "POLL_S": "1",
            "LOG_LEVEL": "warning",
            "MIN_FREE_BYTES": "0",
        }
        if options.database_url is not None:
            variables["DATABASE_URL"] = options.database_url
        variables |= dict(options.variables)
        self._mark = str(data)
        self._environment = {
            **os.environ,
            **{f"LONGTAKE_{name}": value for name, value in variables.items()},
            MARK: self._mark,
            "OMP_NUM_THREADS": "1",
        }
        self.process = self._start()
        self.http = httpx.Client(timeout=STOP_S, trust_env=False)

    def until(self, what: str, found: Callable[[], T | None]) -> T:
        """Wait until there is something; a service that never gets there fails the test."""
        pause = threading.Event()
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if value := found():
                return value
            if self.process.poll() is not None:
                pytest.fail(f"serve ended while waiting for {what}:\n{self._log()}")
            pause.wait(POLL_S)
        pytest.fail(f"not within {WAIT_S:g} s: {what}\n{self._log()}")

    def ready(self) -> None:
        """Wait until a video that is asked for now would be made."""

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return self.http.get(f"{self.url}/readyz").is_success
            return False

        self.until("the service is ready", answers)

    @property
    def url(self) -> str:
        """Where it is, once it listens."""
        return self.until("the service listens", lambda: self._told().get("url"))

    def ask(self, method: str, path: str, **how: Any) -> httpx.Response:
        """A request, tried again while the service is not there or says that it cannot just now."""

        def answer() -> httpx.Response | None:
            try:
                got = self.http.request(method, f"{self.url}{path}", **how)
            except httpx.TransportError:
                return None
            if got.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                assert got.headers.get("retry-after"), got.text
                return None
            assert got.is_success, got.text
            return got

        return self.until(f"{method} {path} succeeds", answer)

    def submit(self, number: int, **request: Any) -> str:
        """Ask for a video with an idempotency key of its own; the id."""
        headers = {"idempotency-key": f"{self.data.name}-{number}"}
        answer = self.ask("POST", "/v1/videos", json=request, headers=headers)
        return str(answer.json()["id"])

    def pixels(self, video: str) -> str:
        """Digest of the decoded pixels of a video, as it is downloaded."""
        content = self.ask("GET", f"/v1/videos/{video}/content").content
        digest = hashlib.sha256()
        with av.open(io.BytesIO(content), "r") as file:
            for frame in file.decode(video=0):
                digest.update(frame.to_ndarray(format="rgb24").tobytes())
        return digest.hexdigest()

    def completed(self) -> int:
        """How many videos are there."""
        return self.store.listings.counts()[JobState.COMPLETED]

    def running(self) -> list[Job]:
        """The jobs that a worker has."""
        filters = Filters(state=JobState.RUNNING)
        return self.store.listings.page(None, filters=filters).jobs

    def finished(self, videos: list[str]) -> list[Job] | None:
        """The jobs of these videos, once none will change any more."""
        found = [self.store.listings.get(video) for video in videos]
        return found if all(job.finished for job in found) else None

    def part(self, kind: str) -> list[psutil.Process]:
        """Processes of one kind that run now: api, worker, engine or broker."""
        found = []
        for process in self._children():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and kind == _kind(process.cmdline()):
                    found.append(process)
        return found

    def strangers(self) -> list[str]:
        """Command lines of processes of this service that hang on no supervisor."""
        family = {self.process.pid, *(child.pid for child in self._children())}
        return [line for pid, line in self._marked().items() if pid not in family]

    def stop(self) -> list[str]:
        """Ctrl-C; what is left of it then."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(STOP_S) == 0
        return list(self._marked().values())

    def close(self) -> None:
        """End everything, however the test went."""
        self.http.close()
        self.store.close()
        for child in self._children():
            with contextlib.suppress(psutil.Error):
                child.kill()
        self.process.kill()
        self.process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "longtake", "serve", "--data", str(self.data)]
        command += ["--port", "0", "--workers", str(self.options.workers)]
        log = (self.data / "serve.log").open("ab")
        with log:
            return subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    def _log(self) -> str:
        return (self.data / "serve.log").read_text(errors="replace")[-4000:]

    def _told(self) -> dict[str, str]:
        try:
            told: dict[str, str] = json.loads((self.data / "serve.json").read_text())
        except (OSError, ValueError):
            return {}
        return told

    def _children(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return list(psutil.Process(self.process.pid).children(recursive=True))
        return []

    def _marked(self) -> dict[int, str]:
        """Live processes whose environment has this service's mark, with their command lines."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get(MARK) == self._mark:
                    found[process.pid] = " ".join(process.cmdline())
        return found


def _kind(line: list[str]) -> str:
    """What a process of a service is, by its command line."""
    text = " ".join(line)
    if "valkey-server" in "".join(line[:1]):
        return "broker"
    if "spawn_main" in text:
        return "engine"
    for kind in ("api", "worker"):
        if kind in line[:6]:
            return kind
    return "?"


@pytest.fixture
def make_service(
    make_model: Callable[..., Path], tmp_path: Path
) -> Iterator[Callable[..., Served]]:
    """Start a whole service with the tiny model; what is left of it is killed at the end."""
    running: list[Served] = []

    def make(**changes: Any) -> Served:
        data = tmp_path / f"data-{len(running)}"
        data.mkdir()
        model = make_model(f"tiny-{len(running)}")
        running.append(Served(data, Options(model, **changes)))
        running[-1].ready()
        return running[-1]

    yield make
    for service in running:
        service.close()


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of its own; where there is none the test skips, and fails in CI."""
    module: Any = _queue_fixtures()
    found = module.find_postgres()
    if isinstance(found, str):
        if os.environ.get("CI"):
            pytest.fail(found)
        pytest.skip(found)
    folder = Path(tempfile.mkdtemp(prefix="longtake-pg-"))
    server: PostgresServer = module.PostgresServer(folder, *found)
    try:
        server.make()
        server.start()
        server.execute("CREATE DATABASE longtake")
        try:
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _queue_fixtures() -> object:
    """tests/queue/conftest.py, which pytest lets only tests below it see."""
    path = Path(__file__).parents[1] / "queue" / "conftest.py"
    spec = importlib.util.spec_from_file_location("soak_queue_fixtures", path)
    if spec is None or spec.loader is None:
        pytest.fail(f"{path} is gone")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
