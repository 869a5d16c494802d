"""Roll out many prompts at once with the engine's own transformer wrapper and KV cache.

The same steps as ``longtake.video.rollout`` (denoise, clean pass, next chunk), batched over
prompts so that an evaluation of hundreds of clips is affordable on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from longtake.video.causal_wan import CausalWan, Session
from training.papercut.batches import CONTEXT_NOISE
from training.papercut.causal import CHUNK, SINK, WINDOW, make_transformer
from training.papercut.data import HEIGHT, WIDTH, FrameArray
from training.papercut.text import TEXT_LENGTH, make_encoder, make_tokenizer
from training.papercut.transform import LATENT_CHANNELS

LATENT_SIZE = (HEIGHT // 8, WIDTH // 8)


@dataclass(frozen=True, slots=True)
class Settings:
    """How chunks are sampled."""

    steps: int = 4
    shift: float = 3.0
    guidance: float = 1.0
    context_noise: float = CONTEXT_NOISE
    context_noise_added: bool = True

    @property
    def sigmas(self) -> list[float]:
        """Noise levels from one to zero."""
        line = torch.linspace(1, 0, self.steps + 1).double()
        return [float(s) for s in self.shift * line / (1 + (self.shift - 1) * line)]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Loaded parts, in fp32."""

    wan: CausalWan
    encoder: UMT5EncoderModel
    tokenizer: PreTrainedTokenizerFast
    vae: AutoencoderKLWan


def load_checkpoint(folder: Path, name: str = "transformer.pt") -> Sampler:
    """The averaged weights of a training folder, with its autoencoder."""
    weights = torch.load(folder / name, map_location="cpu")
    tokenizer = make_tokenizer()
    encoder, transformer = make_encoder(len(tokenizer)), make_transformer()
    encoder.load_state_dict(weights["encoder"])
    transformer.load_state_dict(weights["model"])
    trained = folder / "vae"
    vae = AutoencoderKLWan.from_pretrained(trained if trained.exists() else folder / "vae-init")
    return Sampler(CausalWan(transformer), encoder.eval(), tokenizer, vae.eval())


@torch.inference_mode()
def embed(sampler: Sampler, prompts: list[str]) -> list[Tensor]:
    """Unpadded text embeddings."""
    made = []
    for prompt in prompts:
        tokens = sampler.tokenizer(prompt, return_tensors="pt")
        made.append(sampler.encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state[0])
    return made


@torch.inference_mode()
def rollout(
    sampler: Sampler, prompts: list[str], seed: int, chunks: int, settings: Settings
) -> Iterator[Tensor]:
    """Normalised latents ``[B, C, T, H, W]`` of one chunk after the other."""
    guided = settings.guidance != 1
    texts = embed(sampler, prompts + ([""] * len(prompts) if guided else []))
    session = Session(
        sampler.wan.new_cache(len(texts), WINDOW, LATENT_SIZE),
        sampler.wan.encode_text(texts, TEXT_LENGTH),
    )
    noise = torch.Generator().manual_seed(seed)
    shape = (len(prompts), LATENT_CHANNELS, CHUNK, *LATENT_SIZE)
    sigmas = settings.sigmas

    def velocity(x: Tensor, sigma: float) -> Tensor:
        if not guided:
            return sampler.wan.forward(session, x, sigma)
        prompted, unprompted = sampler.wan.forward(session, torch.cat([x, x]), sigma).chunk(2)
        return unprompted + settings.guidance * (prompted - unprompted)

    for index in range(chunks):
        own = range(index * CHUNK, (index + 1) * CHUNK)
        recent = range(max(SINK, own[0] - (WINDOW - SINK - CHUNK)), own[0])
        session.cache.begin([*range(min(SINK, own[0])), *recent], own)
        x = torch.randn(shape, generator=noise)
        for now, after in pairwise(sigmas):
            x = x + (after - now) * velocity(x, now)
        yield x
        level = settings.context_noise if settings.context_noise_added else 0.0
        kept = (1 - level) * x + level * torch.randn(shape, generator=noise)
        session.cache.recording = True
        sampler.wan.forward(
            session, torch.cat([kept, kept]) if guided else kept, settings.context_noise
        )
        session.cache.recording = False


class Decoder:
    """Streaming decode of a batch of videos, one chunk after the other."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self.vae, self.first = vae, True
        shape = (1, -1, 1, 1, 1)
        self.mean = torch.tensor(vae.config.latents_mean).view(shape)
        self.std = torch.tensor(vae.config.latents_std).view(shape)
        vae.clear_cache()

    @torch.inference_mode()
    def frames(self, latents_BCTHW: Tensor) -> FrameArray:
        """uint8 ``[B, T, 3, H, W]``."""
        hidden = self.vae.post_quant_conv(latents_BCTHW * self.std + self.mean)
        parts = []
        for index in range(hidden.shape[2]):
            self.vae._conv_idx = [0]
            state = {
                "feat_cache": self.vae._feat_map,
                "feat_idx": self.vae._conv_idx,
                "first_chunk": self.first,
            }
            parts.append(self.vae.decoder(hidden[:, :, index : index + 1], **state))
            self.first = False
        pixels = unpatchify(torch.cat(parts, 2), self.vae.config.patch_size).clamp(-1, 1)
        shown = ((pixels + 1) * 127.5).round().to(torch.uint8)
        made: FrameArray = np.ascontiguousarray(shown.transpose(1, 2).numpy())
        return made
