"""The linear transform that is papercut's encoder: PCA of blocks in space and of pairs in time.

One latent frame is a linear function of its own four pixel frames (the first: of its one frame,
read as a static pair), so latents of any moment of a clip need no warm-up. The same numbers are
written into the stock ``AutoencoderKLWan`` encoder by ``autoencoder.py``; computing them here as
three small matrix products is some fifty times faster than running that network.

Shapes: B clips, T frames, C channels, H height, W width; suffixes name the axes in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify
from torch import Tensor

LATENT_CHANNELS = 16
ENCODER_DIM = 32
STD_POWER = 0.6  # latents are divided by std**0.6: coarse channels stay larger than fine ones
_ROWS = 60_000


@dataclass(frozen=True, slots=True)
class Transform:
    """Projection matrices ``[out, in]`` of each stage, and the latents' statistics."""

    space1: Tensor
    change1: Tensor
    space2: Tensor
    change2: Tensor
    final: Tensor
    mean: Tensor
    std: Tensor

    def state(self) -> dict[str, Tensor]:
        """The tensors by name, for ``torch.save``."""
        return {name: getattr(self, name) for name in self.__slots__}

    def normalise(self, latents_BCTHW: Tensor) -> Tensor:
        """What the transformer works on."""
        shape = (1, -1, 1, 1, 1)
        return (latents_BCTHW - self.mean.view(shape)) / self.std.view(shape)

    def denormalise(self, latents_BCTHW: Tensor) -> Tensor:
        """Back to what the decoder works on."""
        shape = (1, -1, 1, 1, 1)
        return latents_BCTHW * self.std.view(shape) + self.mean.view(shape)


@dataclass(frozen=True, slots=True)
class Stages:
    """Every intermediate of an encoding, channels last: the decoder is fitted to them."""

    patches: Tensor
    frames1: Tensor
    pairs1: Tensor
    pairs2: Tensor
    latents: Tensor


def pixels(frames_BTCHW: Tensor) -> Tensor:
    """uint8 frames to ``[B, 3, T, H, W]`` in -1..1."""
    return (frames_BTCHW.float() / 127.5 - 1).transpose(1, 2).contiguous()


def blocks(features_BTHWC: Tensor) -> Tensor:
    """2x2 neighbours onto the channel axis, in the order of a convolution's weight."""
    B, T, H, W, C = features_BTHWC.shape
    split = features_BTHWC.view(B, T, H // 2, 2, W // 2, 2, C)
    return split.permute(0, 1, 2, 4, 6, 3, 5).reshape(B, T, H // 2, W // 2, 4 * C)


def principal(rows: Tensor, count: int) -> Tensor:
    """The leading ``count`` principal directions (about zero), as rows."""
    rows = rows.reshape(-1, rows.shape[-1])
    rows = rows[torch.randperm(len(rows))[:_ROWS]].double()
    vectors: Tensor = torch.linalg.eigh(rows.T @ rows / len(rows))[1]
    return vectors.flip(1)[:, :count].T.contiguous().float()


def pair_up(features: Tensor, change: Tensor, *, first: bool) -> Tensor:
    """Frames to pairs: average beside projected half difference; a first frame is a static pair."""
    start = 1 if first else 0
    earlier, later = features[:, start::2], features[:, start + 1 :: 2]
    pairs = torch.cat([(earlier + later) / 2, (later - earlier) / 2 @ change.T], -1)
    if not first:
        return pairs
    lone = features[:, :1]
    still = lone.new_zeros(*lone.shape[:-1], len(change))
    return torch.cat([torch.cat([lone, still], -1), pairs], 1)


def stages(transform: Transform, video_BCTHW: Tensor, *, first: bool = True) -> Stages:
    """Encode and keep the intermediates. ``first`` says whether frame 0 opens the video."""
    patches = patchify(video_BCTHW, 2).permute(0, 2, 3, 4, 1).contiguous()
    frames1 = blocks(patches) @ transform.space1.T
    pairs1 = pair_up(frames1, transform.change1, first=first)
    frames2 = blocks(pairs1.contiguous()) @ transform.space2.T
    pairs2 = pair_up(frames2, transform.change2, first=first)
    latents = (pairs2 @ transform.final.T).permute(0, 4, 1, 2, 3).contiguous()
    return Stages(patches, frames1, pairs1, pairs2, latents)


def encode(transform: Transform, video_BCTHW: Tensor, *, first: bool = True) -> Tensor:
    """Latents ``[B, 16, T', H/8, W/8]``, not normalised; one convolution does the first stage."""
    B, _, T = video_BCTHW.shape[:3]
    basis = torch.eye(48).view(48, 3, 1, 4, 4)
    kernel = (
        blocks(patchify(basis, 2).permute(0, 2, 3, 4, 1).contiguous()) @ transform.space1.T
    ).view(48, -1)
    images = video_BCTHW.transpose(1, 2).flatten(0, 1)
    features = F.conv2d(images, kernel.T.reshape(-1, 3, 4, 4), stride=4)
    frames1 = features.permute(0, 2, 3, 1).unflatten(0, (B, T))
    pairs1 = pair_up(frames1, transform.change1, first=first)
    frames2 = blocks(pairs1.contiguous()) @ transform.space2.T
    pairs2 = pair_up(frames2, transform.change2, first=first)
    return (pairs2 @ transform.final.T).permute(0, 4, 1, 2, 3).contiguous()


def fit(
    video_BCTHW: Tensor, *, channels: int = LATENT_CHANNELS, width: int = ENCODER_DIM
) -> Transform:
    """Fit all stages to whole clips (1 + 4k frames each), one after the other."""
    keep1, keep2 = width - width // 3, 2 * width - 2 * width // 3
    patches = patchify(video_BCTHW, 2).permute(0, 2, 3, 4, 1).contiguous()
    space1 = principal(blocks(patches), keep1)
    frames1 = blocks(patches) @ space1.T
    change1 = principal((frames1[:, 2::2] - frames1[:, 1::2]) / 2, width - keep1)
    pairs1 = pair_up(frames1, change1, first=True)
    space2 = principal(blocks(pairs1.contiguous()), keep2)
    frames2 = blocks(pairs1.contiguous()) @ space2.T
    change2 = principal((frames2[:, 2::2] - frames2[:, 1::2]) / 2, 2 * width - keep2)
    pairs2 = pair_up(frames2, change2, first=True)
    final = principal(pairs2, channels)
    latents = pairs2 @ final.T
    mean = latents.mean((0, 1, 2, 3))
    std = latents.std((0, 1, 2, 3)).pow(STD_POWER)
    unit = ((latents - mean) / std).pow(2).mean().sqrt()
    return Transform(space1, change1, space2, change2, final, mean, std * unit)


def ceiling_db(transform: Transform, video_BCTHW: Tensor) -> float:
    """PSNR if a perfect linear decoder undid the transform: the fit's own limit."""
    step = stages(transform, video_BCTHW)
    pairs2 = step.latents.permute(0, 2, 3, 4, 1) @ transform.final
    frames2 = _unpair(pairs2, transform.change2)
    pairs1 = _unblock(frames2 @ transform.space2)
    patches = _unblock(_unpair(pairs1, transform.change1) @ transform.space1)
    error = (patches - step.patches).pow(2).mean()
    return float(10 * torch.log10(4 / error))


def _unpair(pairs: Tensor, change: Tensor) -> Tensor:
    keep = pairs.shape[-1] - len(change)
    mean, half = pairs[:, 1:, ..., :keep], pairs[:, 1:, ..., keep:] @ change
    frames = torch.stack([mean - half, mean + half], 2).flatten(1, 2)
    return torch.cat([pairs[:, :1, ..., :keep], frames], 1)


def _unblock(features: Tensor) -> Tensor:
    B, T, H, W, C = features.shape
    split = features.view(B, T, H, W, C // 4, 2, 2)
    return split.permute(0, 1, 2, 5, 3, 6, 4).reshape(B, T, 2 * H, 2 * W, C // 4)
