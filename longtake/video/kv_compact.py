"""A KV cache that stores less: keys and values in bf16, fp16 or int8, one scratch layer in use.

Keys are stored un-roped only, which quantizes better than roped ones (KVQuant, arXiv 2401.18079),
and int8 has one scale for each frame, head and channel, since outliers stay in their channel (KIVI,
arXiv 2402.02750). Past keys are given back their precision and their positions in every forward, so
this trades time for memory; the chunk's own keys and values are never rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longtake.video.kv_cache import CacheShape, KVCache, RopeTable, runs

STORAGE = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
LEVELS = 127


@dataclass(frozen=True, slots=True)
class Stored:
    """Keys or values of the past, for every layer.

    Attributes:
        tokens: [layers, B, S, H, D] in what is stored.
        scales: [layers, B, frames, H, D] of int8, float32; of no frames otherwise.
    """

    tokens: torch.Tensor
    scales: torch.Tensor


class CompactKVCache(KVCache):
    """As ``KVCache``, with the past stored in ``storage``.

    Args:
        shape, rope, dtype, device, means: as for ``KVCache``; ``dtype`` is that of computing.
        storage: ``bf16``, ``fp16`` or ``int8``.
    """

    def __init__(
        self,
        shape: CacheShape,
        rope: RopeTable,
        *,
        dtype: torch.dtype,
        device: torch.device,
        means: bool = False,
        storage: str,
    ) -> None:
        self._stored = STORAGE[storage]
        super().__init__(shape, rope, dtype=dtype, device=device, means=means)
        self._past: list[tuple[int, int, RopeTable]] = []

    def exchange(
        self, layer: int, k_BSHD: torch.Tensor, v_BSHD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in ``KVCache``; what it returns is overwritten by the next layer's."""
        k, v = self._k[0], self._v[0]
        tokens = self.shape.frame_tokens
        for first, last, table in self._past:
            part = slice(first * tokens, last * tokens)
            table.rotate(self._load(self._past_k, layer, first, last), k[:, part])
            v[:, part] = self._load(self._past_v, layer, first, last)
            if self._means.shape[2]:
                keys = k[:, part].unflatten(1, (-1, tokens))
                self._means[layer, :, first:last] = keys.mean(2, dtype=torch.float32)
        self._write(k, self._own_rope.rotate(k_BSHD))
        self._write(v, v_BSHD)
        if self.recording:
            self._store(self._past_k, layer, k_BSHD)
            self._store(self._past_v, layer, v_BSHD)
        return k[:, : self._tokens], v[:, : self._tokens]

    def _allocate(
        self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        layers, batch, _, heads, dim = size
        frames = self.shape.frames if self._stored == torch.int8 else 0

        def stored() -> Stored:
            scales = torch.zeros(layers, batch, frames, heads, dim, device=device)
            return Stored(torch.zeros(size, dtype=self._stored, device=device), scales)

        self._past_k, self._past_v = stored(), stored()
        self._k = torch.zeros((1, *size[1:]), dtype=dtype, device=device)
        self._v = torch.zeros((1, *size[1:]), dtype=dtype, device=device)
        kept = [x for past in (self._past_k, self._past_v) for x in (past.tokens, past.scales)]
        return *kept, self._k, self._v

    def _rotate_past(self, positions: dict[int, int]) -> None:
        """Nothing is roped yet; only remember which positions the stored keys will get."""
        self._past = [
            (first, last, self.rope.at([positions[slot] for slot in range(first, last)]))
            for first, last in runs(sorted(positions))
        ]

    def _load(self, past: Stored, layer: int, first: int, last: int) -> torch.Tensor:
        """Stored tokens of some slots, in the dtype of computing."""
        tokens = self.shape.frame_tokens
        stored = past.tokens[layer, :, first * tokens : last * tokens]
        if self._stored != torch.int8:
            return stored.to(self._k.dtype)
        scale = past.scales[layer, :, first:last].unsqueeze(2)
        wide: torch.Tensor = stored.unflatten(1, (-1, tokens)).float()
        return (wide * scale).flatten(1, 2).to(self._k.dtype)

    def _store(self, past: Stored, layer: int, new_BSHD: torch.Tensor) -> None:
        """Round the chunk's own tokens into their slots."""
        if self._stored != torch.int8:
            self._write(past.tokens[layer], new_BSHD)
            return
        frames = new_BSHD.float().unflatten(1, (-1, self.shape.frame_tokens))
        scale = frames.abs().amax(2).clamp_min(1e-8) / LEVELS
        levels = (frames / scale.unsqueeze(2)).round().to(torch.int8)
        self._write(past.tokens[layer], levels.flatten(1, 2))
        past.scales[layer][:, self._own_slots] = scale


def make_cache(
    shape: CacheShape,
    rope: RopeTable,
    where: tuple[torch.dtype, torch.device],
    *,
    means: bool,
    storage: str | None,
) -> KVCache:
    """A cache that stores ``storage``, or with None what is computed.

    Args:
        shape, rope, means: as for ``KVCache``.
        where: dtype and device of computing.
        storage: of ``STORAGE``, or None.
    """
    dtype, device = where
    if storage is None:
        return KVCache(shape, rope, dtype=dtype, device=device, means=means)
    return CompactKVCache(shape, rope, dtype=dtype, device=device, means=means, storage=storage)
