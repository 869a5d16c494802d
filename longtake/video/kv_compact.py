"""A KV cache that stores less: keys and values in bf16, fp16 or int8, one scratch layer in use.

Keys are stored un-roped only, which quantizes better than roped ones (KVQuant, arXiv 2401.18079),
and int8 has one scale for each frame, head and channel, since outliers stay in their channel (KIVI,
arXiv 2402.02750). Past keys are given back their precision and their positions in every forward, so
this trades time for memory; the chunk's own keys and values are never rounded.
"""

from __future__ import annotations

import torch

from longtake.video.kv_cache import CacheShape, KVCache, RopeTable, runs

STORAGE = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
LEVELS = 127


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
            table.rotate(self._load(self._raw_k, layer, first, last), k[:, part])
            v[:, part] = self._load(self._raw_v, layer, first, last)
            if self._means.shape[2]:
                keys = k[:, part].unflatten(1, (-1, tokens))
                self._means[layer, :, first:last] = keys.mean(2, dtype=torch.float32)
        self._write(k, self._own_rope.rotate(k_BSHD))
        self._write(v, v_BSHD)
        if self.recording:
            self._store(self._raw_k, layer, k_BSHD)
            self._store(self._raw_v, layer, v_BSHD)
        return k[:, : self._tokens], v[:, : self._tokens]

    def _allocate(
        self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        layers, batch, tokens, heads, dim = size
        self._raw_k = torch.zeros(size, dtype=self._stored, device=device)
        self._raw_v = torch.zeros(size, dtype=self._stored, device=device)
        self._k = torch.zeros((1, *size[1:]), dtype=dtype, device=device)
        self._v = torch.zeros((1, *size[1:]), dtype=dtype, device=device)
        frames = tokens // self.shape.frame_tokens if self._stored == torch.int8 else 0
        scales = (2, layers, batch, frames, heads, dim)
        self._scales = torch.zeros(scales, dtype=torch.float32, device=device)
        return self._raw_k, self._raw_v, self._k, self._v, self._scales

    def _rotate_past(self, positions: dict[int, int]) -> None:
        """Nothing is roped yet; only remember which positions the stored keys will get."""
        self._past = [
            (first, last, self.rope.at([positions[slot] for slot in range(first, last)]))
            for first, last in runs(sorted(positions))
        ]

    def _scale(self, buffer: torch.Tensor, layer: int) -> torch.Tensor:
        """Scales [B, frames, H, D] of the layer's keys or values."""
        return self._scales[0 if buffer is self._raw_k else 1, layer]

    def _load(self, buffer: torch.Tensor, layer: int, first: int, last: int) -> torch.Tensor:
        """Stored tokens of some slots, in the dtype of computing."""
        tokens = self.shape.frame_tokens
        stored = buffer[layer, :, first * tokens : last * tokens]
        if self._stored != torch.int8:
            return stored.to(self._k.dtype)
        scale = self._scale(buffer, layer)[:, first:last].unsqueeze(2)
        wide: torch.Tensor = stored.unflatten(1, (-1, tokens)).float()
        return (wide * scale).flatten(1, 2).to(self._k.dtype)

    def _store(self, buffer: torch.Tensor, layer: int, new_BSHD: torch.Tensor) -> None:
        """Round the chunk's own tokens into their slots."""
        if self._stored != torch.int8:
            self._write(buffer[layer], new_BSHD)
            return
        frames = new_BSHD.float().unflatten(1, (-1, self.shape.frame_tokens))
        scale = frames.abs().amax(2).clamp_min(1e-8) / LEVELS
        levels = (frames / scale.unsqueeze(2)).round().to(torch.int8)
        self._write(buffer[layer], levels.flatten(1, 2))
        self._scale(buffer, layer)[:, self._own_slots] = scale


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
