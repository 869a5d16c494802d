"""The cached rollout equals a forward that recomputes everything."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from longtake.errors import StateError
from longtake.schedulers.chunks import ChunkLayout, ChunkSpec
from longtake.video.causal_wan import CausalWan, Session

LATENT = (4, 6)
TOKENS = 2 * 3
TEXT_LENGTH = 40
CONTEXT = 0.05


class _ReferenceAttention:
    """Masked block-causal attention over the whole sequence, written as plainly as can be."""

    def __init__(self, layout: list[ChunkSpec], rope: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._layout, self._rope = layout, rope

    def __call__(self, attn: Any, x: torch.Tensor, *_: object) -> torch.Tensor:
        q = attn.norm_q(attn.to_q(x)).unflatten(2, (attn.heads, -1))
        k = attn.norm_k(attn.to_k(x)).unflatten(2, (attn.heads, -1))
        v = attn.to_v(x).unflatten(2, (attn.heads, -1))
        out = torch.empty_like(q)
        for spec in self._layout:
            own, seen = spec.own, (*spec.past, *spec.own)
            query = self._rotate(q[:, _tokens(own)], range(len(spec.past), len(seen)))
            keys = self._rotate(k[:, _tokens(seen)], range(len(seen)))
            scores = torch.einsum("bqhd,bkhd->bhqk", query, keys) * query.shape[-1] ** -0.5
            values = v[:, _tokens(seen)]
            out[:, _tokens(own)] = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)
        projected: torch.Tensor = attn.to_out[0](out.flatten(2))
        return projected

    def _rotate(self, x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        index = _tokens(tuple(positions))
        cos, sin = (table[0, index].unsqueeze(0) for table in self._rope)
        pairs = x.unflatten(-1, (-1, 2))
        turned = torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
        return x * cos + turned * sin


class _Nothing(nn.Module):
    def forward(self, *_: object) -> None:
        return None


def _tokens(frames: Sequence[int]) -> torch.Tensor:
    start = torch.tensor(list(frames), dtype=torch.long) * TOKENS
    return (start[:, None] + torch.arange(TOKENS)).flatten()


def _reference(
    transformer: WanTransformer3DModel,
    layout: list[ChunkSpec],
    x: torch.Tensor,
    sigmas: list[float],
    text: torch.Tensor,
) -> torch.Tensor:
    """One pass over all chunks with one timestep a token and the text padded in full."""
    model = copy.deepcopy(transformer)
    rope = model.rope(torch.empty(1, 1, x.shape[2], *LATENT))
    model.rope = _Nothing()
    for block in model.blocks:
        block.attn1.set_processor(_ReferenceAttention(layout, rope))
    frames = [sigma * 1000 for spec, sigma in zip(layout, sigmas, strict=True) for _ in spec.own]
    timestep = torch.tensor(frames).repeat_interleave(TOKENS).expand(x.shape[0], -1)
    (velocity,) = model(x, timestep, text, return_dict=False)
    result: torch.Tensor = velocity
    return result


PLANS = {
    "global": ChunkLayout(9, 3),
    "sink+window": ChunkLayout(15, 3, window=7, sink=1),
    "window without sink": ChunkLayout(12, 2, window=5),
    "first chunk of 1": ChunkLayout(13, 3, first_chunk=1, window=8, sink=2),
    "given frames": ChunkLayout(11, 2, given=(1, 2), window=6, sink=1),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_cached_rollout_equals_full_recompute(
    name: str, batch: int, fresh_transformer: WanTransformer3DModel
) -> None:
    layout = list(PLANS[name])
    frames = sum(spec.frames for spec in layout)
    torch.manual_seed(batch)
    clean = torch.randn(batch, 4, frames, *LATENT)
    noisy = torch.randn_like(clean)
    lengths = [5, 9][:batch]
    embeddings = [torch.randn(n, 16) for n in lengths]
    padded = torch.stack(
        [nn.functional.pad(e, (0, 0, 0, TEXT_LENGTH - len(e))) for e in embeddings]
    )
    stock = copy.deepcopy(fresh_transformer)
    wan = CausalWan(fresh_transformer)
    cache = wan.new_cache(batch, PLANS[name].capacity, LATENT)
    session = Session(cache, wan.encode_text(embeddings, TEXT_LENGTH))
    errors = []
    with torch.inference_mode():
        for index, spec in enumerate(layout):
            own = slice(spec.start, spec.start + spec.frames)
            cache.begin(spec.past, spec.own)
            wan.forward(session, torch.randn_like(noisy[:, :, own]), 0.9)
            velocity = wan.forward(session, noisy[:, :, own], 0.6)
            sequence = torch.cat([clean[:, :, : spec.start], noisy[:, :, own]], 2)
            sigmas = [CONTEXT] * index + [0.6]
            expected = _reference(stock, layout[: index + 1], sequence, sigmas, padded)
            errors.append((velocity - expected[:, :, own]).abs().max().item())
            cache.recording = True
            wan.forward(session, clean[:, :, own], CONTEXT)
            cache.recording = False
    assert velocity.std() > 0.05
    assert max(errors) <= 1e-5, errors


def test_two_rollouts_share_a_transformer(fresh_transformer: WanTransformer3DModel) -> None:
    wan = CausalWan(fresh_transformer)
    text = wan.encode_text([torch.ones(3, 16)], TEXT_LENGTH)
    x = torch.randn(1, 4, 2, *LATENT)

    def two_chunks(other: Session | None) -> torch.Tensor:
        session = Session(wan.new_cache(1, 6, LATENT), text)
        for start in (0, 2):
            session.cache.begin(tuple(range(start)), (start, start + 1))
            session.cache.recording = True
            out = wan.forward(session, x, 0.5)
            if other is not None:
                other.cache.begin((), (0, 1))
                wan.forward(other, -x, 0.3)
        return out

    alone = two_chunks(None)
    beside = two_chunks(Session(wan.new_cache(1, 6, LATENT), text))
    assert torch.equal(alone, beside)


def test_text_padding_folds_only_where_there_is_padding(
    fresh_transformer: WanTransformer3DModel,
) -> None:
    wan = CausalWan(fresh_transformer)
    assert wan.encode_text([torch.ones(8, 16)], 8).bias is None
    folded = wan.encode_text([torch.ones(8, 16)], 512)
    assert folded.bias is not None
    assert folded.keys[0].shape[1] == 9


def test_transformer_refuses_a_call_from_outside(
    fresh_transformer: WanTransformer3DModel,
) -> None:
    CausalWan(fresh_transformer)
    with pytest.raises(StateError):
        fresh_transformer(torch.zeros(1, 4, 1, *LATENT), torch.zeros(1), torch.zeros(1, 4, 16))


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("length", [9, 40])
def test_cross_attention_is_that_to_the_whole_padded_text(
    fresh_transformer: WanTransformer3DModel, backend: str, length: int
) -> None:
    """By the backend that was named, with padding folded and without any."""
    torch.manual_seed(5)
    wan = CausalWan(fresh_transformer, backend)
    assert (wan.backends.own.name, wan.backends.cross.name) == (backend, backend)
    embeddings = [torch.randn(9, 16), torch.randn(9 if length == 9 else 4, 16)]
    wan.session = Session(wan.new_cache(2, 4, LATENT), wan.encode_text(embeddings, length))
    assert (wan.session.text.bias is None) == (length == 9)
    padded = torch.stack([nn.functional.pad(e, (0, 0, 0, length - len(e))) for e in embeddings])
    hidden = torch.randn(2, 2 * TOKENS, fresh_transformer.config.num_attention_heads * 24)
    with torch.inference_mode():
        text = fresh_transformer.condition_embedder.text_embedder(padded)
        for block in fresh_transformer.blocks:
            attn = block.attn2
            heads = (attn.heads, -1)
            q = attn.norm_q(attn.to_q(hidden)).unflatten(2, heads)
            k = attn.norm_k(attn.to_k(text)).unflatten(2, heads)
            v = attn.to_v(text).unflatten(2, heads)
            weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5).softmax(-1)
            expected = attn.to_out[0](torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))
            made = attn.processor(attn, hidden)
            assert expected.std() > 0.05
            assert (made - expected).abs().max() <= 1e-6
