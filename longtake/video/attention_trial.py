"""Attention plans and backends tried on a model's real activations, inside a rollout of it.

The rollout goes on as if nobody watched: everything in reach is read. At some places every way to
try gets the same queries, keys and values, and its output is compared with the exact one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from longtake.errors import StateError
from longtake.schedulers.chunks import ChunkSpec, pixel_frames
from longtake.video.attention import attend_lse_math
from longtake.video.attention_backends import make_backend, synchronize
from longtake.video.attention_plan import AttentionPlan
from longtake.video.attention_reader import Reader
from longtake.video.components import CausalModel
from longtake.video.kv_cache import KVCache
from longtake.video.plan import make_plan
from longtake.video.request import VideoRequest
from longtake.video.rollout import Rollout

MAX_LAYERS = 8  # of a deep model, evenly spread ones are tried
WARM_UPS, REPEATS = 2, 7
TRIED_STEP = 0
SEED = 7
PROMPT = "a red ball bouncing over a green meadow"


@dataclass(frozen=True, slots=True)
class Way:
    """An attention plan and the backend that computes it."""

    plan: AttentionPlan
    backend: str


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a way.

    Attributes:
        error: root mean square of the output's difference to the exact one, relative to that.
        seconds: median time of one layer's call, None where no time was taken.
    """

    error: float
    seconds: float | None


class Trial(Reader):
    """Reads everything in reach, and lets others read the same while ``watching``.

    Args:
        ways: what to try.
        model: whose activations they get.
        timed: also take the time of each way, once, taking turns.
    """

    def __init__(self, ways: Sequence[Way], model: CausalModel, *, timed: bool = False) -> None:
        self._device = model.device
        super().__init__(AttentionPlan(), make_backend("sdpa", self._device))
        self.watching = False
        self._readers = [Reader(w.plan, make_backend(w.backend, self._device)) for w in ways]
        layers = model.shape.transformer.layers
        self._layers = frozenset(range(0, layers, -(-layers // MAX_LAYERS)))
        self._errors = [0.0] * len(ways)
        self._whole = 0.0
        self._seconds: list[float] | None = None if timed else []

    @property
    def ranks(self) -> bool:
        """True if one of the ways does."""
        return any(reader.ranks for reader in self._readers)

    @property
    def results(self) -> list[Tried]:
        """One for each way, in their order.

        Raises:
            StateError: nothing was watched.
        """
        if self._whole == 0.0:
            raise StateError("no activations were captured")
        errors = [math.sqrt(error / self._whole) for error in self._errors]
        if not self._seconds:
            return [Tried(error, None) for error in errors]
        return [Tried(error, taken) for error, taken in zip(errors, self._seconds, strict=True)]

    def attend(
        self,
        q_BSHD: torch.Tensor,
        k_BSHD: torch.Tensor,
        v_BSHD: torch.Tensor,
        cache: KVCache,
        place: tuple[int, int | None],
    ) -> torch.Tensor:
        """As of ``Reader``."""
        out = super().attend(q_BSHD, k_BSHD, v_BSHD, cache, place)
        if not self.watching or place[0] not in self._layers or place[1] != TRIED_STEP:
            return out
        wide = torch.float32 if self._device.type == "mps" else torch.float64
        exact = attend_lse_math(q_BSHD.to(wide), k_BSHD.to(wide), v_BSHD.to(wide)).out
        self._whole += float(exact.square().sum())
        for index, reader in enumerate(self._readers):
            mixed = reader.attend(q_BSHD, k_BSHD, v_BSHD, cache, place)
            self._errors[index] += float((mixed.to(wide) - exact).square().sum())
        if self._seconds is None:
            self._seconds = self._time((q_BSHD, k_BSHD, v_BSHD), cache, place)
        return out

    def _time(
        self, qkv: tuple[torch.Tensor, ...], cache: KVCache, place: tuple[int, int | None]
    ) -> list[float]:
        """Median seconds of each way's call, taking turns."""
        q, k, v = qkv
        times: list[list[float]] = [[] for _ in self._readers]
        for turn in range(WARM_UPS + REPEATS):
            for reader, taken in zip(self._readers, times, strict=True):
                synchronize(self._device)
                began = perf_counter()
                reader.attend(q, k, v, cache, place)
                synchronize(self._device)
                if turn >= WARM_UPS:
                    taken.append(perf_counter() - began)
        return [median(taken) for taken in times]


class _Watched(Rollout):
    """A rollout for the sake of its activations: its latents are never decoded."""

    def _decode(self, spec: ChunkSpec, latents: torch.Tensor) -> torch.Tensor:
        return latents.new_empty(0, len(spec.own))


def try_ways(
    ways: Sequence[Way],
    model: CausalModel,
    chunks: int,
    *,
    layout: str = "window",
    timed: bool = False,
) -> list[Tried]:
    """Roll ``chunks`` chunks out and try all ways in the last of them.

    Args:
        ways: each reads the keys in reach of ``layout``; its plan's own layout is not used.
        model: its own schedule, guidance, window and sink.
        chunks: how long the past is.
        layout: ``window`` or ``global``.
        timed: take times as well.
    """
    frames = (model.manifest.first_chunk or model.manifest.chunk) + (
        chunks - 1
    ) * model.manifest.chunk
    request = VideoRequest(
        prompt=PROMPT,
        num_frames=pixel_frames(frames, model.shape.vae.stride_time),
        seed=SEED,
        attention=layout,
    )
    plan = make_plan(request, model.manifest, model.shape)
    trial = Trial(ways, model, timed=timed)
    rollout = _Watched(plan, model, reader=trial)
    for spec in plan.chunks:
        trial.watching = spec.index == plan.layout.count - 1
        rollout.make_chunk()
    return trial.results
