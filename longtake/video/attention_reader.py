"""Runs an attention plan on a KV cache: what is not read is left out before attention is computed.

Whole frames or parts of frames are picked out, head by head where they are ranked, and every
backend computes plain attention on what was picked. FlexAttention takes the same choice as a block
mask and copies nothing.

Shapes: B batch, S tokens, H heads, D head dimension, T tokens of a frame, N frames (slots).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from longtake.video.attention import attend_chunked
from longtake.video.attention_backends import Backend
from longtake.video.attention_blocks import BandMask, FlexMasks
from longtake.video.attention_plan import AttentionPlan
from longtake.video.attention_readings import Chunked, Radial, Reading, TopK, Window
from longtake.video.kv_cache import KVCache

T = TypeVar("T")


class Reader:
    """An attention plan at work in one rollout.

    Args:
        plan: what is read, by layer and step.
        backend: what computes it.
    """

    def __init__(self, plan: AttentionPlan, backend: Backend) -> None:
        self.plan = plan
        self._backend = backend
        self._flex = FlexMasks() if backend.name == "flex" else None
        self._chunk = -1
        self._kept: dict[tuple[Reading, str], Any] = {}

    @property
    def ranks(self) -> bool:
        """True if it asks the cache for the means of frames' keys."""
        return self.plan.ranks

    def attend(
        self,
        q_BSHD: torch.Tensor,
        k_BSHD: torch.Tensor,
        v_BSHD: torch.Tensor,
        cache: KVCache,
        place: tuple[int, int | None],
    ) -> torch.Tensor:
        """Output of the chunk's queries.

        Args:
            q_BSHD: roped queries of the chunk.
            k_BSHD, v_BSHD: what ``cache.exchange`` gave: all frames in reach, by slot.
            cache: whose slots they are.
            place: layer, and denoising step or None in the clean pass.
        """
        if cache.begun != self._chunk:
            self._chunk = cache.begun
            self._kept.clear()
        reading = self.plan.reading_at(*place)
        if isinstance(reading, Chunked):
            return attend_chunked(q_BSHD, k_BSHD, v_BSHD, reading.tokens, self._backend.attend_lse)
        if isinstance(reading, Window):
            return self._window(q_BSHD, k_BSHD, v_BSHD, cache, reading)
        if isinstance(reading, TopK):
            return self._top_k(q_BSHD, k_BSHD, v_BSHD, cache, reading, place[0])
        if isinstance(reading, Radial):
            return self._radial(q_BSHD, k_BSHD, v_BSHD, cache, reading)
        return self._backend.attend(q_BSHD, k_BSHD, v_BSHD)

    def _window(
        self,
        q_BSHD: torch.Tensor,
        k_BSHD: torch.Tensor,
        v_BSHD: torch.Tensor,
        cache: KVCache,
        reading: Window,
    ) -> torch.Tensor:
        slots = self._once(reading, "slots", lambda: window_slots(reading, cache, q_BSHD.device))
        if slots is not None:
            tokens = cache.shape.frame_tokens
            k_BSHD, v_BSHD = (pick_frames(x, slots, tokens) for x in (k_BSHD, v_BSHD))
        return self._backend.attend(q_BSHD, k_BSHD, v_BSHD)

    def _top_k(
        self,
        q_BSHD: torch.Tensor,
        k_BSHD: torch.Tensor,
        v_BSHD: torch.Tensor,
        cache: KVCache,
        reading: TopK,
        layer: int,
    ) -> torch.Tensor:
        past = _past(cache)
        sink, rest = past[: reading.sink], past[reading.sink :]
        count = reading.number(len(rest))
        if count == len(rest):
            return self._backend.attend(q_BSHD, k_BSHD, v_BSHD)
        always, choice = self._once(
            reading,
            "slots",
            lambda: tuple(
                _slots(cache, frames, q_BSHD.device) for frames in ((*sink, *cache.own), rest)
            ),
        )
        # the cheap summary: mean query of the chunk against mean key of each frame
        query = q_BSHD.mean(1, dtype=torch.float32)
        scores = torch.einsum("bhd,bnhd->bhn", query, cache.means(layer)[:, choice])
        best = choice[scores.topk(count, dim=-1).indices]
        picked = torch.cat([best, always.expand(*best.shape[:2], -1)], -1).sort(-1).values
        tokens = cache.shape.frame_tokens
        if self._flex is not None:
            mask = BandMask.of_frames(picked, len(cache.seen), tokens, q_BSHD.shape[1])
            return self._flex.attend(q_BSHD, k_BSHD, v_BSHD, mask)
        rows = _rows_by_head(picked, tokens)
        k, v = _pick_rows(k_BSHD, rows), _pick_rows(v_BSHD, rows)
        return self._backend.attend(q_BSHD, k, v)

    def _radial(
        self,
        q_BSHD: torch.Tensor,
        k_BSHD: torch.Tensor,
        v_BSHD: torch.Tensor,
        cache: KVCache,
        reading: Radial,
    ) -> torch.Tensor:
        past, own, tokens = _past(cache), cache.own, cache.shape.frame_tokens
        if len(past) - reading.sink <= reading.dense:
            return self._backend.attend(q_BSHD, k_BSHD, v_BSHD)
        bands = self._once(
            reading,
            "bands",
            lambda: [x.to(q_BSHD.device) for x in radial_bands(reading, cache.seen, own, tokens)],
        )
        parts = band_slices(tokens, reading.parts)
        if self._flex is not None:
            mask = self._once(
                reading,
                "mask",
                lambda: BandMask.of_bands(bands, k_BSHD.shape[1], parts, len(own)),
            )
            return self._flex.attend(q_BSHD, k_BSHD, v_BSHD, mask)
        q = q_BSHD.unflatten(1, (len(own), tokens))
        out = torch.empty_like(q)
        for index, part in zip(bands, parts, strict=True):
            some = q[:, :, part]
            mixed = self._backend.attend(some.flatten(1, 2), k_BSHD[:, index], v_BSHD[:, index])
            out[:, :, part] = mixed.unflatten(1, some.shape[1:3])
        return out.flatten(1, 2)

    def _once(self, reading: Reading, what: str, make: Callable[[], T]) -> T:
        """What holds for all layers and steps of a chunk."""
        key = (reading, what)
        if key not in self._kept:
            self._kept[key] = make()
        kept: T = self._kept[key]
        return kept


def band_slices(tokens: int, parts: int) -> list[slice]:
    """Parts of a frame's tokens, in raster order, whose queries share a window."""
    size = -(-tokens // parts)
    return [slice(first, min(first + size, tokens)) for first in range(0, tokens, size)]


def radial_bands(
    reading: Radial, seen: Sequence[int], own: Sequence[int], tokens: int
) -> list[torch.Tensor]:
    """Indices of the keys that each band of queries reads, by band.

    Args:
        reading: the plan.
        seen: latent frames in the order of the keys.
        own: the chunk's frames; distances count from the first of them.
        tokens: of a frame.
    """
    order = sorted(seen)
    whole = {*own, *order[: reading.sink]}
    picked = []
    for band in band_slices(tokens, reading.parts):
        keys: list[torch.Tensor] = []
        for slot, frame in enumerate(seen):
            distance = own[0] - frame
            part = 1.0 if frame in whole or distance <= 0 else reading.part(distance)
            if part == 0.0:
                continue
            width = max(band.stop - band.start, -(-tokens // round(1 / part)))
            first = min(max(0, (band.start + band.stop - width) // 2), tokens - width)
            keys.append(torch.arange(slot * tokens + first, slot * tokens + first + width))
        picked.append(torch.cat(keys))
    return picked


def window_slots(reading: Window, cache: KVCache, device: torch.device) -> torch.Tensor | None:
    """Slots of the frames that a window reads; None where that is all of them."""
    own, past = cache.own, _past(cache)
    kept = reading.kept(past, len(own))
    return None if len(kept) == len(past) else _slots(cache, (*kept, *own), device)


def pick_frames(x_BSHD: torch.Tensor, slots: torch.Tensor, tokens: int) -> torch.Tensor:
    """The tokens of the frames in some slots, of ``tokens`` each."""
    by_frame: torch.Tensor = x_BSHD.unflatten(1, (-1, tokens))
    return by_frame.index_select(1, slots).flatten(1, 2)


def _past(cache: KVCache) -> list[int]:
    """Past frames that the chunk sees, in order of time."""
    own = set(cache.own)
    return sorted(frame for frame in cache.seen if frame not in own)


def _slots(cache: KVCache, frames: Sequence[int], device: torch.device) -> torch.Tensor:
    slot_of = {frame: slot for slot, frame in enumerate(cache.seen)}
    return torch.tensor([slot_of[frame] for frame in frames], device=device)


def _rows_by_head(slots_BHN: torch.Tensor, tokens: int) -> torch.Tensor:
    """Rows of [S H, D] that hold the tokens of other frames in each head, [B, H N T]."""
    heads = slots_BHN.shape[1]
    inside = torch.arange(tokens, device=slots_BHN.device)
    token_BHT = (slots_BHN.unsqueeze(-1) * tokens + inside).flatten(2)
    head = torch.arange(heads, device=slots_BHN.device).unsqueeze(1)
    return (token_BHT * heads + head).flatten(1)


def _pick_rows(x_BSHD: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Those rows of each sample, as [B, N T, H, D]."""
    heads = x_BSHD.shape[2]
    picked = [x.flatten(0, 1).index_select(0, row) for x, row in zip(x_BSHD, rows, strict=True)]
    by_head: torch.Tensor = torch.stack(picked).unflatten(1, (heads, -1))
    return by_head.transpose(1, 2)
