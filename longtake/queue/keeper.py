"""Keeping one engine process ready: start it, replace it, and wait out one that cannot start."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from longtake.errors import LongtakeError
from longtake.queue.engine import EngineDied, EngineProcess
from longtake.queue.engine_group import make_engine
from longtake.queue.outcomes import Ran
from longtake.settings import Settings

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 2.0, 60.0
logger = logging.getLogger(__name__)


class EngineKeeper:
    """Owns the worker's engine. ``ensure`` and ``after`` belong to the thread that runs jobs.

    Attributes:
        broken: why no engine can be had just now, None otherwise.
        model: what the engine has loaded, None if unknown.
    """

    def __init__(self, settings: Settings, make: Callable[[], EngineProcess] | None = None) -> None:
        self.broken: str | None = None
        self.model: str | None = None
        self._settings = settings
        self._make = make or (lambda: make_engine(settings))
        self._engine: EngineProcess | None = None
        self._jobs = 0
        self._first_memory = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._again_at = 0.0
        self._closing = threading.Event()

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        engine = self._engine
        return engine.pid if engine is not None and engine.alive else None

    def ensure(self) -> EngineProcess | None:
        """A ready engine, started if need be; None while it cannot be, or the worker stops."""
        if self._engine is not None and self._engine.alive:
            return self._engine
        if self._closing.is_set() or time.monotonic() < self._again_at:
            return None
        self._forget()
        engine = self._make()
        self._engine = engine
        try:
            engine.start()
        except (EngineDied, LongtakeError, OSError) as error:
            self.end()
            if not self._closing.is_set():
                self._back_off(f"the engine does not start: {error}")
            return None
        if self._closing.is_set():
            self.end()
            return None
        self.broken = None
        if self._settings.preload:
            self.model = self._settings.default_model
        return engine

    def after(self, model: str, ran: Ran) -> None:
        """Take in how an attempt went; replaces an engine that is spent."""
        self.model = model if self.pid is not None else None
        self._jobs += 1
        if ran.memory_bytes and not self._first_memory:
            self._first_memory = ran.memory_bytes
        grown = ran.memory_bytes > self._first_memory * self._settings.engine_max_growth
        if ran.broken is not None:
            self.end()
            self._back_off(ran.broken)
        elif ran.replace:
            self.end()
        elif self._jobs >= self._settings.engine_max_jobs or (self._first_memory and grown):
            logger.info("the engine is replaced after %d jobs", self._jobs)
            self.end()
        else:
            self._backoff_s = FIRST_BACKOFF_S

    def close(self) -> None:
        """End the engine for good; also interrupts a start. From any thread."""
        self._closing.set()
        self.end()

    def end(self) -> None:
        """End the engine process, if there is one."""
        engine = self._engine
        if engine is not None:
            engine.kill()

    def _forget(self) -> None:
        self._engine = None
        self.model = None
        self._jobs = 0
        self._first_memory = 0

    def _back_off(self, reason: str) -> None:
        self.broken = reason
        self._again_at = time.monotonic() + self._backoff_s
        logger.error("%s; next try in %g s", reason, self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
