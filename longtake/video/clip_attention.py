"""Other self-attention for diffusers' Wan pipelines: installed for one run, then taken out.

Everything but the reading of keys is as in diffusers' ``WanAttnProcessor``; cross-attention stays
its own. Shapes: B batch, F latent frames, S tokens, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from longtake.video.attention import Attend, attend_chunked
from longtake.video.attention_backends import Backend
from longtake.video.attention_readings import Chunked, Windows
from longtake.video.clip_reading import ClipReading
from longtake.video.kv_cache import RopeTable


@contextmanager
def clip_attention(pipeline: Any, reading: ClipReading | None, backend: Backend) -> Iterator[None]:
    """Inside, the pipeline's transformers read by ``reading``; None changes nothing.

    Args:
        pipeline: of the Wan family; other runs must not use it meanwhile.
        reading: resolved for the clip that will be made.
        backend: what computes it.
    """
    if reading is None:
        yield
        return
    blocks = [block for model in transformers_of(pipeline) for block in model.blocks]
    before = [(block.attn1, block.attn1.processor) for block in blocks]
    processor = _SelfAttention(_attend(reading, backend))
    for attention, _ in before:
        attention.set_processor(processor)
    try:
        yield
    finally:
        for attention, own in before:
            attention.set_processor(own)


def transformers_of(pipeline: Any) -> list[Any]:
    """The pipeline's one or two transformers (Wan 2.2 has one for high and one for low noise)."""
    found = [getattr(pipeline, name, None) for name in ("transformer", "transformer_2")]
    return [model for model in found if model is not None]


def attend_windows(
    q_BSHD: torch.Tensor,
    k_BSHD: torch.Tensor,
    v_BSHD: torch.Tensor,
    windows: Windows,
    attend: Attend,
) -> torch.Tensor:
    """Each token attends inside the windows it lies in; their outputs are averaged.

    A window counts by the frame's distance from its nearer end, so no window ends abruptly; at the
    ends of the clip, where only one window is, that one alone counts.
    """
    q, k, v = (x.unflatten(1, (windows.total, -1)) for x in (q_BSHD, k_BSHD, v_BSHD))
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    total = torch.zeros(windows.total, device=q.device)
    for start, stop in windows.spans:
        part = slice(start, stop)
        mixed = attend(*(x[:, part].flatten(1, 2) for x in (q, k, v)))
        ahead = torch.arange(1, stop - start + 1, device=q.device, dtype=torch.float32)
        weight = torch.minimum(ahead, ahead.flip(0))
        out[:, part] += mixed.unflatten(1, (stop - start, -1)) * weight[:, None, None, None]
        total[part] += weight
    return (out / total[:, None, None, None]).flatten(1, 2).to(q_BSHD.dtype)


def _attend(reading: ClipReading, backend: Backend) -> Attend:
    if isinstance(reading, Chunked):
        return lambda q, k, v: attend_chunked(q, k, v, reading.tokens, backend.attend_lse)
    return lambda q, k, v: attend_windows(q, k, v, reading, backend.attend)


class _SelfAttention:
    """Stands in for ``WanAttnProcessor`` in blocks' first attention."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        _encoder: None = None,
        _mask: None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        heads = (attn.heads, -1)
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, heads)
        k = attn.norm_k(attn.to_k(hidden_states)).unflatten(2, heads)
        v = attn.to_v(hidden_states).unflatten(2, heads)
        if rotary_emb is not None:
            cos, sin = rotary_emb
            table = RopeTable(cos[..., 0::2], sin[..., 1::2])
            q, k = table.rotate(q), table.rotate(k)
        out: torch.Tensor = attn.to_out[0](self._attend(q, k, v).flatten(2, 3))
        return out
