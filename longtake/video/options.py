"""What a run is given and what it gives back: options, storage, observer, pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from longtake.video.clip_plan import ClipPlan
from longtake.video.plan import Plan
from longtake.video.rollout import StepEvent

if TYPE_CHECKING:
    from longtake.video.parallel_groups import Ranks

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run: None means what the machine is best at.

    Attributes:
        device, dtype, backend: by name.
        kv_cache: ``bf16``, ``fp16`` or ``int8`` to store the past in less than it is computed in.
        parallel: layout of one video over several ranks, as ``parallel_layout`` reads it.
        ranks: this process among the ranks that run it; None where only a plan is made.
        profile: file of ``longtake tune``; None takes the one made for the model here, ``none``
            takes none.
    """

    device: str | None = None
    dtype: str | None = None
    backend: str = "auto"
    parallel: str | None = None
    ranks: Ranks | None = None
    kv_cache: str | None = None
    profile: str | None = None

    @property
    def for_clip(self) -> EngineOptions:
        """Without what belongs to the KV cache alone: clip mode has none and refuses it."""
        return replace(self, kv_cache=None, profile=None)


class Observer(Protocol):
    """Told what happens; ``longtake.cli`` draws a progress bar from it."""

    def on_plan(self, plan: Plan | ClipPlan) -> None:
        """The plan is made; nothing is loaded yet."""

    def on_stage(self, stage: str) -> None:
        """``loading``, ``encoding`` (the input) or ``generating`` begins."""

    def on_start(self, event: StepEvent) -> None:
        """A denoising step is about to run; the event counts those that are done."""

    def on_step(self, event: StepEvent) -> None:
        """A denoising step is done."""

    def on_latents(self, chunk: int, *, stored: bool) -> None:
        """A chunk's latents are on the disk and VAE decode is next; ``stored`` if just now."""

    def on_chunk(self, frames: int) -> None:
        """``frames`` more pixel frames are done and written."""

    def stopping(self) -> bool:
        """Read between denoising steps; True stops, and finished chunks are kept."""


class SilentObserver:
    """Says nothing and never stops."""

    def on_plan(self, plan: Plan | ClipPlan) -> None:
        """Nothing."""

    def on_stage(self, stage: str) -> None:
        """Nothing."""

    def on_start(self, event: StepEvent) -> None:
        """Nothing."""

    def on_step(self, event: StepEvent) -> None:
        """Nothing."""

    def on_latents(self, chunk: int, *, stored: bool) -> None:
        """Nothing."""

    def on_chunk(self, frames: int) -> None:
        """Nothing."""

    def stopping(self) -> bool:
        """Never."""
        return False


@dataclass(frozen=True, slots=True)
class Piece:
    """One finished chunk: pixels [T, H, W, 3] and its entry in the receipt."""

    frames: Pixels
    entry: dict[str, Any]


@dataclass(slots=True)
class Prepared:
    """A loaded model about to run a plan; ``pieces`` does the work as it is read."""

    plan: Plan | ClipPlan
    engine: dict[str, Any]
    weights: Mapping[str, str]
    inputs: Mapping[str, Any]
    pieces: Iterator[Piece]
    load_s: float


@dataclass(frozen=True, slots=True)
class Storage:
    """Chunk latents on disk: where to keep them and where to go on from.

    Attributes:
        keep: folder that every chunk is stored in.
        resume: folder that finished chunks are read from; kept in as well unless ``keep`` differs.
        sync: chunks are on the disk, and not only written, before the rollout goes on.
    """

    keep: Path | None = None
    resume: Path | None = None
    sync: bool = True

    @property
    def target(self) -> Path | None:
        """Folder that chunks are stored in."""
        return self.keep or self.resume
