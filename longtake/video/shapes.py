"""Sizes of a causal Wan model, read from its configs: the arithmetic behind a plan.

No torch: the numbers follow from ``config.json`` of the transformer and the VAE alone
(``WanTransformer3DModel`` and ``AutoencoderKLWan`` of diffusers 0.42).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from longtake.errors import ModelError
from longtake.video.manifest import Manifest
from longtake.video.source import component_config

KERNEL = 27  # weights of a 3x3x3 convolution per channel pair
PLANE = 9  # of a 3x3 one


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """Dimensions of the transformer; counts are per sample of the batch."""

    layers: int
    heads: int
    head_dim: int
    ffn_dim: int
    in_channels: int
    out_channels: int
    text_dim: int
    freq_dim: int
    patch: tuple[int, int, int]

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Weights of all layers, biases included to within a fraction of a per cent."""
        dim = self.dim
        block = 8 * dim * dim + 2 * dim * self.ffn_dim + 22 * dim + self.ffn_dim
        patch = math.prod(self.patch)
        embed = (self.in_channels + self.out_channels) * patch * dim
        time = self.freq_dim * dim + dim * dim + 6 * dim * dim
        return self.layers * block + embed + time + self.text_dim * dim + dim * dim

    def forward_flops(self, query: int, keys: int, text: int) -> float:
        """Multiply-adds times two of one forward of ``query`` tokens over ``keys`` tokens."""
        return self.linear_flops(query) + self.attention_flops(query, keys, text)

    def linear_flops(self, query: int) -> float:
        """Matrix products of one forward: q, k, v, o, cross q and o, feed-forward, embeddings."""
        dim = self.dim
        block = 6 * dim * dim + 2 * dim * self.ffn_dim
        embed = (self.in_channels + self.out_channels) * math.prod(self.patch) * dim
        return 2.0 * query * (self.layers * block + embed)

    def attention_flops(self, query: int, keys: float, text: int) -> float:
        """Scores and weighted sums of self- and cross-attention of one forward."""
        return 4.0 * self.layers * query * (keys + text) * self.dim


@dataclass(frozen=True, slots=True)
class Conv:
    """One convolution of the VAE while a later latent frame passes through it.

    Attributes:
        inside, outside: channels.
        kernel: weights per channel pair.
        frames: frames it sees for one latent frame.
        area: positions per frame, as a multiple of the latent's.
        causal: True if it keeps two past frames of its input.
    """

    inside: int
    outside: int
    kernel: int
    frames: float
    area: float
    causal: bool

    @property
    def weights(self) -> int:
        """Weights and biases."""
        return self.inside * self.outside * self.kernel + self.outside

    @property
    def flops(self) -> float:
        """Multiply-adds times two per latent position."""
        return 2.0 * self.inside * self.outside * self.kernel * self.frames * self.area


@dataclass(frozen=True, slots=True)
class VaeShape:
    """Dimensions of ``AutoencoderKLWan``, as a list of its convolutions."""

    stride_time: int
    stride_space: int
    latent_channels: int
    encoder: tuple[Conv, ...]
    decoder: tuple[Conv, ...]

    @property
    def parameters(self) -> int:
        """Weights of encoder and decoder, norms and mid-block attention left out."""
        return sum(conv.weights for conv in (*self.encoder, *self.decoder))

    def decode_flops(self, positions: int) -> float:
        """Flops to decode one later latent frame of ``positions`` = h x w (convolutions only)."""
        return positions * sum(conv.flops for conv in self.decoder)

    def encode_flops(self, positions: int) -> float:
        """Flops to encode the pixel frames of one later latent frame."""
        return positions * sum(conv.flops for conv in self.encoder)

    def decode_state_bytes(self, positions: int, itemsize: int) -> int:
        """Feature state kept between latent frames: two input frames of each causal layer."""
        kept = sum(2 * conv.inside * conv.area for conv in self.decoder if conv.causal)
        return int(kept * positions * itemsize)

    def decode_work_bytes(self, positions: int, itemsize: int) -> int:
        """Largest activations alive at once: a layer's input, its padded copy and its output."""
        widest = max(c.frames * c.area * (2 * c.inside + 2 * c.outside) for c in self.decoder)
        return int(widest * positions * itemsize)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All sizes of a causal model."""

    transformer: TransformerShape
    vae: VaeShape
    text_parameters: int

    @property
    def size_multiple(self) -> tuple[int, int]:
        """Width and height must be multiples of these, in pixels."""
        _, high, wide = self.transformer.patch
        return self.vae.stride_space * wide, self.vae.stride_space * high

    def latent_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the latents of a video of ``size`` = (width, height)."""
        return size[1] // self.vae.stride_space, size[0] // self.vae.stride_space

    def frame_tokens(self, size: tuple[int, int]) -> int:
        """Tokens of one latent frame."""
        high, wide = self.latent_size(size)
        return (high // self.transformer.patch[1]) * (wide // self.transformer.patch[2])


def read_shape(manifest: Manifest) -> ModelShape:
    """Read the sizes of a manifest's transformer and VAE.

    Raises:
        ModelError: a config is missing, or of a class the hybrid engine does not run.
    """
    return shape_from_configs(
        component_config(manifest, "transformer"),
        component_config(manifest, "vae"),
        component_config(manifest, "text_encoder"),
        manifest.name,
    )


def shape_from_configs(
    transformer: Mapping[str, Any], vae: Mapping[str, Any], text: Mapping[str, Any], model: str
) -> ModelShape:
    """Sizes from the ``config.json`` of transformer, VAE and text encoder.

    Raises:
        ModelError: of another class, or a key is missing.
    """
    _expect_class(transformer, "WanTransformer3DModel", model)
    _expect_class(vae, "AutoencoderKLWan", model)
    try:
        return ModelShape(_transformer_shape(transformer), vae_shape(vae), _text_parameters(text))
    except KeyError as error:
        raise ModelError(f"model {model}: config lacks {error}") from error
    except (TypeError, IndexError, ValueError, AttributeError) as error:
        raise ModelError(f"model {model}: a config is not usable: {error}") from error


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A dimension from a config: a whole number above 0."""
    value = config[key] if default is None else config.get(key, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={value!r} is not a whole number above 0")
    return value


def _transformer_shape(config: Mapping[str, Any]) -> TransformerShape:
    patch = config["patch_size"]
    return TransformerShape(
        layers=_count(config, "num_layers"),
        heads=_count(config, "num_attention_heads"),
        head_dim=_count(config, "attention_head_dim"),
        ffn_dim=_count(config, "ffn_dim"),
        in_channels=_count(config, "in_channels"),
        out_channels=_count(config, "out_channels"),
        text_dim=_count(config, "text_dim"),
        freq_dim=_count(config, "freq_dim"),
        patch=(patch[0], patch[1], patch[2]),
    )


def vae_shape(config: Mapping[str, Any]) -> VaeShape:
    """Sizes of a VAE from its ``config.json``."""
    return VaeShape(
        stride_time=_count(config, "scale_factor_temporal", 4),
        stride_space=_count(config, "scale_factor_spatial", 8),
        latent_channels=_count(config, "z_dim"),
        encoder=tuple(_encoder_convs(config)),
        decoder=tuple(_decoder_convs(config)),
    )


def _text_parameters(config: Mapping[str, Any]) -> int:
    """Weights of a T5-type encoder with a gated feed-forward (UMT5)."""
    width, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    bias = config.get("relative_attention_num_buckets", 32) * config["num_heads"]
    layer = 4 * width * inner + 3 * width * config["d_ff"] + 2 * width + bias
    return int(config["vocab_size"] * width + config["num_layers"] * layer + width)


def _decoder_convs(config: Mapping[str, Any]) -> Iterator[Conv]:
    """Layers of ``WanDecoder3d`` in order."""
    mult, blocks = config["dim_mult"], config["num_res_blocks"] + 1
    base = config.get("decoder_base_dim") or config["base_dim"]
    dims = [base * m for m in (mult[-1], *reversed(mult))]
    upsample_time = list(reversed(config["temperal_downsample"]))
    residual = config.get("is_residual", False)
    z_dim, frames, area = config["z_dim"], 1.0, 1.0
    yield Conv(z_dim, z_dim, 1, 1.0, 1.0, causal=False)
    yield Conv(z_dim, dims[0], KERNEL, 1.0, 1.0, causal=True)
    yield from [Conv(dims[0], dims[0], KERNEL, 1.0, 1.0, causal=True)] * 4
    for level, (inside, outside) in enumerate(itertools.pairwise(dims)):
        # WanUpBlock halves the channels in its upsampler, so its later levels start from half
        inside = inside if residual or level == 0 else inside // 2
        yield from _resnets(inside, outside, blocks, frames, area)
        if level == len(mult) - 1:
            continue
        if upsample_time[level]:
            yield Conv(outside, 2 * outside, 3, frames, area, causal=True)
            frames *= 2
        area *= 4
        yield Conv(outside, outside if residual else outside // 2, PLANE, frames, area, False)
    yield Conv(dims[-1], config.get("out_channels", 3), KERNEL, frames, area, causal=True)


def _encoder_convs(config: Mapping[str, Any]) -> Iterator[Conv]:
    """Layers of ``WanEncoder3d`` in order; frames and area relative to one latent frame."""
    mult, blocks = config["dim_mult"], config["num_res_blocks"]
    dims = [config["base_dim"] * m for m in (1, *mult)]
    downsample_time = config["temperal_downsample"]
    frames = float(2 ** sum(downsample_time))
    area = float(4 ** (len(mult) - 1))
    yield Conv(config.get("in_channels", 3), dims[0], KERNEL, frames, area, causal=True)
    for level, (inside, outside) in enumerate(itertools.pairwise(dims)):
        yield from _resnets(inside, outside, blocks, frames, area)
        if level == len(mult) - 1:
            continue
        area /= 4
        yield Conv(outside, outside, PLANE, frames, area, causal=False)
        if downsample_time[level]:
            frames /= 2
            yield Conv(outside, outside, 3, frames, area, causal=True)
    yield from [Conv(dims[-1], dims[-1], KERNEL, 1.0, 1.0, causal=True)] * 4
    yield Conv(dims[-1], 2 * config["z_dim"], KERNEL, 1.0, 1.0, causal=True)
    yield Conv(2 * config["z_dim"], 2 * config["z_dim"], 1, 1.0, 1.0, causal=False)


def _resnets(inside: int, outside: int, count: int, frames: float, area: float) -> Iterator[Conv]:
    for _ in range(count):
        yield Conv(inside, outside, KERNEL, frames, area, causal=True)
        yield Conv(outside, outside, KERNEL, frames, area, causal=True)
        if inside != outside:
            yield Conv(inside, outside, 1, frames, area, causal=False)
        inside = outside


def _expect_class(config: Mapping[str, Any], expected: str, model: str) -> None:
    found = config.get("_class_name")
    if found != expected:
        raise ModelError(f"model {model}: got a {found}, hybrid mode runs {expected}")
