"""Streaming encode and decode of diffusers' ``AutoencoderKLWan``, and pixels to bytes.

The VAE's causal convolutions carry two past frames each. diffusers keeps them on the module and
drops them after each call; here they belong to the stream, so several streams can share one VAE
and plain ``vae.encode`` / ``vae.decode`` calls may come in between.

Every convolution sees one latent frame's worth at a time, so how a stream is cut into chunks never
shows in its bits. One whole ``vae.decode`` call is bit-equal too under the stacked form. Under
conv3d it is so wherever torch's 1x1x1 convolution gives a frame the same bits alone as among
others, which on a CPU fails for some frame sizes and thread counts (by 1e-6): there diffusers' own
result changes with the length of the video.

A call that raises leaves its stream where it was: an out-of-memory error costs only the decode.

Latents here are normalised, as the transformer sees them: ``z = latents * std + mean``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanCausalConv3d,
    patchify,
    unpatchify,
)
from torch import Tensor, nn

from longtake.errors import ModelError, RequestError, StateError

# diffusers' Wan encoder takes groups of this many frames, whatever the config says.
GROUP_FRAMES = 4

# One entry a causal convolution: nothing yet, diffusers' "Rep" mark of an upsampler that has seen
# one frame, or the past frames. Entries are replaced, never changed, so a shallow copy is a state.
Feature = Tensor | str | None


@dataclass(frozen=True, slots=True)
class DecoderState:
    """A decoder's place in its stream, as ``StreamingDecoder.snapshot`` took it."""

    features: tuple[Feature, ...]
    first: bool

    @property
    def nbytes(self) -> int:
        """Memory that the state keeps alive."""
        return sum(f.nbytes for f in self.features if isinstance(f, Tensor))


class StreamingDecoder:
    """Decodes a stream of latents chunk by chunk, with the bits of decoding them all at once."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        _refuse_tiling(vae)
        self._vae = vae
        self.reset()

    def reset(self) -> None:
        """Start a new stream."""
        self._features = _no_features(self._vae.decoder)
        self._first = True

    def snapshot(self) -> DecoderState:
        """The state before the next chunk: a shallow copy, cheap to take and to keep."""
        return DecoderState(tuple(self._features), self._first)

    def restore(self, state: DecoderState) -> None:
        """Go back to a snapshot, also one of another decoder over the same kind of VAE."""
        if len(state.features) != len(self._features):
            raise StateError(
                f"the snapshot is of another VAE: {len(state.features)} convolutions, "
                f"this one has {len(self._features)}"
            )
        self._features = list(state.features)
        self._first = state.first

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, f, h, w] to frames [B, 3, t, H, W] in [-1, 1], in the VAE's dtype.

        The first latent frame of a stream gives one frame, each later one four.
        """
        vae = self._vae
        _refuse_tiling(vae)
        _check_shape("latents", latents, channels=vae.config.z_dim)
        features, first = list(self._features), self._first
        with torch.no_grad():
            parts = []
            for z in torch.split(denormalise(vae, latents), 1, dim=2):
                frame = vae.post_quant_conv(z)
                parts.append(
                    vae.decoder(frame, feat_cache=features, feat_idx=[0], first_chunk=first)
                )
                first = False
            frames = torch.cat(parts, dim=2)
            if vae.config.patch_size is not None:
                frames = unpatchify(frames, patch_size=vae.config.patch_size)
            frames = frames.clamp(min=-1.0, max=1.0)
        self._features, self._first = features, first
        return frames


class StreamingEncoder:
    """Encodes a stream of frames chunk by chunk, with the bits of encoding them all at once.

    Deterministic: the posterior's mode, never a sample.
    """

    def __init__(self, vae: AutoencoderKLWan) -> None:
        _refuse_tiling(vae)
        factor = 2 ** sum(vae.config.temperal_downsample)
        if factor != GROUP_FRAMES:
            raise ModelError(
                f"vae: {factor} frames a latent frame; diffusers encodes Wan VAEs of {GROUP_FRAMES}"
            )
        self._vae = vae
        self.reset()

    def reset(self) -> None:
        """Start a new stream."""
        self._features = _no_features(self._vae.encoder)
        self._first = True

    def encode(self, frames: Tensor) -> Tensor:
        """Frames [B, 3, t, H, W] in [-1, 1] to fp32 normalised latents [B, C, f, h, w].

        A stream's first call takes 1 + 4k frames, each later one 4k.
        """
        vae = self._vae
        _refuse_tiling(vae)
        _check_shape("frames", frames, channels=3)
        _check_count(frames.shape[2], first=self._first)
        _check_size(vae, frames.shape[3], frames.shape[4])
        features = list(self._features)
        with torch.no_grad():
            x = frames.to(vae.device, vae.dtype)
            if vae.config.patch_size is not None:
                x = patchify(x, patch_size=vae.config.patch_size)
            lead = x.shape[2] % GROUP_FRAMES
            sizes = [lead] * bool(lead) + [GROUP_FRAMES] * (x.shape[2] // GROUP_FRAMES)
            parts = [
                vae.quant_conv(vae.encoder(group, feat_cache=features, feat_idx=[0]))
                for group in torch.split(x, sizes, dim=2)
            ]
            mode, _ = torch.cat(parts, dim=2).chunk(2, dim=1)
            latents = normalise(vae, mode)
        self._features, self._first = features, False
        return latents


def normalise(vae: AutoencoderKLWan, z: Tensor) -> Tensor:
    """What the VAE calls latents, as the transformer wants them: ``(z - mean) / std``, in fp32."""
    mean, std = _scale(vae, z.device)
    return (z.float() - mean) / std


def denormalise(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """``latents * std + mean``, in fp32, then cast to the VAE's device and dtype."""
    mean, std = _scale(vae, vae.device)
    return (latents.to(vae.device, torch.float32) * std + mean).to(vae.dtype)


def to_uint8(frames: Tensor) -> Tensor:
    """Frames [B, 3, t, H, W] in [-1, 1] to bytes [B, t, H, W, 3] on the CPU, half to even."""
    scaled = ((frames.float() + 1.0) * 127.5).round().clamp(0.0, 255.0)
    return scaled.to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous().cpu()


def from_uint8(pixels: Tensor) -> Tensor:
    """Bytes [B, t, H, W, 3] to fp32 frames [B, 3, t, H, W] in [-1, 1]: inverse of ``to_uint8``."""
    if pixels.dtype != torch.uint8:
        raise RequestError("pixels", pixels.dtype, "frames as bytes are expected", "torch.uint8")
    return pixels.permute(0, 4, 1, 2, 3).contiguous().float() / 127.5 - 1.0


def _no_features(network: nn.Module) -> list[Feature]:
    return [None for m in network.modules() if isinstance(m, WanCausalConv3d)]


def _scale(vae: AutoencoderKLWan, device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std


def _refuse_tiling(vae: AutoencoderKLWan) -> None:
    if vae.use_tiling:
        raise ModelError(
            "vae: tiling is on, and tiles of one frame cannot share a stream's state; "
            "call vae.disable_tiling()"
        )


def _check_shape(field: str, x: Tensor, *, channels: int) -> None:
    if x.ndim != 5 or x.shape[1] != channels or x.shape[2] < 1:
        raise RequestError(
            field, tuple(x.shape), "wrong shape", f"[batch, {channels}, 1 or more, height, width]"
        )


def _check_count(count: int, *, first: bool) -> None:
    """A group that is not whole would be dropped by diffusers, silently."""
    lead = 1 if first else 0
    over = (count - lead) % GROUP_FRAMES
    if not over:
        return
    below, above = count - over, count - over + GROUP_FRAMES
    near = f"nearest {below} or {above}" if below > 0 else f"nearest {above}"
    rule = "the first chunk of a stream has 1+4k frames" if first else "later chunks have 4k frames"
    raise RequestError("num_frames", count, rule, near)


def _check_size(vae: AutoencoderKLWan, height: int, width: int) -> None:
    step = 2 ** (len(vae.config.dim_mult) - 1) * (vae.config.patch_size or 1)
    if height % step or width % step:
        raise RequestError(
            "size", f"{width}x{height}", "the VAE cannot encode it", f"multiples of {step}"
        )
