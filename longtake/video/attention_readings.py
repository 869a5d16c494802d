"""Readings: what one query reads of the keys in reach, as data. No torch.

``attention_plan.py`` says where each holds, ``attention_reader.py`` and ``clip_attention.py`` run
them. ``exact`` readings give every query the result of all keys in reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

CHUNK_TOKENS = 4096
SHARED = 4  # a window over a clip shares this part of itself with the next one


@dataclass(frozen=True, slots=True)
class Full:
    """Every key in reach."""

    kind: ClassVar[str] = "full"
    exact: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """``full``."""
        return self.kind

    def frames_read(self, past: int, own: int) -> float:
        """Latent frames' worth of keys that a query reads, on average."""
        return past + own


@dataclass(frozen=True, slots=True)
class Chunked(Full):
    """Every key in reach, ``tokens`` at a time; what memory holds besides is bounded by that."""

    kind: ClassVar[str] = "chunked"
    tokens: int = CHUNK_TOKENS

    @property
    def text(self) -> str:
        """``chunked:4096``."""
        return f"{self.kind}:{self.tokens}"


@dataclass(frozen=True, slots=True)
class Window:
    """The sink and the newest frames, ``frames`` in all, own ones included."""

    kind: ClassVar[str] = "window"
    exact: ClassVar[bool] = False
    frames: int
    sink: int

    @property
    def text(self) -> str:
        """``window:12``."""
        return f"{self.kind}:{self.frames}"

    def frames_read(self, past: int, own: int) -> float:
        """Latent frames' worth of keys that a query reads."""
        return min(past + own, max(self.frames, own))

    def kept(self, past: Sequence[int], own: int) -> tuple[int, ...]:
        """Which of the past frames, given in order of time, are read."""
        if len(past) + own <= self.frames:
            return tuple(past)
        sink = tuple(past[: min(self.sink, len(past))])
        newest = max(0, self.frames - len(sink) - own)
        return (*sink, *past[max(len(sink), len(past) - newest) :])


@dataclass(frozen=True, slots=True)
class TopK:
    """Past frames ranked by how well their mean key fits the chunk's mean query, head by head.

    The ranking is that of block-sparse attention with pooled keys (MoBA, arXiv 2502.13189; VMoBA,
    arXiv 2506.23858); early chunks are dense (Light Forcing, arXiv 2602.04789).

    Attributes:
        count: how many past frames, or None where ``share`` says it.
        share: which part of the past frames.
        floor: past frames that are always read where there is a share: the model's own window.
        sink: first frames, read in any case and not counted.
    """

    kind: ClassVar[str] = "topk"
    exact: ClassVar[bool] = False
    count: int | None
    share: float | None
    floor: int
    sink: int

    @property
    def text(self) -> str:
        """``topk:0.5`` or ``topk:8``."""
        if self.share is None:
            return f"{self.kind}:{self.count}"
        digits = f"{self.share:.6f}".rstrip("0")
        return f"{self.kind}:{digits}{'0' if digits.endswith('.') else ''}"

    def number(self, past: int) -> int:
        """How many of ``past`` frames (the sink not among them) are read."""
        if self.share is None:
            return min(past, self.count or 0)
        return min(past, max(self.floor, math.ceil(self.share * past)))

    def frames_read(self, past: int, own: int) -> float:
        """Latent frames' worth of keys that a query reads."""
        sink = min(self.sink, past)
        return own + sink + self.number(past - sink)


@dataclass(frozen=True, slots=True)
class Radial:
    """Density halves from one ring of distance to the next; ring r ends at ``dense`` x 2**r frames.

    Radial Attention (arXiv 2506.19852), whose window over the tokens of a frame at distance d is
    1 / 2**floor(log2 d) of it. Here rings are ``dense`` frames wide at first, and the window is
    that of a block of queries instead of one query. Where the window would be smaller than
    such a block, parts of every 2nd, 4th, ... frame are read instead, as in the paper.

    Attributes:
        dense: distance up to which whole frames are read.
        sink: first frames, read whole.
        parts: blocks of queries in a frame, a power of 2; the smallest window is one of them.
    """

    kind: ClassVar[str] = "radial"
    exact: ClassVar[bool] = False
    dense: int
    sink: int
    parts: int

    @property
    def text(self) -> str:
        """``radial:4``."""
        return f"{self.kind}:{self.dense}"

    def ring(self, distance: int) -> int:
        """0 up to ``dense`` frames away, 1 up to twice that, 2 up to four times, ..."""
        return max(0, math.ceil(math.log2(distance / self.dense))) if distance > 0 else 0

    def part(self, distance: int) -> float:
        """Which part of a frame at this distance is read: 0, or 1 / 2**ring down to 1 / parts."""
        ring, finest = self.ring(distance), self.parts.bit_length() - 1
        if ring <= finest:
            return 0.5**ring
        return 1 / self.parts if distance % 2 ** (ring - finest) == 0 else 0.0

    def frames_read(self, past: int, own: int) -> float:
        """Latent frames' worth of keys that a query reads."""
        sink = min(self.sink, past)
        return own + sink + sum(self.part(distance) for distance in range(1, past - sink + 1))


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows over a clip of ``total`` latent frames, each ``frames`` long; the last ends with it.

    Attributes:
        frames, total: latent frames of a window and of the clip.
    """

    kind: ClassVar[str] = "window"
    exact: ClassVar[bool] = False
    frames: int
    total: int

    @property
    def text(self) -> str:
        """``window``."""
        return self.kind

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First latent frame of each window, and the one after its last."""
        size = min(self.frames, self.total)
        step = max(1, size - size // SHARED)
        starts = [*range(0, self.total - size, step), self.total - size]
        return tuple((start, start + size) for start in starts)

    def frames_read(self, past: int, own: int) -> float:
        """Latent frames' worth of keys that a query reads, on average over all windows."""
        del past
        return sum((stop - start) ** 2 for start, stop in self.spans) / own


Reading = Full | Chunked | Window | TopK | Radial | Windows
