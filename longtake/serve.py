"""Everything on one machine: broker, migrations, API and workers, watched and restarted.

The supervisor holds a lock on the data folder and the API's listening socket; so a second instance
is refused, and an API that is restarted loses no connection that waits. Children run in sessions of
their own: Ctrl-C reaches the supervisor only, which stops them in order.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from longtake.errors import ServiceError
from longtake.queue.broker import EmbeddedBroker
from longtake.queue.database import upgrade
from longtake.queue.processes import Process, identify
from longtake.queue.reconcile import reclaim_dead
from longtake.queue.store import Store, open_store
from longtake.settings import PREFIX, Settings
from longtake.supervise import Child, FolderLock

WATCH_S = 0.1
# Ctrl-C takes at most 5 s: warm stop, then SIGKILL, then the broker's own end
WARM_S = 3.0
BACKLOG = 1024
RUNNING_NAME, CHILDREN_NAME = "serve.json", "children.json"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What ``longtake serve`` was told; settings hold the rest.

    Attributes:
        workers: worker processes.
        devices: one for each worker, in turn; empty leaves the choice to the settings.
    """

    workers: int = 1
    devices: tuple[str, ...] = ()


class Supervisor:
    """Starts, watches and stops the service on one machine."""

    def __init__(self, settings: Settings, options: ServeOptions) -> None:
        self._settings = settings
        self._options = options
        self._data = settings.data_dir
        self._lock = FolderLock(self._data / RUNNING_NAME)
        self._broker: EmbeddedBroker | None = None
        self._children: list[Child] = []
        self._socket: socket.socket | None = None
        self._stop = threading.Event()
        self._signals = 0

    def run(self) -> int:
        """Run until SIGINT or SIGTERM; the exit code.

        Raises:
            ServiceError: another instance runs, the address is taken or not allowed, or a part
                does not start.
        """
        self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock:
            previous = self._handle_signals()
            try:
                self._start()
                self._watch()
            finally:
                self._shut_down()
                for number, handler in previous.items():
                    signal.signal(number, handler)
        return 0

    def _start(self) -> None:
        settings = self._settings
        self._end_orphans()
        store = self._open_store()
        try:
            check_address(settings, store)
            reclaim_dead(store)
        finally:
            store.close()
        self._socket = listen(settings.host, settings.port)
        if settings.redis_url is None:
            self._broker = EmbeddedBroker(self._data, settings.broker_socket)
            self._broker.start()
        self._children = [self._api(), *map(self._worker, range(self._options.workers))]
        for child in self._children:
            child.start()
        self._lock.tell(url=self._url)
        self._record_children()

    def _open_store(self) -> Store:
        upgrade(self._settings.database)
        return open_store(self._settings)

    @property
    def _url(self) -> str:
        """Where the API answers, as a person on this machine would type it."""
        if self._socket is None:
            return ""
        host, port = self._socket.getsockname()[:2]
        if host in ("0.0.0.0", "::"):  # noqa: S104 - shown, not bound
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{port}{self._settings.base_path}"

    def _api(self) -> Child:
        if self._socket is None:
            raise ServiceError("the API has no socket")
        number = self._socket.fileno()
        command = ["api", "--fd", str(number)]
        return Child("api", command, self._environment(), files=(number,))

    def _worker(self, index: int) -> Child:
        name = "worker" if self._options.workers == 1 else f"worker-{index + 1}"
        command = ["worker"]
        if self._options.devices:
            command += ["--device", self._options.devices[index % len(self._options.devices)]]
        return Child(name, command, self._environment())

    def _environment(self) -> dict[str, str]:
        """The settings as the children will read them; flags win over the environment."""
        settings = self._settings
        told = {
            "DATA_DIR": str(self._data.resolve()),
            "HOST": settings.host,
            "PORT": str(settings.port),
            "ALLOW_OPEN": str(settings.allow_open).lower(),
        }
        if settings.gpus:
            told["GPUS"] = json.dumps(settings.gpus)
        for name in ("parallel", "kv_cache", "profile"):
            if (value := getattr(settings, name)) is not None:
                told[name.upper()] = value
        return {**os.environ, **{PREFIX + name: value for name, value in told.items()}}

    def _watch(self) -> None:
        """Restart what dies, until told to stop."""
        threading.Thread(target=self._announce, name="announce", daemon=True).start()
        while not self._stop.wait(WATCH_S):
            changed = [child.revive() for child in self._children]
            if self._broker is not None and not self._broker.alive:
                logger.warning("the broker is gone; starting it again")
                with contextlib.suppress(ServiceError):
                    self._broker.start()
                changed.append(True)
            if any(changed):
                self._record_children()

    def _announce(self) -> None:
        """Say where the service is, once it answers."""
        while not self._stop.is_set():
            if _answers(self._socket):
                break
            self._stop.wait(WATCH_S)
        else:
            return
        lines = (
            f"longtake is at {self._url}",
            f"data in {self._data.resolve()}",
            "stop with Ctrl-C; queued and running videos go on with the next start",
        )
        sys.stdout.write("".join(f"  {line}\n" for line in lines))
        sys.stdout.flush()

    def _shut_down(self) -> None:
        """Warm stop of all children at once, SIGKILL for those that take too long."""
        until = time.monotonic() + WARM_S
        for child in self._children:
            child.terminate()
        while any(child.alive for child in self._children):
            if time.monotonic() > until or self._signals > 1:
                break
            time.sleep(WATCH_S / 5)
        for child in self._children:
            child.kill()
        if self._broker is not None:
            self._broker.stop()
        if self._socket is not None:
            self._socket.close()
        (self._data / CHILDREN_NAME).unlink(missing_ok=True)

    def _handle_signals(self) -> Mapping[int, Any]:
        """Ctrl-C and SIGTERM stop the service; a second one does not wait for the warm stop."""

        def handle(_number: int, _frame: FrameType | None) -> None:
            self._signals += 1
            self._stop.set()

        return {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def _record_children(self) -> None:
        """Write down who the children are, for a next run that finds them orphaned."""
        pids = [child.pid for child in self._children]
        if self._broker is not None:
            pids.append(self._broker.pid)
        known = [identify(pid) for pid in pids if pid is not None]
        entries = [[process.pid, process.started_at] for process in known if process is not None]
        target = self._data / CHILDREN_NAME
        part = target.with_suffix(".part")
        part.write_text(json.dumps(entries), encoding="utf-8")
        part.replace(target)

    def _end_orphans(self) -> None:
        """End children of an earlier run that was killed; process ids are checked by start time."""
        path = self._data / CHILDREN_NAME
        if not path.is_file():
            return
        with contextlib.suppress(ValueError, TypeError):
            for pid, started_at in json.loads(path.read_text(encoding="utf-8")):
                orphan = Process(int(pid), float(started_at))
                if orphan.alive:
                    logger.warning("ending process %d of an earlier run", orphan.pid)
                    orphan.end(WARM_S)
        path.unlink(missing_ok=True)


def check_address(settings: Settings, store: Store) -> None:
    """Refuse to listen beyond loopback where anybody could use the service.

    Raises:
        ServiceError: no keys, and the flag and the setting that allow it were not both given.
    """
    if is_loopback(settings.host) or settings.allow_open:
        return
    if settings.require_keys or store.keys.list():
        return
    raise ServiceError(
        f"host={settings.host}: anybody who reaches this address could use the service; make a key "
        "first (longtake keys create NAME), or say that this is meant (--allow-open)"
    )


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that children inherit; port 0 takes any.

    Raises:
        ServiceError: the address is taken or not of this machine.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise ServiceError(f"host={host} port={port}: cannot listen there: {reason}") from error
    listener.set_inheritable(True)
    return listener


def _answers(listener: socket.socket | None) -> bool:
    """True once the API answers on the socket it inherited."""
    if listener is None:
        return False
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - asked, not bound
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status < http.client.INTERNAL_SERVER_ERROR
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def serve(settings: Settings, options: ServeOptions) -> int:
    """Run the whole service on this machine; the exit code."""
    return Supervisor(settings, options).run()


def running(data_dir: Path) -> Mapping[str, object] | None:
    """What the instance on this data folder says of itself, None if there is none."""
    return FolderLock(data_dir / RUNNING_NAME).holder()


__all__: Sequence[str] = (
    "ServeOptions",
    "Supervisor",
    "check_address",
    "listen",
    "running",
    "serve",
)
