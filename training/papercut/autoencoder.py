"""Papercut's VAE: the linear transform and a least-squares decoder, written into AutoencoderKLWan.

The encoder is exact up to a few per cent and stays frozen; the decoder starts from regression onto
the true finer features of each stage and is fine-tuned by ``train_vae``. The method is that of the
prototype study (README, "VAE"); training this network from random weights on a CPU goes nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanCausalConv3d,
    WanResample,
    WanResidualBlock,
    unpatchify,
)
from torch import Tensor, nn

from training.papercut.transform import Stages, Transform, principal, stages

DECODER_DIM = 24
# A constant channel makes RMS norms nearly linear around it: its size and the gain beside it.
_ENCODER_CONSTANT, _ENCODER_GAIN = 1000.0, 0.003
_DECODER_CONSTANT, _DECODER_GAIN = 8.0, 0.5
_FIT_ROWS = 60_000


def configuration(transform: Transform) -> dict[str, Any]:
    """The stock class's arguments for this transform."""
    width = sum(len(part) for part in (transform.space1, transform.change1))
    channels = len(transform.final)
    return {
        "base_dim": width,
        "decoder_base_dim": DECODER_DIM,
        "z_dim": channels,
        "dim_mult": [1, 2, 4],
        "num_res_blocks": 1,
        "attn_scales": [],
        "temperal_downsample": [True, True],
        "is_residual": False,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_temporal": 4,
        "scale_factor_spatial": 8,
        "latents_mean": [round(value, 5) for value in transform.mean.tolist()],
        "latents_std": [round(value, 5) for value in transform.std.tolist()],
    }


@torch.no_grad()
def build(transform: Transform, video_BCTHW: Tensor) -> AutoencoderKLWan:
    """A working autoencoder without training; ``video_BCTHW`` is what the decoder is fitted on."""
    model = AutoencoderKLWan(**configuration(transform))
    _quiet(model)
    _write_encoder(model, transform)
    _write_decoder(model, transform, stages(transform, video_BCTHW))
    return model


def _quiet(model: AutoencoderKLWan) -> None:
    """Residual branches and taps on the past start at zero, shortcuts as the identity."""
    for part in model.modules():
        if isinstance(part, WanCausalConv3d) and part.kernel_size == (3, 3, 3):
            part.weight[:, :, :2] = 0
            part.weight.mul_(1.7)
        if isinstance(part, WanResidualBlock):
            _zero(part.conv2)
            if not isinstance(part.conv_shortcut, nn.Identity):
                _zero(part.conv_shortcut)
                _write(part.conv_shortcut, torch.eye(min(part.conv_shortcut.weight.shape[:2])))
    for block in (model.encoder.mid_block, model.decoder.mid_block):
        for attention in block.attentions:
            _zero(attention.proj)


def _zero(convolution: Any) -> None:
    for tensor in convolution.parameters():
        tensor.zero_()


def _write(
    convolution: nn.Conv3d, matrix: Tensor, *, tap: int = 0, row: int = 0, column: int = 0
) -> None:
    """Put a matrix into a convolution's centre, at one temporal tap."""
    height, width = convolution.kernel_size[1] // 2, convolution.kernel_size[2] // 2
    rows, columns = slice(row, row + matrix.shape[0]), slice(column, column + matrix.shape[1])
    convolution.weight[rows, columns, tap, height, width] = matrix


def _write_encoder(model: AutoencoderKLWan, transform: Transform) -> None:
    encoder = model.encoder
    width = encoder.conv_in.out_channels
    shrink1, shrink2 = (part for part in encoder.down_blocks if isinstance(part, WanResample))
    last = [part for part in encoder.down_blocks if isinstance(part, WanResidualBlock)][-1]
    for part in (encoder.conv_in, encoder.conv_out, model.quant_conv):
        _zero(part)
    _write(encoder.conv_in, torch.eye(12), tap=2)
    levels = (
        (shrink1, transform.space1, transform.change1, 12),
        (shrink2, transform.space2, transform.change2, width),
    )
    for part, space, change, inputs in levels:
        _zero(part.resample[1])
        part.resample[1].weight[: len(space), :inputs, :2, :2] = space.view(
            len(space), inputs, 2, 2
        )
        _zero(part.time_conv)
        keep = torch.eye(len(space))
        for tap, sign in ((1, -0.5), (2, 0.5)):
            _write(part.time_conv, 0.5 * keep, tap=tap)
            _write(part.time_conv, sign * change, tap=tap, row=len(space))
    last.conv_shortcut.bias[4 * width - 1] = _ENCODER_CONSTANT
    gain = _ENCODER_GAIN * _ENCODER_CONSTANT / (4 * width) ** 0.5
    encoder.norm_out.gamma.zero_()
    encoder.norm_out.gamma[: 2 * width] = gain
    _write(encoder.conv_out, transform.final * 2 / _ENCODER_GAIN, tap=2)
    channels = len(transform.final)
    _write(model.quant_conv, torch.eye(channels))
    model.quant_conv.bias[channels:] = -8.0


def _ridge(inputs: Tensor, targets: Tensor, strength: float) -> Tensor:
    picks = torch.randperm(len(inputs))[:_FIT_ROWS]
    left, right = inputs[picks], targets[picks]
    gram = left.T @ left
    gram += strength * gram.diagonal().mean() * torch.eye(len(gram))
    solved: Tensor = torch.linalg.solve(gram, left.T @ right)
    return solved


def _neighbourhoods(images_NCHW: Tensor) -> Tensor:
    """Rows of 3x3 neighbourhoods and a one for the bias: regression onto a convolution."""
    rows = F.unfold(images_NCHW, 3, padding=1).transpose(1, 2).reshape(-1, images_NCHW.shape[1] * 9)
    return torch.cat([rows, torch.ones(len(rows), 1)], 1)


def _fit_upsample(
    convolution: Any, source_BTHWC: Tensor, target_BTHWC: Tensor, clips: int
) -> Tensor:
    """Regress ``nearest x2 then 3x3`` onto finer features; returns what it makes, channels last."""
    coarse = source_BTHWC.flatten(0, 1).permute(0, 3, 1, 2)
    picks = torch.randperm(len(coarse))[:clips]
    large = F.interpolate(coarse, scale_factor=2, mode="nearest-exact")
    targets = target_BTHWC.flatten(0, 1)[picks].reshape(-1, target_BTHWC.shape[-1])
    fitted = _ridge(_neighbourhoods(large[picks]), targets, 1e-4)
    inputs, outputs = coarse.shape[1], targets.shape[1]
    _zero(convolution)
    convolution.weight[:outputs, :inputs] = fitted[:-1].T.reshape(outputs, inputs, 3, 3)
    convolution.bias[:outputs] = fitted[-1]
    made = F.conv2d(
        large, convolution.weight[:outputs, :inputs], convolution.bias[:outputs], padding=1
    )
    return made.permute(0, 2, 3, 1).view(*source_BTHWC.shape[:2], *made.shape[2:], outputs)


def _write_decoder(model: AutoencoderKLWan, transform: Transform, step: Stages) -> None:
    decoder, width = model.decoder, DECODER_DIM
    grow1, grow2 = (decoder.up_blocks[index].upsamplers[0] for index in (0, 1))
    channels, keep2 = len(transform.final), len(transform.space2)
    for part in (model.post_quant_conv, decoder.conv_in, grow1.time_conv, grow2.time_conv):
        _zero(part)
    _write(model.post_quant_conv, torch.eye(channels))
    _write(decoder.conv_in, transform.final.T, tap=2)
    for half, sign in ((0, -1), (4 * width, 1)):
        _write(grow1.time_conv, torch.eye(keep2), tap=2, row=half)
        _write(grow1.time_conv, sign * transform.change2.T, tap=2, row=half, column=keep2)
    pairs = step.latents.permute(0, 2, 3, 4, 1) @ transform.final
    change = pairs[:, 1:, ..., keep2:] @ transform.change2
    mean = pairs[:, 1:, ..., :keep2]
    halves = torch.stack([mean - change, mean + change], 2).flatten(1, 2)
    frames2 = torch.cat([pairs[:, :1, ..., :keep2], halves], 1)
    middle = min(step.pairs1.shape[-1], 2 * width)
    basis = principal(step.pairs1, middle)
    made1 = _fit_upsample(grow1.resample[1], frames2, step.pairs1 @ basis.T, 300)
    frames1 = _fit_pairs(grow2.time_conv, made1, step.frames1, basis)
    made0 = _fit_upsample(grow2.resample[1], frames1, step.patches, 100)
    _write_head(decoder, grow2.resample[1], made0, step.patches)


def _fit_pairs(convolution: nn.Conv3d, pairs: Tensor, frames1: Tensor, basis: Tensor) -> Tensor:
    """Regress each half of a pair onto its frame in the format of a static pair."""
    half_width, middle = convolution.out_channels // 2, len(basis)
    static = frames1 @ basis[:, : frames1.shape[-1]].T
    source = pairs[:, 1:].reshape(-1, middle)
    halves = []
    for half in (0, 1):
        fitted = _ridge(source, static[:, 1 + half :: 2].reshape(-1, middle), 1e-4)
        _write(convolution, fitted.T, tap=2, row=half * half_width)
        halves.append(pairs[:, 1:] @ fitted)
    return torch.cat([pairs[:, :1], torch.stack(halves, 2).flatten(1, 2)], 1)


def _write_head(decoder: Any, last: Any, made: Tensor, patches: Tensor) -> None:
    """A constant channel steadies the norms; spare channels are random; the output is regressed."""
    width = DECODER_DIM
    last.weight[width - 1] = 0
    last.bias[width - 1] = _DECODER_CONSTANT
    spare = last.weight[12 : width - 1]
    spare.copy_(torch.randn_like(spare) * 0.02 / made.shape[-1] ** 0.5)
    for block in decoder.up_blocks[2].resnets:
        block.norm1.gamma.fill_(_DECODER_CONSTANT / width**0.5)
        block.norm1.gamma[width - 1] = 0.3
    decoder.norm_out.gamma.fill_(_DECODER_GAIN * _DECODER_CONSTANT / width**0.5)
    decoder.norm_out.gamma[width - 1] = 0.3
    images = made.flatten(0, 1).permute(0, 3, 1, 2)
    picks = torch.randperm(len(images))[:60]
    full = images.new_zeros(len(picks), width, *images.shape[2:])
    full[:, :12] = images[picks]
    full[:, width - 1] = _DECODER_CONSTANT
    head = F.silu(
        F.normalize(full, dim=1) * width**0.5 * decoder.norm_out.gamma.view(1, width, 1, 1)
    )
    fitted = _ridge(_neighbourhoods(head), patches.flatten(0, 1)[picks].reshape(-1, 12), 1e-5)
    _zero(decoder.conv_out)
    decoder.conv_out.weight[:, :, 2] = fitted[:-1].T.reshape(12, width, 3, 3)
    decoder.conv_out.bias.copy_(fitted[-1])


def decode(model: AutoencoderKLWan, latents_BCTHW: Tensor) -> Tensor:
    """Decode a whole clip with gradients and without the stock clamp (which kills them)."""
    model.clear_cache()
    hidden = model.post_quant_conv(latents_BCTHW)
    parts = []
    for index in range(hidden.shape[2]):
        model._conv_idx = [0]
        state = {
            "feat_cache": model._feat_map,
            "feat_idx": model._conv_idx,
            "first_chunk": index == 0,
        }
        parts.append(model.decoder(hidden[:, :, index : index + 1], **state))
    model.clear_cache()
    video: Tensor = unpatchify(torch.cat(parts, 2), model.config.patch_size)
    return video


def decode_images(model: AutoencoderKLWan, latents_BCHW: Tensor) -> Tensor:
    """Decode first frames alone."""
    hidden = model.post_quant_conv(latents_BCHW.unsqueeze(2))
    made = model.decoder(hidden, first_chunk=True)
    images: Tensor = unpatchify(made, model.config.patch_size)
    return images


def _stacked(self: WanCausalConv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    """The same causal convolution as a 2-D one over stacked frames: much faster on a CPU."""
    right, left = self._padding[0], self._padding[2]
    past = self._padding[4]
    if cache_x is not None and past > 0:
        x = torch.cat([cache_x, x], dim=2)
        past -= cache_x.shape[2]
    if past == 2 and x.shape[2] == 1:
        return F.conv2d(
            x[:, :, 0], self.weight[:, :, -1], self.bias, padding=(left, right)
        ).unsqueeze(2)
    if past > 0:
        x = F.pad(x, (0, 0, 0, 0, past, 0))
    taps = self.kernel_size[0]
    if self.stride != (1, 1, 1) or taps == 1:
        return F.conv3d(x, self.weight, self.bias, self.stride, (0, left, right))
    B, C, T, H, W = x.shape
    count = T - taps + 1
    rows = torch.stack([x[:, :, i : i + taps] for i in range(count)], 1).reshape(
        B * count, C * taps, H, W
    )
    weight = self.weight.flatten(1, 2)
    made = F.conv2d(rows, weight, self.bias, padding=(left, right))
    return made.view(B, count, *made.shape[1:]).transpose(1, 2)


@contextmanager
def stacked_convolutions() -> Iterator[None]:
    """Within this block every causal convolution runs as a 2-D one; results agree to 1e-5."""
    stock = WanCausalConv3d.forward
    WanCausalConv3d.forward = _stacked
    try:
        yield
    finally:
        WanCausalConv3d.forward = stock


def psnr_db(
    model: AutoencoderKLWan, frames_latents: list[tuple[Tensor, Tensor]]
) -> tuple[float, float]:
    """PSNR of first and of later frames over (pixels, latents) pairs."""
    errors = []
    with torch.no_grad():
        for video, latents in frames_latents:
            made = decode(model, latents).clamp(-1, 1)
            errors.append((made - video).pow(2).mean((0, 1, 3, 4)))
    mean = torch.stack(errors).mean(0)
    first, later = (10 * torch.log10(4 / part) for part in (mean[0], mean[1:].mean()))
    return float(first), float(later)
