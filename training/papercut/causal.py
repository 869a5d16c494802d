"""The transformer and its chunk-parallel training forward, equal to the engine's cached rollout.

A batch is a flat list of G chunk instances (clean ones first, then noisy ones), each with its own
noise level, prompt and chunks to look back at. A noisy chunk sees its own tokens and the clean
keys of at most two past chunks: the video's first (the sink) and its predecessor. Rotary positions
are relative, so own keys sit at slot 0, the predecessor at slot -1 and a sink further back at -2:
the same attention as slot numbers 0, 1, 2 in the engine.

Shapes: G instances, N tokens of a chunk, D width, H heads, E width of a head, L text rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from training.papercut.text import TEXT_DIM, Context
from training.papercut.transform import LATENT_CHANNELS

CHUNK = 3  # latent frames
SINK = 3
WINDOW = 9
WIDTH, HEADS, LAYERS, HIDDEN = 192, 4, 4, 768


@dataclass(frozen=True, slots=True)
class Chunks:
    """G chunk instances: latents ``[G, C, T, H, W]``, sigmas and clip numbers ``[G]``, looks back.

    ``sees[slots]`` lists the instances that look back at ``slots`` past chunks, and those past
    chunks' instance numbers, oldest first. The first ``clean`` instances only leave keys behind.
    """

    latents: Tensor
    sigmas: Tensor
    clips: Tensor
    sees: tuple[tuple[Tensor, Tensor], ...]
    clean: int


def make_transformer() -> WanTransformer3DModel:
    """An untrained transformer that starts by returning its input, a fair first guess of v."""
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=256,
        ffn_dim=HIDDEN,
        num_layers=LAYERS,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=1024,
    )
    with torch.no_grad():
        for block in model.blocks:
            for part, std in (
                (block.attn1.to_out[0], 0.02),
                (block.attn2.to_out[0], 0.05),
                (block.ffn.net[2], 0.02),
            ):
                nn.init.normal_(part.weight, std=std / math.sqrt(2 * LAYERS) * 2)
                nn.init.zeros_(part.bias)
            block.scale_shift_table.zero_()
            block.scale_shift_table[:, (2, 5)] = 0.5
        nn.init.zeros_(model.condition_embedder.time_proj.weight)
        model.scale_shift_table.zero_()
        patch = LATENT_CHANNELS * 4
        basis = torch.linalg.qr(torch.randn(WIDTH, patch))[0]
        model.patch_embedding.weight.copy_(basis.view(model.patch_embedding.weight.shape))
        model.patch_embedding.bias.zero_()
        back = basis.T.view(LATENT_CHANNELS, 4, WIDTH).transpose(0, 1).reshape(patch, WIDTH)
        model.proj_out.weight.copy_(back * (patch / WIDTH) ** 0.5)
        model.proj_out.bias.zero_()
    return model


def rotary(
    frames: int, height: int, width: int, slot: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[N, 1, E/2]`` of a chunk at a slot, as Wan splits a head in t, h, w."""
    head = WIDTH // HEADS
    side = 2 * (head // 6)
    sizes = (head - 2 * side, side, side)
    positions = (torch.arange(frames) + slot * frames, torch.arange(height), torch.arange(width))
    grid = torch.meshgrid(*(axis.double() for axis in positions), indexing="ij")
    angles = []
    for axis, size in zip(grid, sizes, strict=True):
        frequencies = 10000.0 ** -(torch.arange(0, size, 2).double() / size)
        angles.append(axis.flatten()[:, None] * frequencies)
    turned = torch.cat(angles, 1)[:, None].to(device)
    return turned.cos().float(), turned.sin().float()


def turn(heads_GNHE: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to interleaved pairs."""
    even, odd = heads_GNHE[..., 0::2], heads_GNHE[..., 1::2]
    cos, sin = table
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def patches(model: WanTransformer3DModel, latents_GCTHW: Tensor) -> Tensor:
    """Patch embedding as a matrix product: ``[G, N, D]``."""
    G, C, T, H, W = latents_GCTHW.shape
    cells = latents_GCTHW.view(G, C, T, H // 2, 2, W // 2, 2).permute(0, 2, 3, 5, 1, 4, 6)
    return F.linear(
        cells.reshape(G, -1, C * 4),
        model.patch_embedding.weight.flatten(1),
        model.patch_embedding.bias,
    )


def unpatch(tokens_GNP: Tensor, frames: int, height: int, width: int) -> Tensor:
    """Output tokens back to latents ``[G, C, T, H, W]``."""
    cells = tokens_GNP.view(len(tokens_GNP), frames, height // 2, width // 2, 2, 2, -1)
    return cells.permute(0, 6, 1, 2, 4, 3, 5).reshape(len(tokens_GNP), -1, frames, height, width)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What every block is told: modulation, text rows and bias a clip, rotary tables by slot."""

    modulation: Tensor
    text: Context
    tables: tuple[tuple[Tensor, Tensor], ...]


def forward(model: WanTransformer3DModel, chunks: Chunks, text: Context) -> Tensor:
    """Velocities of the noisy instances, ``[G - clean, C, T, H, W]``."""
    G, _, T, H, W = chunks.latents.shape
    embed = model.condition_embedder
    time = embed.time_embedder(embed.timesteps_proj(1000 * chunks.sigmas))
    modulation = embed.time_proj(F.silu(time)).view(G, 6, WIDTH)
    context = Context(embed.text_embedder(text.rows), text.bias)
    tables = tuple(
        rotary(T, H // 2, W // 2, -slot, chunks.latents.device) for slot in range(len(chunks.sees))
    )
    conditions = Conditions(modulation, context, tables)
    x = patches(model, chunks.latents)
    for block in model.blocks[:-1]:
        x = run_block(block, x, chunks, conditions, keep=0)
    x = run_block(model.blocks[-1], x, chunks, conditions, keep=chunks.clean)
    shift, scale = (model.scale_shift_table + time[chunks.clean :, None]).chunk(2, dim=1)
    return unpatch(
        model.proj_out(F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale) + shift), T, H, W
    )


def run_block(
    block: WanTransformerBlock, x: Tensor, chunks: Chunks, conditions: Conditions, *, keep: int
) -> Tensor:
    """One stock block; the instances before ``keep`` leave keys behind and go no further."""
    modulation = (block.scale_shift_table + conditions.modulation).chunk(6, dim=1)
    shift1, scale1, gate1, shift2, scale2, gate2 = modulation
    h = F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale1) + shift1
    mixed = self_attention(block.attn1, h, chunks, conditions.tables, keep)
    x = x[keep:] + block.attn1.to_out[0](mixed) * gate1[keep:]
    x = x + cross_attention(block, x, chunks.clips[keep:], conditions.text)
    h = F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale2[keep:]) + shift2[keep:]
    h = F.gelu(block.ffn.net[0].proj(h), approximate="tanh")
    made: Tensor = x + block.ffn.net[2](h) * gate2[keep:]
    return made


def self_attention(
    attention: Any,
    h: Tensor,
    chunks: Chunks,
    tables: tuple[tuple[Tensor, Tensor], ...],
    keep: int,
) -> Tensor:
    """Each instance attends to its own keys and to the clean keys it sees."""
    weight = torch.cat([attention.to_q.weight, attention.to_k.weight, attention.to_v.weight])
    bias = torch.cat([attention.to_q.bias, attention.to_k.bias, attention.to_v.bias])
    q, k, v = F.linear(h, weight, bias).chunk(3, -1)
    G, N, _ = h.shape
    shape = (G, N, HEADS, WIDTH // HEADS)
    q = turn(attention.norm_q(q).view(shape), tables[0])
    k = attention.norm_k(k).view(shape)
    v = v.view(shape)
    own = turn(k, tables[0])
    past = [turn(k[: chunks.clean], table) for table in tables[1:]]
    outputs, order = [], []
    for count, (queries, seen) in enumerate(chunks.sees):
        if keep:
            wanted = queries >= keep
            queries, seen = queries[wanted], seen[wanted]
        if not len(queries):
            continue
        keys = [past[count - 1 - i][seen[:, i]] for i in range(count)] + [own[queries]]
        values = [v[seen[:, i]] for i in range(count)] + [v[queries]]
        key, value = torch.cat(keys, 1).transpose(1, 2), torch.cat(values, 1).transpose(1, 2)
        outputs.append(F.scaled_dot_product_attention(q[queries].transpose(1, 2), key, value))
        order.append(queries)
    joined = torch.cat(outputs).transpose(1, 2).flatten(2)
    return joined[torch.argsort(torch.cat(order))]


def cross_attention(block: WanTransformerBlock, x: Tensor, clips: Tensor, text: Context) -> Tensor:
    """Attention to the prompt of each instance's clip."""
    attention = block.attn2
    shape = (*text.rows.shape[:2], HEADS, WIDTH // HEADS)
    k = attention.norm_k(attention.to_k(text.rows)).view(shape).transpose(1, 2)[clips]
    v = attention.to_v(text.rows).view(shape).transpose(1, 2)[clips]
    q = (
        attention.norm_q(attention.to_q(block.norm2(x)))
        .view(*x.shape[:2], HEADS, -1)
        .transpose(1, 2)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=text.bias[clips])
    made: Tensor = attention.to_out[0](mixed.transpose(1, 2).flatten(2))
    return made
