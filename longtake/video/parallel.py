"""Sequence parallelism of the causal rollout: which tokens, heads and samples a rank has.

Outside attention a rank has its share of a chunk's tokens. Inside, Ulysses gives it every token
of its share of the heads, so its KV cache holds those heads of all frames and only new tokens
travel; ring leaves it its share of each frame's tokens, and the keys and values seen are passed
round, their partial results merged by log-sum-exp. Bytes: ``parallel_layout.bytes_a_layer``. The
model stays diffusers' own: this is called by the processors of ``causal_wan.py`` and two hooks.
Normalisation of queries and keys spans all heads, so it comes before the exchange; cross-
attention is local.

Shapes: B batch, C channels, F latent frames, S tokens, H heads, D head dimension.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from longtake.video.attention import Merger
from longtake.video.attention_backends import Backend
from longtake.video.attention_reader import pick_frames, window_slots
from longtake.video.attention_readings import Chunked, Reading, Window
from longtake.video.components import CausalModel
from longtake.video.kv_cache import CacheShape, KVCache, RopeTable
from longtake.video.latents import decisive
from longtake.video.numerics import choose_device
from longtake.video.options import EngineOptions, Observer
from longtake.video.parallel_decode import divide_decode
from longtake.video.parallel_groups import Group, Ranks
from longtake.video.parallel_layout import (
    Layout,
    Place,
    bounds,
    facts_of,
    most_ranks,
    parse_layout,
    resolve_layout,
    share,
    usable_cores,
)
from longtake.video.plan import Plan


@dataclass(frozen=True, slots=True)
class Shares:
    """How a chunk of ``frames`` latent frames of ``frame_tokens`` tokens is divided.

    A ring part has a slice of every frame; its tokens, frame by frame, are cut over Ulysses.
    """

    layout: Layout
    place: Place
    frames: int
    frame_tokens: int

    @property
    def parts(self) -> tuple[int, ...]:
        """Tokens of one frame that each ring part has."""
        return share(self.frame_tokens, self.layout.ring)

    def own(self, ring: int) -> tuple[int, ...]:
        """Tokens of the chunk that each Ulysses rank of a ring part has outside attention."""
        return share(self.frames * self.parts[ring], self.layout.ulysses)

    def take(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of all."""
        first, last = bounds(self.frame_tokens, self.layout.ring, self.place.ring)
        part: torch.Tensor = x_BSC.unflatten(1, (self.frames, -1))[:, :, first:last].flatten(1, 2)
        start, end = bounds(part.shape[1], self.layout.ulysses, self.place.ulysses)
        return part[:, start:end].contiguous()

    def join(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """All tokens from those of every rank, ring part by ring part."""
        step = self.layout.ulysses
        rings = [torch.cat(pieces[i : i + step], 1) for i in range(0, len(pieces), step)]
        by_frame = [r.unflatten(1, (self.frames, -1)) for r in rings]
        joined: torch.Tensor = torch.cat(by_frame, 2).flatten(1, 2)
        return joined


class Mesh:
    """One rank's part of a model, installed by ``CausalWan.join``.

    Args:
        ranks: all of them.
        layout: whose product is their number.
    """

    def __init__(self, ranks: Ranks, layout: Layout) -> None:
        self.ranks, self.layout = ranks, layout
        self.place = layout.place(ranks.rank)
        groups = ranks.groups(layout)
        self._ulysses: Group = groups["ulysses"]
        self._ring: Group = groups["ring"]
        self._cfg: Group = groups["cfg"]
        self._frame: Group = groups["frame"]
        self._shares = Shares(layout, self.place, 1, 1)
        self._hooks: list[Any] = []

    def install(self, transformer: Any) -> None:
        """Shard tokens before the first block, gather them after the last projection."""
        self._hooks = [
            transformer.blocks[0].register_forward_pre_hook(self._shard),
            transformer.proj_out.register_forward_hook(self._gather),
        ]

    def remove(self) -> None:
        """Leave the transformer as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def cache_shape(self, shape: CacheShape) -> CacheShape:
        """What a rank keeps: its samples, its part of each frame, its heads."""
        layout = self.layout
        return CacheShape(
            layers=shape.layers,
            batch=shape.batch // layout.cfg,
            frames=shape.frames,
            frame_tokens=share(shape.frame_tokens, layout.ring)[self.place.ring],
            heads=shape.heads // layout.ulysses,
            head_dim=shape.head_dim,
        )

    def cache_table(self, table: RopeTable) -> RopeTable:
        """Rotations of this rank's part of each frame."""
        first, last = bounds(table.cos.shape[1], self.layout.ring, self.place.ring)
        return RopeTable(
            table.cos[:, first:last].contiguous(), table.sin[:, first:last].contiguous()
        )

    def own_samples(self, batch: Any) -> Any:
        """This rank's half of a guided batch, of anything that can be sliced."""
        first, last = bounds(len(batch), self.layout.cfg, self.place.cfg)
        return batch[first:last]

    def begin(self, x_BCFhw: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
        """Take this rank's samples, and work out the shares of this forward."""
        frames, high, wide = (n // p for n, p in zip(x_BCFhw.shape[2:], patch, strict=True))
        self._shares = Shares(self.layout, self.place, frames, high * wide)
        own: torch.Tensor = self.own_samples(x_BCFhw)
        return own

    def finish(self, velocity: torch.Tensor) -> torch.Tensor:
        """The velocities of all samples."""
        if self.layout.cfg == 1:
            return velocity
        shapes = [tuple(velocity.shape)] * self.layout.cfg
        return torch.cat(self._cfg.gather(velocity, shapes))

    def to_heads(self, *tensors_BSHD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """From own tokens of all heads to all tokens (of the ring part) of own heads."""
        count = self.layout.ulysses
        if count == 1:
            return tensors_BSHD
        kinds = len(tensors_BSHD)
        batch, own, heads, dim = tensors_BSHD[0].shape
        # tokens first: what comes from the ranks is then all tokens, as it lies
        shape = (kinds, batch, heads // count, dim)
        slots = self._ulysses.outgoing([(own, *shape)] * count, tensors_BSHD[0])
        for kind, x_BSHD in enumerate(tensors_BSHD):
            for slot, x_BShD in zip(slots, x_BSHD.chunk(count, 2), strict=True):
                slot[:, kind].copy_(x_BShD.transpose(0, 1))
        size = math.prod(shape)
        came = self._ulysses.trade([n * size for n in self._shares.own(self.place.ring)])
        return came.view(-1, *shape).transpose(0, 2).unbind(1)

    def to_tokens(self, x_BSHD: torch.Tensor) -> torch.Tensor:
        """Back from all tokens of own heads to own tokens of all heads."""
        count = self.layout.ulysses
        if count == 1:
            return x_BSHD
        sizes = self._shares.own(self.place.ring)
        batch, _, heads, dim = x_BSHD.shape
        shape = (batch, sizes[self.place.ulysses], heads, dim)
        return torch.cat(self._ulysses.exchange(x_BSHD.split(sizes, 1), [shape] * count), 2)

    def attend(
        self,
        q_BSHD: torch.Tensor,
        seen: tuple[torch.Tensor, torch.Tensor],
        cache: KVCache,
        backend: Backend,
        reading: Reading,
    ) -> torch.Tensor:
        """Ring attention: own queries against the keys and values of every part in turn.

        Args:
            q_BSHD: roped queries of this rank's part.
            seen: keys and values that this rank holds of what is seen.
            cache: whose they are.
            backend: computes the partial results.
            reading: every key, in chunks or not, or a window.
        """
        slots = None
        if isinstance(reading, Window):
            slots = window_slots(reading, cache, q_BSHD.device)
        if slots is not None:
            own = cache.shape.frame_tokens
            seen = (pick_frames(seen[0], slots, own), pick_frames(seen[1], slots, own))
        held = torch.stack(seen)
        tokens = reading.tokens if isinstance(reading, Chunked) else held.shape[2]
        parts = self._shares.parts
        frames = held.shape[2] // parts[self.place.ring]
        merger = Merger()
        for hop in range(1, self.layout.ring + 1):
            passing = None
            if hop < self.layout.ring:
                coming = frames * parts[(self.place.ring - hop) % self.layout.ring]
                shape = (2, held.shape[1], coming, *held.shape[3:])
                passing = self._ring.pass_on(held, shape)
            for k, v in zip(held[0].split(tokens, 1), held[1].split(tokens, 1), strict=True):
                merger.add(backend.attend_lse(q_BSHD, k, v))
            if passing is not None:
                held = passing.arrived()
        return merger.result().out

    def _shard(self, _block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._shares.take(args[0]), *args[1:])

    def _gather(self, _linear: Any, _args: Any, out_BSC: torch.Tensor) -> torch.Tensor:
        if self._frame.size == 1:
            return out_BSC
        batch, _, channels = out_BSC.shape
        sizes = [n for ring in range(self.layout.ring) for n in self._shares.own(ring)]
        shapes = [(batch, size, channels) for size in sizes]
        return self._shares.join(self._frame.gather(out_BSC, shapes))


def install(model: CausalModel, ranks: Ranks, layout: Layout) -> None:
    """Have a loaded model run as this rank's part of ``layout``; every rank does the same."""
    mesh = model.wan.mesh
    if mesh is not None and mesh.ranks is ranks and mesh.layout == layout:
        return
    model.wan.join(Mesh(ranks, layout))
    divide_decode(model.vae, ranks.world)


def check_layout(plan: Plan, engine: EngineOptions) -> None:
    """Refuse at plan time what ``join`` would refuse, also where no ranks run yet.

    Raises:
        RequestError: of the field ``parallel``.
    """
    if engine.parallel is not None:
        size = None if engine.ranks is None else engine.ranks.size
        if size is None and parse_layout(engine.parallel) is None:
            size = most_ranks(usable_ranks(engine.device), facts_of(plan))
        resolve_layout(engine.parallel, facts_of(plan), size)


def stop_flag(engine: EngineOptions, observer: Observer) -> Callable[[], bool]:
    """The observer's stop flag, or with several ranks that of rank 0 on all of them."""
    ranks = engine.ranks
    return observer.stopping if ranks is None else ranks.stop_flag(observer.stopping)


def usable_ranks(device: str | None) -> int:
    """Ranks that ``auto`` takes where nobody says how many: CUDA devices, else CPU cores."""
    kind = choose_device(device).type
    if kind == "cuda":
        return torch.cuda.device_count()
    return usable_cores()


def join(engine: EngineOptions, model: CausalModel, plan: Plan, stored: int) -> dict[str, Any]:
    """Divide a model that every rank has loaded, once all agree on what to make; for the receipt.

    Raises:
        ParallelError: this rank's plan, stored chunks or weights are others than rank 0's.
        RequestError: the layout is not legal for the plan.
    """
    ranks = engine.ranks
    if ranks is None:
        return {}
    layout = resolve_layout(engine.parallel or "auto", facts_of(plan), ranks.size)
    what = json.dumps([decisive(plan), plan.num_frames, stored, sorted(model.hashes.values())])
    digest = hashlib.sha256(what.encode()).digest()
    ranks.check_same("plan", int.from_bytes(digest[:7], "little"))
    install(model, ranks, layout)
    # a number that is rounded to be stored may be rounded the other way
    close = "within 1e-5" if plan.kv_cache is None else "close, see docs/capabilities.md"
    means = f"equal bytes under the same layout; under another one latents {close}"
    return {
        "parallel": {"layout": layout.text, "ranks": ranks.size, "over": ranks.backend},
        "guarantee": {"level": "L3", "means": means},
    }
