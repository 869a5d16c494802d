"""A served longtake of a benchmark's own, and the processes beside it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pwd import getpwnam
from typing import IO, Any
from urllib.parse import urlsplit

import torch

from longtake.errors import ServiceError
from longtake.settings import PREFIX

ROOT = Path(__file__).parents[1]
WAIT_S = 120.0
STOP_S = 30.0
POLL_S = 0.005
IDLE_S = 2.0  # the server closes a connection that was idle for 5 s
JSON_HEADERS = {"content-type": "application/json"}


class Http:
    """One connection to a served longtake, kept open between requests."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._address, timeout=WAIT_S)
        self._used_at = 0.0

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of one answer."""
        if time.monotonic() - self._used_at > IDLE_S:
            self._connection.close()
        self._connection.request(method, path, body, JSON_HEADERS if body else {})
        answer = self._connection.getresponse()
        text = answer.read()
        self._used_at = time.monotonic()
        return answer.status, text

    def get(self, path: str) -> bytes:
        """The body of what must be there."""
        return self._sure("GET", path)

    def submit(self, request: bytes) -> str:
        """Queue a video; its id."""
        return str(json.loads(self._sure("POST", "/v1/videos", request))["id"])

    def follow(self, video_id: str) -> None:
        """Return once the video's stream of events has told that it is completed."""
        connection = http.client.HTTPConnection(self._address, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request("GET", f"/v1/videos/{video_id}/events")
            for line in connection.getresponse():
                if line.startswith((b"event: video.failed", b"event: video.cancelled")):
                    raise ServiceError(f"{video_id} was not made")
                if line.startswith(b"event: video.completed"):
                    return
        raise ServiceError(f"{video_id}: the stream of events ended too early")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _sure(self, method: str, path: str, body: bytes | None = None) -> bytes:
        status, text = self.ask(method, path, body)
        if status >= http.client.BAD_REQUEST:
            raise ServiceError(f"{method} {path}: {status} {text.decode(errors='replace')[:300]}")
        return text


class Site:
    """``longtake serve`` on a folder, with no worker or with one that notes when steps begin."""

    def __init__(self, data: Path, url: str) -> None:
        self.url = url
        self.data = data
        self.http = Http(url)

    def noted(self, video_id: str, what: str) -> float:
        """When the worker saw that of this video, by the clock of ``time.time``."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            for line in _whole_lines(self.data / "notes"):
                note = json.loads(line)
                if (note["job"], note["what"]) == (video_id, what):
                    return float(note["at"])
            time.sleep(POLL_S)
        raise ServiceError(f"{video_id}: the worker noted no {what!r}")

    def wait_for_worker(self) -> None:
        """Return once a worker is idle, its engine ready."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            workers = json.loads(self.http.get("/v1/workers"))["data"]
            if any(worker["state"] == "idle" for worker in workers):
                return
            time.sleep(5 * POLL_S)
        raise ServiceError("no worker was ready in time")


@contextmanager
def served(data: Path, *, worker: bool, settings: Mapping[str, str]) -> Iterator[Site]:
    """A service that runs until the block ends; ``settings`` are names and values of the rest."""
    data.mkdir(parents=True, exist_ok=True)
    told = {"DATA_DIR": str(data), "PORT": "0", "LOG_LEVEL": "warning", **settings}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment = kept | {PREFIX + name: value for name, value in told.items()} | threads()
    with ExitStack() as stack:
        errors = stack.enter_context((data / "errors").open("ab"))
        command = [sys.executable, "-P", "-m", "longtake", "serve", "--workers", "0"]
        with_output = {"env": environment, "stderr": errors, "cwd": ROOT}
        serve = stack.enter_context(
            running(command, stdout=subprocess.PIPE, text=True, **with_output)
        )
        url = _address(serve.stdout, data / "errors")
        site = Site(data, url)
        stack.callback(site.http.close)
        if worker:
            command = [sys.executable, "-P", str(ROOT / "benchmarks" / "service_worker.py")]
            stack.enter_context(
                running([*command, str(data / "notes")], stdout=errors, **with_output)
            )
            site.wait_for_worker()
        yield site


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that is told to stop, and killed if it does not, when the block ends."""
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def threads() -> dict[str, str]:
    """As many threads in a child as in this process."""
    return {"OMP_NUM_THREADS": str(torch.get_num_threads())}


class WarmEngine:
    """The engine alone, in a process of its own that keeps the model loaded."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._path = folder / "alone.mp4"

    def make(self, frames: int) -> dict[str, Any]:
        """``seconds`` of one video, and ``chunk_s`` of its chunks."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ServiceError("the engine alone has no pipes")
        self._path.unlink(missing_ok=True)
        self._path.with_suffix(".json").unlink(missing_ok=True)
        stdin.write(json.dumps({"frames": frames, "path": str(self._path)}) + "\n")
        stdin.flush()
        made: dict[str, Any] = json.loads(stdout.readline() or "{}")
        if not made:
            raise ServiceError("the engine alone ended")
        return made


@contextmanager
def warm_engine(folder: Path) -> Iterator[WarmEngine]:
    """An engine process; the first video loads the model."""
    command = [sys.executable, "-m", "benchmarks.service_engine"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with running(command, cwd=ROOT, env=os.environ | threads(), **pipes) as process:
        yield WarmEngine(process, folder)


def postgres_programs() -> Path | None:
    """Folder of PostgreSQL's programs, None where it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    on_path = shutil.which("postgres")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


@contextmanager
def postgres(programs: Path) -> Iterator[str]:
    """A new PostgreSQL server, durable as it comes; the URL of its database."""
    user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    with tempfile.TemporaryDirectory(prefix="longtake-pg-") as name:
        folder = Path(name)
        if user is not None:
            entry = getpwnam(user)
            os.chown(folder, entry.pw_uid, entry.pw_gid)

        def call(program: str, *arguments: str) -> None:
            with (folder / "commands").open("ab") as log:
                command = [str(programs / program), "-D", str(folder / "data"), *arguments]
                subprocess.run(command, user=user, cwd=folder, stdout=log, stderr=log, check=True)

        call("initdb", "-A", "trust", "-U", "longtake", "-E", "UTF8")
        options = f"-c listen_addresses='' -c unix_socket_directories='{folder}'"
        call("pg_ctl", "start", "-w", "-l", str(folder / "log"), "-o", options)
        try:
            # initdb makes a database of that name
            yield f"postgresql+psycopg://longtake@/postgres?host={folder}"
        finally:
            call("pg_ctl", "stop", "-w", "-m", "fast")


def _address(stream: IO[str] | None, errors: Path) -> str:
    """Where the service says it is; its output is read no further."""
    for line in stream or ():
        _, found, url = line.partition("longtake is at ")
        if found:
            return url.strip()
    raise ServiceError(f"the service does not start: {errors.read_text()[-2000:]}")


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text[: text.rfind("\n") + 1].splitlines()
