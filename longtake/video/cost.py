"""What a plan will cost: tokens, flops, bytes and seconds, from sizes alone.

No torch: rates come from ``probe.py`` (measured once on a machine) or from the engine's store.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from longtake.schedulers.chunks import ChunkSpec
from longtake.video.attention_plan import AttentionPlan
from longtake.video.shapes import ModelShape

ITEM_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
KV_SIZES = {**ITEM_SIZES, "int8": 1}
ACTIVATION_COPIES = 6  # tensors of one block alive at once: stream, norm, q, k, v, output


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed of a device, in flops per second, at a model's own shapes.

    Attributes:
        linear: matrix products of the transformer.
        attention: scaled dot product attention.
        conv: the VAE's convolutions.
        device: where it was measured.
    """

    linear: float
    attention: float
    conv: float
    device: str


@dataclass(frozen=True, slots=True)
class Workload:
    """How much of the model one video runs.

    Attributes:
        size: width and height in pixels.
        steps: denoising forwards a chunk.
        passes: 2 with guidance, else 1.
        text_length: text tokens.
        window: latent frames in the cache at most, own chunk included.
        encoded: latent frames that are encoded from an input.
        itemsize: bytes of one weight or activation of transformer and text encoder.
        vae_itemsize: of the VAE.
        reading: what a query reads of the keys in reach; None for all of them.
        kv_cache: what the KV cache stores; None for what is computed.
        clean_passes: forwards a chunk that write the cache; 0 in clip mode.
    """

    size: tuple[int, int]
    steps: int
    passes: int
    text_length: int
    window: int
    encoded: int
    itemsize: int
    vae_itemsize: int
    clean_passes: int = 1
    reading: AttentionPlan | None = None
    kv_cache: str | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """Estimate for one video; ``seconds`` is empty without measured rates."""

    tokens_per_frame: int
    tokens_per_chunk: int
    tokens_in_window: int
    flops: dict[str, float]
    bytes: dict[str, int]
    seconds: dict[str, float]
    device: str | None

    def as_dict(self) -> dict[str, Any]:
        """JSON form, with totals."""
        data = asdict(self)
        data["flops"]["total"] = sum(self.flops.values())
        data["bytes"]["total"] = sum(self.bytes.values())
        if self.seconds:
            data["seconds"]["total"] = sum(self.seconds.values())
        return data


def estimate(
    shape: ModelShape, chunks: Iterable[ChunkSpec], work: Workload, rates: Rates | None
) -> Cost:
    """Add up a video's chunks.

    Args:
        shape: the model's sizes.
        chunks: the video's chunks in order.
        work: size, steps and passes.
        rates: measured speed, or None to leave the time out.
    """
    tokens = shape.frame_tokens(work.size)
    linear = {"denoise": 0.0, "clean": 0.0}
    attention = {"denoise": 0.0, "clean": 0.0}
    decoded = widest = longest = 0
    for spec in chunks:
        query, keys = spec.frames * tokens, (len(spec.past) + spec.frames) * tokens
        widest, longest, decoded = max(widest, query), max(longest, keys), decoded + spec.keep
        repeats = {"denoise": 0 if spec.given else work.steps, "clean": work.clean_passes}
        for stage, times in repeats.items():
            linear[stage] += times * work.passes * shape.transformer.linear_flops(query)
            attention[stage] += work.passes * _attention_flops(shape, spec, work, stage, times)
    high, wide = shape.latent_size(work.size)
    conv = {
        "decode": decoded * shape.vae.decode_flops(high * wide),
        "encode": work.encoded * shape.vae.encode_flops(high * wide),
    }
    flops = {stage: linear[stage] + attention[stage] for stage in linear} | conv
    seconds: dict[str, float] = {}
    if rates is not None:
        seconds = {s: linear[s] / rates.linear + attention[s] / rates.attention for s in linear}
        seconds |= {stage: value / rates.conv for stage, value in conv.items()}
    return Cost(
        tokens_per_frame=tokens,
        tokens_per_chunk=widest,
        tokens_in_window=longest,
        flops=flops,
        bytes=_bytes(shape, work, widest, high * wide),
        seconds=seconds,
        device=rates.device if rates else None,
    )


def _attention_flops(
    shape: ModelShape, spec: ChunkSpec, work: Workload, stage: str, times: int
) -> float:
    """Attention of ``times`` forwards of a chunk, by what each of them reads."""
    tokens, past = shape.frame_tokens(work.size), len(spec.past)
    query, layers = spec.frames * tokens, shape.transformer.layers

    def flops(frames: float) -> float:
        return shape.transformer.attention_flops(query, frames * tokens, work.text_length)

    if work.reading is None:
        return times * flops(past + spec.frames)
    steps = list(range(times)) if stage == "denoise" else [None] * times
    read = (work.reading.frames_read(past, spec.frames, layers, step) for step in steps)
    return sum(flops(frames) for frames in read)


def _cache_bytes(shape: ModelShape, work: Workload) -> int:
    """Past keys and values: three buffers a layer (un-roped keys, roped keys, values).

    Where less is stored than is computed there are two a layer, and two of the computing dtype for
    one layer at a time; int8 has a float32 scale for each frame and channel of both.
    """
    row = shape.transformer.dim * work.passes
    tokens, layers = work.window * shape.frame_tokens(work.size), shape.transformer.layers
    if work.kv_cache is None:
        return 3 * layers * row * tokens * work.itemsize
    stored = 2 * layers * row * tokens * KV_SIZES[work.kv_cache]
    scales = 2 * layers * row * work.window * 4 if work.kv_cache == "int8" else 0
    return stored + scales + 2 * row * tokens * work.itemsize


def _bytes(shape: ModelShape, work: Workload, query: int, positions: int) -> dict[str, int]:
    transformer, item, vae_item = shape.transformer, work.itemsize, work.vae_itemsize
    slot = transformer.layers * transformer.dim * work.passes * item
    cache = _cache_bytes(shape, work)
    text = 2 * slot * work.text_length
    stream = ACTIVATION_COPIES * transformer.dim + transformer.ffn_dim
    return {
        "transformer": transformer.parameters * item,
        "text_encoder": shape.text_parameters * item,
        "vae": shape.vae.parameters * vae_item,
        "kv_cache": cache + text,
        "activations": query * stream * work.passes * item,
        "vae_state": shape.vae.decode_state_bytes(positions, vae_item),
        "vae_decode": shape.vae.decode_work_bytes(positions, vae_item),
    }
