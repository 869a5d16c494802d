"""A video of random numbers, of which one layer's attention is measured chunk by chunk.

Cache, reader and plans are those of a rollout; only the model around them is not there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from longtake.schedulers.chunks import ChunkLayout, ChunkSpec
from longtake.video.attention import attend_lse_math
from longtake.video.attention_backends import Backend, make_backend, synchronize
from longtake.video.attention_plan import AttentionPlan, Scope, resolve_attention
from longtake.video.attention_reader import Reader
from longtake.video.kv_cache import CacheShape, KVCache, RopeTable
from longtake.video.memory import peak_bytes
from longtake.video.numerics import torch_dtype

MAX_REPEATS, REPEAT_S = 5, 0.2  # rounds of a case: until so many, or they took so long
DRAWS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """What a video is made of where attention is measured.

    Attributes:
        heads, head_dim: of a layer.
        frame_tokens: of a latent frame.
        chunk, window, sink: latent frames.
    """

    heads: int
    head_dim: int
    frame_tokens: int
    chunk: int
    window: int
    sink: int


@dataclass(frozen=True, slots=True)
class Where:
    """Device, dtype by short name, and the shape."""

    device: torch.device
    dtype: str
    shape: Shape


class Video:
    """One layer's attention over the chunks of a video of random numbers.

    Args:
        plan: by its text.
        backend: what computes it.
        tokens: of the whole video.
        where: device, dtype and shape.
    """

    def __init__(self, plan: str, backend: Backend, tokens: int, where: Where) -> None:
        shape, self._device = where.shape, where.device
        attention = resolve_plan(plan, shape)
        windowed = attention.layout == "window"
        self._layout = ChunkLayout(
            tokens // shape.frame_tokens,
            shape.chunk,
            window=shape.window if windowed else None,
            sink=shape.sink if windowed else 0,
        )
        self._reader = Reader(attention, backend)
        self._cache = self._make_cache(where, means=attention.ranks)
        draw = torch.Generator(self._device).manual_seed(0)
        size = (DRAWS, 3, 1, shape.chunk * shape.frame_tokens, shape.heads, shape.head_dim)
        self._draws = torch.randn(
            size, device=self._device, dtype=torch_dtype(where.dtype), generator=draw
        )

    def seconds(self) -> float:
        """Time of all chunks' calls; what fills the cache does not count."""
        total = 0.0
        for spec in self._layout:
            q, k, v = self._inputs(spec)
            synchronize(self._device)
            began = perf_counter()
            self._attend(q, k, v)
            synchronize(self._device)
            total += perf_counter() - began
        return total

    def fill(self) -> None:
        """Fill the cache, and attend to nothing."""
        for spec in self._layout:
            self._inputs(spec)

    def peak_bytes(self) -> int | None:
        """Memory of one more call as the last chunk's, in a cache that is full by now."""
        q, k, v = self._last_inputs()
        return peak_bytes(lambda: self._attend(q, k, v), self._device)

    def last_call(self) -> None:
        """The last chunk's call alone."""
        self._attend(*self._last_inputs())

    def error(self) -> float:
        """Of the last chunk's output against exact attention to the same keys."""
        q, k, v = self._last_inputs()
        mixed = self._attend(q, k, v)
        apart = whole = 0.0
        for head in range(q.shape[2]):  # one at a time, in float32: all would need much memory
            part = slice(head, head + 1)
            exact = attend_lse_math(*(x[:, :, part].float() for x in (q, k, v))).out
            apart += float((mixed[:, :, part].float() - exact).square().sum())
            whole += float(exact.square().sum())
        return math.sqrt(apart / whole)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._reader.attend(q, k, v, self._cache, (0, 0))

    def _last_inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._inputs(list(self._layout)[-1])

    def _inputs(self, spec: ChunkSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self._draws[spec.index % DRAWS]
        self._cache.begin(spec.past, spec.own)
        self._cache.recording = True
        return q, *self._cache.exchange(0, k, v)

    def _make_cache(self, where: Where, *, means: bool) -> KVCache:
        shape, frames = where.shape, self._layout.capacity
        sizes = CacheShape(1, 1, frames, shape.frame_tokens, shape.heads, shape.head_dim)
        # positions cost nothing here: what is timed comes after they are given
        still = torch.ones(frames, shape.frame_tokens, shape.head_dim // 2, device=self._device)
        return KVCache(
            sizes,
            RopeTable(still, torch.zeros_like(still)),
            dtype=torch_dtype(where.dtype),
            device=self._device,
            means=means,
        )


def resolve_plan(text: str, shape: Shape) -> AttentionPlan:
    """A plan at the shape's own window and sink."""
    scope = Scope(shape.window, shape.sink, shape.chunk, shape.frame_tokens, layers=1, steps=1)
    return resolve_attention(text, scope)


def over_everything(plan: str) -> str:
    """A plan's text where everything is in reach: a window is then something to read, no cache."""
    return "global+window" if plan == "window" else plan


@torch.inference_mode()
def measure_case(plan: str, backend: str, tokens: int, where: Where) -> tuple[float, int | None]:
    """Median seconds and peak bytes of a plan (by its text) and backend, after a warm-up.

    That is the last chunk's call on a CPU, and a whole round elsewhere, where the first numbers of
    keys may compile kernels.
    """
    video = Video(plan, make_backend(backend, where.device), tokens, where)
    if where.device.type == "cpu":
        video.fill()
        video.last_call()
    else:
        video.seconds()
    taken = [video.seconds()]
    while len(taken) < MAX_REPEATS and sum(taken) < REPEAT_S:
        taken.append(video.seconds())
    return median(taken), video.peak_bytes()


@torch.inference_mode()
def output_error(plan: str, backend: str, tokens: int, where: Where) -> float:
    """Error of a plan on random data, with everything in reach; see ``Row.error``."""
    video = Video(over_everything(plan), make_backend(backend, where.device), tokens, where)
    video.fill()
    return video.error()
