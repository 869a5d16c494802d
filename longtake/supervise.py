"""Parts of the supervisor: a lock on a folder, and a child that is restarted."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from longtake.errors import ServiceError

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
# a child that lived for so long has recovered
STEADY_S = 30.0
PARENT_VARIABLE = "LONGTAKE_SERVE_PID"
# set for children whose lines end up on a terminal
TERMINAL_VARIABLE = "LONGTAKE_SERVE_TERMINAL"
logger = logging.getLogger(__name__)


class FolderLock:
    """One instance for one file's folder; the file says who holds it.

    The kernel drops the lock with the process, so nothing is ever left to clear away.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> FolderLock:
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            holder = self._read()
            raise ServiceError(
                f"{self._path.parent} is served already, by process {holder.get('pid', '?')} "
                f"at {holder.get('url', 'an address that it is still preparing')}"
            ) from None
        self._file = file
        self.tell()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None

    def tell(self, **more: str) -> None:
        """Write who holds the lock, and what else there is to know."""
        if self._file is None:
            return
        self._file.seek(0)
        self._file.truncate(0)
        json.dump({"pid": os.getpid(), **more}, self._file)
        self._file.flush()

    def holder(self) -> Mapping[str, object] | None:
        """What the holder wrote, None if nobody holds the lock."""
        if not self._path.is_file():
            return None
        with self._path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return self._read()
        return None

    def _read(self) -> dict[str, object]:
        with contextlib.suppress(ValueError, OSError):
            held = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(held, dict):
                return held
        return {}


class Child:
    """A ``longtake`` command as a child process; its output is passed on, a line at a time.

    Args:
        name: put before every line.
        command: arguments of ``python -m longtake``.
        environment: of the child.
        files: numbers of files that it inherits.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._command = [sys.executable, "-P", "-m", "longtake", *command]
        self._environment = {**environment, PARENT_VARIABLE: str(os.getpid())}
        if sys.stderr.isatty():
            self._environment[TERMINAL_VARIABLE] = "1"
        self._files = tuple(files)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._again_at: float | None = None

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The process id, None once it has ended."""
        return self._process.pid if self._process is not None and self.alive else None

    def start(self) -> None:
        """Start the process. From the main thread: the kernel ties its life to the thread's."""
        self._started_at = time.monotonic()
        self._again_at = None
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            self._command,
            env=dict(self._environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=self._files,
            start_new_session=True,
        )
        threading.Thread(
            target=self._pass_on, args=(self._process.stdout,), name=self.name, daemon=True
        ).start()

    def revive(self) -> bool:
        """Start the process again if it has died and has been waited for; True if it was."""
        if self.alive or self._process is None:
            return False
        now = time.monotonic()
        if self._again_at is None:
            if now - self._started_at > STEADY_S:
                self._backoff_s = FIRST_BACKOFF_S
            self._again_at = now + self._backoff_s
            logger.warning(
                "%s ended with %s; starting it again in %g s",
                self.name,
                self._process.returncode,
                self._backoff_s,
            )
            self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
        if now < self._again_at:
            return False
        self.start()
        return True

    def terminate(self) -> None:
        """Ask it to stop."""
        if self._process is not None and self.alive:
            self._process.terminate()

    def kill(self) -> None:
        """End it now, and wait until it is gone."""
        if self._process is None:
            return
        if self.alive:
            logger.warning("%s did not stop in time and is killed", self.name)
            self._process.kill()
        self._process.wait()

    def _pass_on(self, stream: IO[bytes] | None) -> None:
        if stream is None:
            return
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                # a line of JSON stays one, for whoever collects them
                prefix = "" if text.startswith("{") else f"[{self.name}] "
                sys.stderr.write(f"{prefix}{text}\n")
                sys.stderr.flush()
