"""Random models of a given shape, made on the device; their weights never touch a disk.

The transformer and the VAE are diffusers' own classes behind the engine's own ``CausalModel``; only
the text encoder is left out: embeddings are random numbers. Speed does not depend on weights.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import nn

from longtake.video.causal_wan import CausalWan
from longtake.video.components import CausalModel
from longtake.video.manifest import COMPONENTS, ComponentRef, Manifest, Schedule
from longtake.video.numerics import torch_dtype
from longtake.video.shapes import ModelShape, read_shape
from longtake.video.stacked_conv import prepare_vae

SEED = 0
# what a plan reads of a text encoder; UMT5-XXL's sizes, though none is loaded
TEXT_CONFIG = {
    "d_model": 4096,
    "num_heads": 64,
    "d_kv": 64,
    "d_ff": 10240,
    "vocab_size": 256384,
    "num_layers": 24,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's shape and the video it makes; what is not named is diffusers' default."""

    name: str
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    size: tuple[int, int]
    text_tokens: int


WAN_1_3B = Sizes(
    name="Wan2.1-1.3B",
    transformer={
        "patch_size": (1, 2, 2),
        "num_attention_heads": 12,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 8960,
        "num_layers": 30,
    },
    vae={},
    size=(832, 480),
    text_tokens=512,
)
TINY = Sizes(
    name="tiny",
    transformer={
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 128,
        "num_layers": 4,
    },
    vae={
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 1, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
        "scale_factor_spatial": 4,
        "scale_factor_temporal": 4,
    },
    size=(64, 32),
    text_tokens=16,
)


class RandomTextModel(CausalModel):
    """A model whose prompts are random embeddings of full length."""

    def embed(self, prompt: str) -> torch.Tensor:
        """Random numbers [tokens, text_dim], the same for every prompt."""
        del prompt
        return _embedding(self.manifest.text_length, self.shape.transformer.text_dim)


class RandomParts:
    """Weights made once on the device; models over them are made on demand.

    Args:
        sizes: the shape.
        device: where the weights are made and stay.
        dtype: bf16, fp16 or fp32; modules that diffusers keeps in fp32 stay so.
    """

    def __init__(self, sizes: Sizes, device: torch.device, dtype: str) -> None:
        self._sizes = sizes
        self._device = device
        self._dtype = dtype
        transformer = self._empty_transformer()
        with init_empty_weights(include_buffers=False):
            vae: AutoencoderKLWan = AutoencoderKLWan(**sizes.vae)
        self._weights = _random_weights(transformer, device, torch_dtype(dtype))
        vae_weights = _random_weights(vae, device, torch_dtype(dtype))
        vae.load_state_dict(vae_weights, strict=True, assign=True)
        self.vae = vae.to(device).eval().requires_grad_(False)
        self.manifest = _manifest(sizes)
        self.shape = _shape(self.manifest, transformer, vae)

    def model(self, backend: str) -> CausalModel:
        """A model over the shared weights, its modules its own.

        Raises:
            BackendError: the attention backend is not there.
        """
        transformer = self._empty_transformer()
        transformer.load_state_dict(self._weights, strict=True, assign=True)
        return RandomTextModel(
            manifest=self.manifest,
            shape=self.shape,
            wan=CausalWan(transformer.to(self._device), backend),
            vae=self.vae,
            vae_form=prepare_vae(self.vae),
            text_encoder=nn.Identity(),
            tokenizer=None,
            dtype=self._dtype,
            hashes={},
        )

    def _empty_transformer(self) -> WanTransformer3DModel:
        """Modules without weights; the rope's tables are real."""
        with init_empty_weights(include_buffers=False):
            transformer: WanTransformer3DModel = WanTransformer3DModel(**self._sizes.transformer)
        return transformer


@lru_cache(maxsize=1)
def _embedding(tokens: int, width: int) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(SEED))


def _random_weights(
    module: nn.Module, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Values for every entry of the state dictionary that keep activations of order one."""
    kept = getattr(module, "_keep_in_fp32_modules", None) or ()
    draw = torch.Generator(device).manual_seed(SEED)
    weights: dict[str, torch.Tensor] = {}
    for name, entry in module.state_dict().items():
        precise = any(part in name.split(".") for part in kept)
        kind = torch.float32 if precise else dtype
        weight = torch.empty(entry.shape, device=device, dtype=kind)
        if name.endswith("bias"):
            weight.zero_()
        elif "norm" in name:
            weight.fill_(1.0)
        else:
            fan_in = weight[0].numel()
            weight.normal_(0.0, 1.0 / math.sqrt(fan_in), generator=draw)
        weights[name] = weight
    return weights


def _manifest(sizes: Sizes) -> Manifest:
    """Self-Forcing's schedule with LongLive's window and sink."""
    return Manifest(
        name=f"random {sizes.name}",
        components={name: ComponentRef(".", name) for name in COMPONENTS},
        schedule=Schedule("lcm", steps=4, shift=5.0, timesteps=(1000.0, 750.0, 500.0, 250.0)),
        chunk=3,
        window=12,
        sink=3,
        size=sizes.size,
        fps=16.0,
        num_frames=81,
        text_length=sizes.text_tokens,
    )


def _shape(
    manifest: Manifest, transformer: WanTransformer3DModel, vae: AutoencoderKLWan
) -> ModelShape:
    """Sizes as the engine reads them, from configs in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        transformer.save_config(folder / "transformer")
        vae.save_config(folder / "vae")
        (folder / "text_encoder").mkdir()
        (folder / "text_encoder" / "config.json").write_text(json.dumps(TEXT_CONFIG))
        return read_shape(replace(manifest, folder=folder))
