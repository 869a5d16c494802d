"""Threads that want to write at the same moment share one transaction, and so one flush to disk.

Without this, submissions of one process would take turns at the disk, one flush each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from longtake.errors import ServiceError

W = TypeVar("W")
R = TypeVar("R")
MOST = 64  # calls of one group, so that nobody waits for long
# where several came together just now, as many are about to come again: fewer transactions, each
# with more. So long a group waits for them; it is full as soon as they are there
CROWD_S = 0.03
FORGET_S = 1.0  # a crowd that came longer ago than this is gone: a lone call does not wait


@dataclass(slots=True)
class Call(Generic[W, R]):
    """What one thread wants, and what came of it: ``result`` or ``error`` once ``done``."""

    wanted: W
    result: R | None = None
    error: Exception | None = None
    done: bool = False
    # set once the call is done, or when its thread is to run the next group
    woken: threading.Event = field(default_factory=threading.Event)

    def answer(self, result: R) -> None:
        """It worked."""
        self.result, self.error, self.done = result, None, True

    def refuse(self, error: Exception) -> None:
        """It did not."""
        self.result, self.error, self.done = None, error, True


class Gatherer(Generic[W, R]):
    """Calls ``run`` with what has come together; one group at a time.

    ``run`` commits, answers or refuses calls and may leave some for the next group, but never all;
    or it raises with nothing committed: then each call is run by itself, so that it fails or not
    for its own reasons. With ``ServiceError`` all of them fail.
    """

    def __init__(self, run: Callable[[Sequence[Call[W, R]]], None]) -> None:
        self._run = run
        self._waiting: list[Call[W, R]] = []
        self._lock = threading.Lock()
        self._running = False
        self._expected = 1
        self._full = threading.Event()
        self._ran_at = 0.0

    def __call__(self, wanted: W) -> R:
        """Have ``wanted`` done by this thread, or by one that takes it along."""
        call: Call[W, R] = Call(wanted)
        with self._lock:
            self._waiting.append(call)
            if len(self._waiting) >= self._expected:
                self._full.set()
            leads, self._running = not self._running, True
        if not leads:
            call.woken.wait()
        if not call.done:  # else another thread took it along
            self._lead(call)
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]  # answered with an R

    def _lead(self, own: Call[W, R]) -> None:
        """Run groups until ``own`` is done, then let the longest waiting thread go on."""
        try:
            while not own.done:
                self._run_group()
        finally:
            with self._lock:
                self._running = bool(self._waiting)
                if self._waiting:
                    self._waiting[0].woken.set()

    def _run_group(self) -> None:
        if self._expected > 1 and time.monotonic() - self._ran_at < FORGET_S:
            self._full.wait(CROWD_S)
        with self._lock:
            group, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            left = bool(self._waiting)
            self._expected = len(group)
            self._full.clear()
        try:
            self._run_together(group)
        finally:
            with self._lock:
                undone = [call for call in group if not call.done]
                self._waiting[:0] = undone
                if left or undone or len(self._waiting) >= self._expected:
                    self._full.set()
                self._ran_at = time.monotonic()
            for call in group:
                if call.done:
                    call.woken.set()

    def _run_together(self, group: Sequence[Call[W, R]]) -> None:
        if len(group) > 1:
            try:
                self._run(group)
                return
            except ServiceError as error:
                # the database is away: whether it committed is not known, so nothing runs again
                for call in group:
                    call.refuse(error)
                return
            except Exception:  # whoever it was about gets it below
                for call in group:
                    call.done = False
        for call in group:
            try:
                self._run([call])
            except Exception as error:  # raised in the thread whose call it is
                call.refuse(error)
