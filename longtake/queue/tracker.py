"""Where an attempt stands, read off the engine's messages: progress, time limits, blame."""

from __future__ import annotations

import time
from typing import Any

from longtake.queue.messages import (
    ChunkDone,
    EngineMessage,
    LatentsStored,
    Planned,
    Stage,
    StepDone,
    StepStarted,
)
from longtake.settings import Settings


class Tracker:
    """Follows one attempt.

    Args:
        settings: the service's limits.
        stored: chunks that earlier attempts have stored: while those are read again, they count.

    Attributes:
        phase: starting, loading, encoding, generating, decoding or finishing.
        chunk: the one in work, from 0.
        in_step: a denoising step has begun and is not done.
        stored: chunks this attempt has committed.
        step_at: time of the last finished step, seconds since 1970.
    """

    def __init__(self, settings: Settings, stored: int = 0) -> None:
        self._before = stored
        self._limits = {
            "starting": settings.start_limit_s,
            "loading": settings.load_limit_s,
            "encoding": settings.decode_limit_s,
            "generating": settings.step_limit_s,
            "decoding": settings.decode_limit_s,
            "finishing": settings.finish_limit_s,
        }
        self.phase = "starting"
        self.chunk = 0
        self.in_step = False
        self.stored = 0
        self.step_at: float | None = None
        self._chunks = 0
        self._step = 0
        self._steps = 0
        self._frames = 0
        self._made = 0
        self._began: float | None = None

    @property
    def limit_s(self) -> float:
        """How long the engine may be silent in this phase."""
        return self._limits.get(self.phase, self._limits["generating"])

    def see(self, message: EngineMessage) -> None:
        """Take in a message."""
        match message:
            case Planned(chunks=chunks, steps=steps):
                self._chunks, self._steps = chunks, steps
            case Stage(name=name, chunk=chunk):
                self.phase = name
                self._move_to(chunk)
            case StepStarted(chunk=chunk, step=step):
                self.phase, self.in_step = "generating", True
                self._move_to(chunk)
                self._step = step
                if self._began is None:
                    self._began = time.monotonic()
            case StepDone():
                self.in_step = False
                self.step_at = time.time()
                self._move_to(message.chunk)
                self._step, self._steps = message.step, message.steps
                self._chunks = message.chunks
                self._made += 1
            case LatentsStored(chunk=chunk):
                self.phase = "decoding"
                self._move_to(chunk)
                self._step = self._steps
            case ChunkDone(chunk=chunk, frames=frames, reused=reused):
                self._frames += 0 if reused else frames
                self._move_to(chunk + 1)
                self.phase = "generating" if self.chunk < self._chunks else "finishing"
            case _:
                pass

    @property
    def progress(self) -> dict[str, Any]:
        """``x_progress``: ``chunk`` whole chunks are done, and ``step`` steps of the next one."""
        elapsed = 0.0 if self._began is None else time.monotonic() - self._began
        fps = self._frames / elapsed if elapsed > 0 and self._frames else None
        return {
            "phase": self.phase,
            "chunk": max(self.chunk, self._before),
            "chunks": self._chunks,
            "step": self._step if self.chunk >= self._before else 0,
            "steps": self._steps,
            "fps": None if fps is None else round(fps, 2),
            "eta_seconds": self._eta(elapsed),
        }

    def _eta(self, elapsed: float) -> float | None:
        """Seconds to go at the pace of this attempt's steps, None before the first."""
        if not self._made or not self._steps:
            return None
        left = max(self._chunks - max(self.chunk, self._before), 0) * self._steps - self._step
        return round(max(left, 0) * elapsed / self._made, 1)

    def _move_to(self, chunk: int | None) -> None:
        if chunk is not None and chunk != self.chunk:
            self.chunk, self._step = chunk, 0
