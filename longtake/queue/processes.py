"""Processes of this machine: who is alive, and children that end with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
# start times are compared in the clock ticks that the kernel counts
CLOCK_TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """A process by id and start time, so that a reused id is not taken for it."""

    pid: int
    started_at: float

    @property
    def alive(self) -> bool:
        """True while it runs; a zombie does not."""
        found = _find(self.pid)
        if found is None:
            return False
        with contextlib.suppress(psutil.Error):
            same = abs(float(found.create_time()) - self.started_at) <= CLOCK_TICK_S
            return same and bool(found.status() != psutil.STATUS_ZOMBIE)
        return False

    def end(self, wait_s: float) -> None:
        """SIGTERM, then SIGKILL when it is still there after ``wait_s``."""
        if not self.alive:
            return
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self.pid)
            found.send_signal(signal.SIGTERM)
            try:
                found.wait(wait_s)
            except psutil.TimeoutExpired:
                found.kill()
                found.wait(wait_s)


def identify(pid: int) -> Process | None:
    """The process that has this id now."""
    found = _find(pid)
    if found is None:
        return None
    with contextlib.suppress(psutil.Error):
        return Process(pid, found.create_time())
    return None


def memory_of(pid: int | None) -> int:
    """Resident bytes of a process, 0 if it is gone."""
    found = None if pid is None else _find(pid)
    if found is None:
        return 0
    with contextlib.suppress(psutil.Error):
        return int(found.memory_info().rss)
    return 0


def host_name() -> str:
    """Names the space in which a process id means something: host, boot and PID namespace."""
    parts = [socket.gethostname()[:64]]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            known = Path(path)
            parts.append(str(known.readlink()) if known.is_symlink() else known.read_text().strip())
    return "/".join(parts)


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent dies (Linux; else nothing).

    ``parent`` is who should be the parent: if it died before this call, the signal comes at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def killed_for_memory() -> int:
    """How many processes the kernel has killed for memory so far; -1 where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return -1


def _find(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None
