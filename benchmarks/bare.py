"""The least a chunk can cost: stock forwards over ready-made keys and values, and the VAE decode.

The transformer is diffusers' own, with the engine's very weights and with its own rope. Its
processors do what the stock ones do (project, norm, rotate queries and keys, attend, project out)
except that the keys and values attended to are given: no cache is written, nothing is moved, and
the text's keys and values are ready. What the engine takes on top of this is its overhead: the
cache, positions of past keys, noise, sampler, guidance, conversion to bytes and Python.

Shapes: B batch, S tokens, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import WanTransformer3DModel

from longtake.schedulers.chunks import ChunkSpec
from longtake.schedulers.noise import TRAIN_TIMESTEPS
from longtake.video.attention import sdpa
from longtake.video.causal_wan import CausalWan, TextCache
from longtake.video.codec import StreamingDecoder
from longtake.video.components import CausalModel
from longtake.video.plan import Plan

Rotation = tuple[torch.Tensor, torch.Tensor]


class BareChunks:
    """Bare forwards and decode of one plan's chunks.

    Args:
        plan: whose chunks are made.
        model: whose weights are used (shared, not copied) and whose VAE decodes.
    """

    def __init__(self, plan: Plan, model: CausalModel) -> None:
        self._plan = plan
        self._transformer = _stock_transformer(model.wan)
        self._decoder = StreamingDecoder(model.vae)
        self._batch = 2 if plan.guided else 1
        self._draw = torch.Generator().manual_seed(plan.seed)
        self._seen = plan.layout.capacity * plan.frame_tokens
        config = self._transformer.config
        # a pair a layer, so that the processor's caches feel what the engine's pairs do to them
        size = (config.num_layers, self._batch, self._seen, config.num_attention_heads)
        self._keys, self._values = (
            torch.randn(*size, config.attention_head_dim, generator=self._draw) for _ in "kv"
        )
        self._no_text = torch.empty(self._batch, 0, config.text_dim)
        self.text = _text(plan, model)
        for layer, block in enumerate(self._transformer.blocks):
            block.attn1.set_processor(_GivenSelf(self, layer))
            block.attn2.set_processor(_GivenText(self.text, layer))

    @property
    def forwards(self) -> int:
        """Forwards a chunk: denoising steps and the clean pass."""
        return self._plan.steps + 1

    def given(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, S, H, D] of a layer, as many as the chunk in hand sees."""
        return self._keys[layer, :, : self._seen], self._values[layer, :, : self._seen]

    @torch.inference_mode()
    def make_chunk(self, spec: ChunkSpec) -> torch.Tensor:
        """As many forwards as the engine makes for this chunk, then a decode; on random latents."""
        self._seen = (len(spec.past) + spec.frames) * self._plan.frame_tokens
        channels, high, wide = self._plan.latent_shape
        latents = torch.randn(1, channels, spec.frames, high, wide, generator=self._draw)
        x = torch.cat([latents] * self._batch)
        for sigma in (*self._plan.sigmas[:-1], self._plan.context_noise):
            timestep = torch.full((self._batch,), sigma * TRAIN_TIMESTEPS)
            self._transformer(x, timestep, self._no_text, return_dict=False)
        return self._decoder.decode(latents[:, :, : spec.keep])


class _GivenSelf:
    """Stock self-attention, but over given keys and values."""

    def __init__(self, chunks: BareChunks, layer: int) -> None:
        self._chunks, self._layer = chunks, layer

    def __call__(
        self, attn: Any, x: torch.Tensor, _text: None, _mask: None, rotation: Rotation
    ) -> torch.Tensor:
        heads = (attn.heads, -1)
        q = _rotate(attn.norm_q(attn.to_q(x)).unflatten(2, heads), rotation)
        # every forward makes its own keys and values; the given ones stand in for them and the past
        _rotate(attn.norm_k(attn.to_k(x)).unflatten(2, heads), rotation)
        attn.to_v(x)
        out: torch.Tensor = attn.to_out[0](sdpa(q, *self._chunks.given(self._layer)).flatten(2, 3))
        return out


class _GivenText:
    """Stock cross-attention, but over the text's ready keys and values."""

    def __init__(self, text: TextCache, layer: int) -> None:
        self._k, self._v, self._bias = text.keys[layer], text.values[layer], text.bias

    def __call__(self, attn: Any, x: torch.Tensor, *_: object) -> torch.Tensor:
        q = attn.norm_q(attn.to_q(x)).unflatten(2, (attn.heads, -1))
        out: torch.Tensor = attn.to_out[0](sdpa(q, self._k, self._v, self._bias).flatten(2, 3))
        return out


def _rotate(x_BSHD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """As diffusers' ``WanAttnProcessor`` rotates."""
    x1, x2 = x_BSHD.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation[0][..., 0::2], rotation[1][..., 1::2]
    out = torch.empty_like(x_BSHD)
    out[..., 0::2] = x1 * cos - x2 * sin
    out[..., 1::2] = x1 * sin + x2 * cos
    return out


def _stock_transformer(wan: CausalWan) -> WanTransformer3DModel:
    """The transformer as diffusers makes it, over the tensors of the engine's one."""
    stock: WanTransformer3DModel = WanTransformer3DModel.from_config(dict(wan.transformer.config))
    stock.load_state_dict(wan.transformer.state_dict(), strict=True, assign=True)
    return stock.eval().requires_grad_(False)


def _text(plan: Plan, model: CausalModel) -> TextCache:
    """Keys and values of the prompt, as long as the engine's: padding folded into one token."""
    prompts = [plan.prompts[0], *([plan.negative_prompt] if plan.guided else [])]
    return model.wan.encode_text([model.embed(p) for p in prompts], plan.text_length)
