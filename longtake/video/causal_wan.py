"""Causal rollout on diffusers' own ``WanTransformer3DModel``: processors and a rope module.

No model code is copied. Self-attention reads and writes a KV cache, cross-attention reads keys and
values computed once a prompt, and positions come from the cache. Proved against the reference
implementations of Self-Forcing and LongLive before this project began, and here against a forward
that recomputes everything (tests/video/test_causal_wan.py).

Shapes: B batch, C channels, F latent frames, h w latent size, S tokens, H heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from diffusers import WanTransformer3DModel
from torch import nn
from torch.nn import functional

from longtake.errors import StateError
from longtake.schedulers.noise import TRAIN_TIMESTEPS
from longtake.video.attention_backends import Sizes, choose_backends
from longtake.video.attention_plan import AttentionPlan
from longtake.video.attention_reader import Reader
from longtake.video.attention_readings import Full
from longtake.video.kv_cache import CacheShape, KVCache, RopeTable
from longtake.video.kv_compact import make_cache

if TYPE_CHECKING:
    from longtake.video.parallel import Mesh


@dataclass(frozen=True, slots=True)
class TextCache:
    """Cross-attention keys and values of one prompt, for every layer.

    Attributes:
        keys, values: one [B, S, H, D] tensor a layer.
        bias: [B, 1, 1, S] added to the scores. Padding is zeros without a mask (as Wan was
            trained), so all padding tokens have one and the same key: one of them stands for n,
            with log(n) added to its score: the same sum up to rounding.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None


@dataclass(slots=True)
class Session:
    """What one rollout keeps between forwards.

    Attributes:
        cache, text: keys and values of the past and of the prompt.
        reader: reads the cache by a plan; None reads all of it in one call.
        step: denoising step of the forward, None in the clean pass.
    """

    cache: KVCache
    text: TextCache
    reader: Reader | None = None
    step: int | None = None


class CausalWan:
    """A stock transformer with the causal processors installed.

    ``session`` names the rollout whose cache a forward uses, while it runs; several rollouts may
    share one transformer by taking turns. ``backends`` says what computes its attention.

    Args:
        transformer: changed in place.
        backend: of self-attention, by name or ``auto``, and of cross-attention where it can do it.

    Raises:
        BackendError: the backend is missing, or cannot do this.
    """

    def __init__(self, transformer: WanTransformer3DModel, backend: str = "auto") -> None:
        self.transformer = transformer.eval().requires_grad_(False)
        self.device: torch.device = transformer.patch_embedding.weight.device
        self.dtype: torch.dtype = transformer.patch_embedding.weight.dtype
        config = transformer.config
        sizes = Sizes(config.num_attention_heads, config.attention_head_dim)
        self.backends = choose_backends(backend, self.device, self.dtype, sizes)
        self.session: Session | None = None
        self.mesh: Mesh | None = None
        self._rope = transformer.rope
        transformer.rope = _NoRope()
        embedding = transformer.patch_embedding
        embedding.__dict__["forward"] = MethodType(_embed_patches, embedding)
        for layer, block in enumerate(transformer.blocks):
            block.attn1.set_processor(_SelfAttention(self, layer))
            block.attn2.set_processor(_CrossAttention(self, layer))

    def join(self, mesh: Mesh | None) -> None:
        """Be one rank's part of the model from now on; None makes it whole again."""
        if self.mesh is not None:
            self.mesh.remove()
        self.mesh = mesh
        if mesh is not None:
            mesh.install(self.transformer)

    def reader(self, plan: AttentionPlan) -> Reader | None:
        """What reads a cache by ``plan``; None where all of it is read in one call."""
        return None if plan.plain else Reader(plan, self.backends.own)

    def new_cache(
        self,
        batch: int,
        frames: int,
        latent_size: tuple[int, int],
        *,
        means: bool = False,
        storage: str | None = None,
    ) -> KVCache:
        """An empty cache of ``frames`` slots for latents of ``latent_size`` = (h, w).

        ``means`` keeps what plans that rank frames need; ``storage`` stores less than is computed.
        """
        config = self.transformer.config
        _, high, wide = config.patch_size
        tokens = (latent_size[0] // high) * (latent_size[1] // wide)
        shape = CacheShape(
            layers=config.num_layers,
            batch=batch,
            frames=frames,
            frame_tokens=tokens,
            heads=config.num_attention_heads,
            head_dim=config.attention_head_dim,
        )
        table = self._table(frames, latent_size)
        if self.mesh is not None:
            shape, table = self.mesh.cache_shape(shape), self.mesh.cache_table(table)
        where = (self.dtype, self.device)
        return make_cache(shape, table, where, means=means, storage=storage)

    @torch.inference_mode()
    def encode_text(self, embeddings: Sequence[torch.Tensor], length: int) -> TextCache:
        """Keys and values of prompts, padded to ``length`` tokens each.

        Args:
            embeddings: one [tokens, text_dim] tensor a sample of the batch, unpadded.
            length: tokens that each is padded to with zeros.
        """
        if self.mesh is not None:
            embeddings = self.mesh.own_samples(embeddings)
        folded = max(min(e.shape[0] + 1, length) for e in embeddings)
        text = torch.zeros(len(embeddings), folded, embeddings[0].shape[1])
        bias = torch.full((len(embeddings), 1, 1, folded), -math.inf)
        for row, embedding in enumerate(embeddings):
            tokens, padding = embedding.shape[0], length - embedding.shape[0]
            text[row, :tokens] = embedding
            bias[row, ..., :tokens] = 0.0
            if padding > 0:
                bias[row, ..., tokens] = math.log(padding)
        text = text.to(self.device, self.dtype)
        hidden = self.transformer.condition_embedder.text_embedder(text)
        keys, values = [], []
        for block in self.transformer.blocks:
            attn = block.attn2
            keys.append(attn.norm_k(attn.to_k(hidden)).unflatten(2, (attn.heads, -1)))
            values.append(attn.to_v(hidden).unflatten(2, (attn.heads, -1)))
        plain = not bool(bias.any())
        return TextCache(
            tuple(keys), tuple(values), None if plain else bias.to(self.device, self.dtype)
        )

    @torch.inference_mode()
    def forward(self, session: Session, x_BCFhw: torch.Tensor, sigma: float) -> torch.Tensor:
        """Velocity of the chunk that ``session.cache`` was begun for, in float32.

        Args:
            session: the rollout's caches; batch as in ``x_BCFhw``.
            x_BCFhw: noisy latents, all frames at level ``sigma``.
            sigma: noise level; the model's timestep is 1000 times it.
        """
        self.session = session
        mesh = self.mesh
        if mesh is not None:
            x_BCFhw = mesh.begin(x_BCFhw, self.transformer.config.patch_size)
        batch = x_BCFhw.shape[0]
        timestep = torch.full((batch,), sigma * TRAIN_TIMESTEPS, device=self.device)
        # the text rides in the session; an empty tensor keeps the embedder from running
        no_text = torch.empty(
            batch, 0, self.transformer.config.text_dim, device=self.device, dtype=self.dtype
        )
        hidden = x_BCFhw.to(self.device, self.dtype)
        try:
            (velocity,) = self.transformer(hidden, timestep, no_text, return_dict=False)
        finally:
            self.session = None
        velocity = velocity.float()
        return velocity if mesh is None else mesh.finish(velocity)

    def _table(self, frames: int, latent_size: tuple[int, int]) -> RopeTable:
        """The stock rope's rotations of ``frames`` positions, one of each pair of channels."""
        step = self.transformer.config.patch_size[0]
        shape = torch.empty(1, 1, frames * step, *latent_size)
        cos, sin = self._rope(shape)
        return RopeTable(
            cos[0, :, 0, 0::2].unflatten(0, (frames, -1)).to(self.device).contiguous(),
            sin[0, :, 0, 1::2].unflatten(0, (frames, -1)).to(self.device).contiguous(),
        )

    def _current(self) -> Session:
        if self.session is None:
            raise StateError("the transformer was called outside CausalWan.forward")
        return self.session


class _NoRope(nn.Module):
    """Stands in for the rope: positions are the cache's business."""

    def forward(self, *_: object) -> None:
        return None


def _embed_patches(embedding: nn.Conv3d, x_BCFhw: torch.Tensor) -> torch.Tensor:
    """The patch embedding as the matrix product it is: kernel and stride are equal.

    torch's ``conv3d`` on the CPU gives other last bits with one thread than with two.
    """
    for dim, size in enumerate(embedding.kernel_size, start=2):
        x_BCFhw = x_BCFhw.unflatten(dim + (dim - 2), (-1, size))
    patches = x_BCFhw.permute(0, 2, 4, 6, 1, 3, 5, 7)
    hidden = functional.linear(patches.flatten(4), embedding.weight.flatten(1), embedding.bias)
    return hidden.permute(0, 4, 1, 2, 3)


class _SelfAttention:
    def __init__(self, wan: CausalWan, layer: int) -> None:
        self._wan, self._layer = wan, layer

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *_: object) -> torch.Tensor:
        session, mesh = self._wan._current(), self._wan.mesh
        cache, reader = session.cache, session.reader
        heads, place = (attn.heads, -1), (self._layer, session.step)
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, heads)
        k = attn.norm_k(attn.to_k(hidden_states)).unflatten(2, heads)
        v = attn.to_v(hidden_states).unflatten(2, heads)
        if mesh is not None:
            q, k, v = mesh.to_heads(q, k, v)
        q = cache.rotate_query(q)
        seen = cache.exchange(self._layer, k, v)
        if mesh is not None and mesh.layout.ring > 1:
            reading = Full() if reader is None else reader.plan.reading_at(*place)
            mixed = mesh.attend(q, seen, cache, self._wan.backends.own, reading)
        elif reader is None:
            mixed = self._wan.backends.own.attend(q, *seen)
        else:
            mixed = reader.attend(q, *seen, cache, place)
        if mesh is not None:
            mixed = mesh.to_tokens(mixed)
        out: torch.Tensor = attn.to_out[0](mixed.flatten(2, 3))
        return out


class _CrossAttention:
    def __init__(self, wan: CausalWan, layer: int) -> None:
        self._wan, self._layer = wan, layer

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *_: object) -> torch.Tensor:
        text = self._wan._current().text
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        mixed = self._wan.backends.cross.attend_biased(
            q, text.keys[self._layer], text.values[self._layer], text.bias
        )
        out: torch.Tensor = attn.to_out[0](mixed.flatten(2, 3))
        return out
