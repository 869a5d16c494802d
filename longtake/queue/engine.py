"""The worker's side of the engine process: start it, give it work, listen, stop it, kill it.

torch is imported in the child alone. The child leads a session of its own and ignores what a
terminal or a service manager sends to all processes: the worker says when to stop. It dies with
the worker, whatever kills that.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from longtake.errors import ServiceError
from longtake.queue.messages import EngineMessage, Failed, Ready, Work
from longtake.queue.processes import end_with_parent

if TYPE_CHECKING:
    from longtake.settings import Settings

RUN, STOP, STOP_AND_KEEP = 0, 1, 2
KILL_WAIT_S = 30.0
# a rank may wait this many times as long as any stage of another may take: the worker, which hears
# of stages, ends a group first
PATIENCE = 3.0

# Linux ends a child with the *thread* that started it, so that thread must live as long as we do
STARTER = ThreadPoolExecutor(1, thread_name_prefix="engine-starter")


class EngineDied(Exception):
    """The process is gone; ``exit_code`` is negative for a signal."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"the engine process ended with code {exit_code}")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine process runs.

    Attributes:
        device, dtype, backend: as of ``EngineOptions``.
        threads: CPU threads; None leaves torch's own choice.
        preload: model loaded before ``Ready``; a model that cannot be loaded is no reason to fail.
        environment: variables of the child alone, set before torch is imported.
        start_limit_s: longest wait for ``Ready``.
        kv_cache, profile: as of ``EngineOptions``.
        data_limit_s, control_limit_s: how long a rank of a group waits for the others, as of
            ``parallel_groups.Limits``.
    """

    device: str | None = None
    dtype: str | None = None
    backend: str = "auto"
    threads: int | None = None
    preload: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    start_limit_s: float = 300.0
    kv_cache: str | None = None
    profile: str | None = None
    data_limit_s: float = 1800.0
    control_limit_s: float = 7200.0

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """What the service's settings say."""
        shared = max(settings.step_limit_s, settings.decode_limit_s)
        longest = max(shared, settings.load_limit_s, settings.finish_limit_s)
        return cls(
            device=settings.device,
            dtype=settings.dtype,
            backend=settings.backend,
            threads=settings.threads,
            preload=settings.default_model if settings.preload else None,
            start_limit_s=settings.start_limit_s,
            kv_cache=settings.kv_cache,
            profile=settings.profile,
            data_limit_s=PATIENCE * shared,
            control_limit_s=PATIENCE * longest,
        )


class EngineProcess:
    """One engine process at a time; ``start`` after its end makes a new one.

    One thread sends and receives; ``ask_stop`` and ``kill`` may come from others.
    """

    def __init__(self, options: EngineSettings) -> None:
        self.options = options
        self._context = multiprocessing.get_context("spawn")
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Connection | None = None
        self._heard: deque[EngineMessage] = deque()
        self._stop: Any = self._context.RawValue("i", RUN)

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        process = self._process
        return process is not None and _ended(process, self._lock, 0.0) is False

    @property
    def pid(self) -> int | None:
        """The process's id, also after its end; None before the first start."""
        return None if self._process is None else self._process.pid

    def start(self) -> Ready:
        """Start the process and wait until it has imported everything.

        Raises:
            ServiceError: it says that it cannot work here, or is not ready in time.
            EngineDied: it ended instead.
        """
        self.kill()
        self._heard.clear()
        self._stop = self._context.RawValue("i", RUN)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_child,
            args=(self.options, theirs, self._stop, os.getpid()),
            name="longtake-engine",
        )
        STARTER.submit(process.start).result()
        theirs.close()
        self._process, self._pipe = process, ours
        message = self.receive(self.options.start_limit_s)
        if isinstance(message, Ready):
            return message
        self.kill()
        reason = message.message if isinstance(message, Failed) else "it was not ready in time"
        raise ServiceError(f"the engine does not start: {reason}")

    def send(self, work: Work) -> None:
        """Give the process an attempt to do; a stop asked for earlier is forgotten.

        Raises:
            EngineDied: the process is gone.
        """
        self._stop.value = RUN
        self._heard.clear()
        self._send(work)

    def receive(self, timeout_s: float | None) -> EngineMessage | None:
        """The next message, or None after ``timeout_s`` (None waits for ever).

        Raises:
            EngineDied: the process is gone, and every message it sent has been received.
        """
        if self._heard:
            return self._heard.popleft()
        process, pipe = self._process, self._pipe
        if process is None or pipe is None:
            raise EngineDied(None)
        ready = wait([pipe, process.sentinel], timeout_s)
        if not ready:
            return None
        try:
            if pipe in ready or pipe.poll(0):
                self._heard.extend(pipe.recv())
                return self._heard.popleft()
        except (EOFError, OSError):
            pass  # the end of what it sent, or of half a message
        _ended(process, self._lock, None)
        raise EngineDied(process.exitcode)

    def ask_stop(self, keep: bool = False) -> None:
        """Raise the stop flag; with ``keep`` the finished chunks become a video."""
        self._stop.value = STOP_AND_KEEP if keep else STOP

    def close(self, grace_s: float = 5.0) -> None:
        """Let an idle process end by itself; kill it after ``grace_s``."""
        deadline = monotonic() + grace_s
        try:
            self._send(None)
        except EngineDied:
            pass
        else:
            _ended(self._process, self._lock, deadline - monotonic())
        self.kill()

    def kill(self) -> None:
        """End the process and what it started at once, and wait for its end."""
        process = self._process
        if process is None:
            return
        with self._lock:
            if process.exitcode is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    process.kill()  # it has not made its own group yet
        _ended(process, self._lock, KILL_WAIT_S)

    def _send(self, message: Work | None) -> None:
        if self._pipe is None:
            raise EngineDied(None)
        try:
            self._pipe.send(message)
        except OSError as error:
            _ended(self._process, self._lock, None)
            raise EngineDied(self._process.exitcode) from error


def _ended(process: Any, lock: threading.Lock, timeout_s: float | None) -> bool:
    """Wait for the end of a process; threads take turns since only one can collect it."""
    if wait([process.sentinel], timeout_s):
        with lock:
            process.join()
        return True
    return False


def _child(options: EngineSettings, pipe: Connection, stop: Any, parent: int) -> None:
    """First function of the child; names the rest, so that importing this imports no torch."""
    be_engine(options, parent)
    importlib.import_module("longtake.queue.engine_process").serve(options, pipe, stop)


def be_engine(options: EngineSettings, parent: int) -> None:
    """What a child does before torch is imported: lead its own session, die with the worker."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(parent, signal.SIGKILL)
    threading.Thread(target=_follow_parent, daemon=True).start()
    os.environ.update(options.environment)


def _follow_parent() -> None:
    """Where the kernel tells no death of a parent: it closes a pipe that this thread waits on."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(os.getpid(), signal.SIGKILL)
