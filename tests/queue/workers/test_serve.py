"""``longtake serve`` with real children: what is restarted, refused, reclaimed and left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
import pytest

from longtake.cli import main
from longtake.errors import ServiceError
from longtake.queue.records import JobState
from longtake.serve import CHILDREN_NAME, is_loopback, listen
from longtake.supervise import Child, FolderLock

if TYPE_CHECKING:
    from tests.queue.workers.conftest import Rig

STOP_S = 60


class Served:
    """A running ``longtake serve``."""

    def __init__(self, rig: Rig, process: subprocess.Popen[str]) -> None:
        self.rig = rig
        self.process = process
        self._data = rig.settings.data_dir

    @property
    def url(self) -> str:
        """Where it is, once it listens."""
        return str(self.rig.until(lambda: self._told().get("url"), self.process))

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a route; waits for the API to answer."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=STOP_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def children(self) -> dict[str, psutil.Process]:
        """The children by what they are."""
        names = {"api": "api", "worker": "worker", "valkey-server": "broker"}
        found = {}
        for child in psutil.Process(self.process.pid).children():
            line = child.cmdline()
            name = next((names[word] for word in names for part in line[:5] if word in part), "?")
            found[name] = child
        return found

    def complete(self) -> dict[str, psutil.Process] | None:
        """The children, once all are there and have become what they are to be."""
        try:
            children = self.children()
        except psutil.NoSuchProcess:
            return None
        return children if set(children) == {"api", "worker", "broker"} else None

    def _told(self) -> dict[str, Any]:
        try:
            told: dict[str, Any] = json.loads((self._data / "serve.json").read_text())
        except (OSError, ValueError):
            return {}
        return told


@pytest.fixture
def serve(rig: Rig) -> Iterator[Callable[[], Served]]:
    """Start ``longtake serve`` on a free port."""
    running: list[subprocess.Popen[str]] = []

    def start() -> Served:
        data = str(rig.settings.data_dir)
        command = [sys.executable, "-m", "longtake", "serve", "--data", data, "--port", "0"]
        environment = {**os.environ, "LONGTAKE_PRELOAD": "false", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        running.append(process)
        return Served(rig, process)

    yield start
    for process in running:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def gone(processes: dict[str, psutil.Process]) -> list[str]:
    """Names of processes that are still there after a while."""
    psutil.wait_procs(list(processes.values()), timeout=STOP_S)
    return [name for name, process in processes.items() if process.is_running()]


def test_the_life_of_a_service(
    rig: Rig, serve: Callable[[], Served], capsys: pytest.CaptureFixture[str]
) -> None:
    """Start, refuse a second, restart what dies, end with the supervisor, and start again."""
    first = serve()
    assert first.get("/healthz") == (200, {"status": "ok"})
    children = rig.until(first.complete, first.process)

    data = rig.settings.data_dir
    assert main(["serve", "--data", str(data), "--port", "0", "--json"]) == 3
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert f"process {first.process.pid} at {first.url}" in message

    for name in ("api", "worker", "broker"):
        children[name].kill()
        assert gone({name: children[name]}) == []
    again = rig.until(first.complete, first.process)
    assert {child.pid for child in children.values()}.isdisjoint(c.pid for c in again.values())
    assert first.get("/healthz") == (200, {"status": "ok"})

    pid = again["worker"].pid
    held = rig.until(lambda: [w for w in rig.store.workers.list() if w.pid == pid], first.process)
    job = rig.submit(queue="of another worker")
    assert rig.store.leases.claim(held[0].id, job.queue, lease_s=3600)
    first.process.kill()
    first.process.wait()
    assert gone(again) == []
    assert rig.job(job.id).state is JobState.RUNNING

    # the parent's death is a SIGTERM to the worker; had it been killed as well, this is left
    rig.store.workers.beat(held[0])
    second = serve()
    rig.until(lambda: rig.job(job.id).state is JobState.QUEUED, second.process)
    assert second.get("/healthz")[0] == 200
    children = rig.until(second.complete, second.process)
    url = second.url

    second.process.send_signal(signal.SIGINT)
    out, _ = second.process.communicate(timeout=STOP_S)
    assert second.process.returncode == 0
    assert gone(children) == []
    assert f"longtake is at {url}" in out
    assert "stop with Ctrl-C" in out
    assert not (data / CHILDREN_NAME).exists()
    assert rig.store.workers.list() == []


def test_orphans_of_an_earlier_run_are_ended(rig: Rig, serve: Callable[[], Served]) -> None:
    """As on systems without a parent-death signal; a reused process id is left alone."""
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    orphan = subprocess.Popen(command, stdout=subprocess.PIPE)
    other = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        for process in (orphan, other):
            assert process.stdout is not None
            process.stdout.readline()
        started = psutil.Process(orphan.pid).create_time()
        entries = [[orphan.pid, started], [other.pid, started - 1000]]
        (rig.settings.data_dir / CHILDREN_NAME).write_text(json.dumps(entries))
        served = serve()
        assert orphan.wait(STOP_S) == -signal.SIGTERM
        rig.until(served.complete, served.process)
        assert other.poll() is None
        served.process.send_signal(signal.SIGTERM)
        served.process.communicate(timeout=STOP_S)
        assert served.process.returncode == 0
    finally:
        for process in (orphan, other):
            process.kill()
            process.communicate()


def test_an_address_in_use_is_named() -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.raises(ServiceError, match=f"host=127.0.0.1 port={port}: cannot listen there"):
        listen("127.0.0.1", port)
    listener.close()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.5.5.5", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104 - asked, not bound
        ("::", False),
        ("192.168.1.5", False),
        ("example.com", False),
        ("localhost.example.com", False),
    ],
)
def test_what_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_a_lock_says_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    assert FolderLock(path).holder() is None
    with FolderLock(path) as lock:
        lock.tell(url="http://127.0.0.1:1")
        assert FolderLock(path).holder() == {"pid": os.getpid(), "url": "http://127.0.0.1:1"}
        with pytest.raises(ServiceError, match=f"process {os.getpid()} at http://127.0.0.1:1"):
            FolderLock(path).__enter__()
    assert FolderLock(path).holder() is None


def test_a_child_is_started_again_after_a_while(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child("one", ["--version"], os.environ)
    child.start()
    for backoff_s in (0.5, 1.0):
        child.kill()
        monkeypatch.setattr("time.monotonic", lambda: 0.0)
        assert not child.revive()
        monkeypatch.setattr("time.monotonic", lambda at=backoff_s: at - 0.01)
        assert not child.revive()
        monkeypatch.setattr("time.monotonic", lambda at=backoff_s: at)
        assert child.revive()
        monkeypatch.undo()
    child.kill()
