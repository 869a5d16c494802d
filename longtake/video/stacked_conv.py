"""Wan's causal 3-D convolutions as 2-D ones: the same sums, faster on a CPU.

torch sends an fp32 ``conv3d`` on the CPU to a plain im2col kernel. Here the frames under the
temporal taps are stacked on the channel axis, channels last, and one oneDNN ``conv2d`` does the
rest: 1.5 to 2.5 times the decode speed on small frames, on a par on large ones, where it costs a
temporary copy of three times the input (benchmarks/vae_decode.py).

Two more gains. A stream's first frame meets only the last taps, since all before it is padding.
And oneDNN is called by name, also for the VAE's plain 2-D convolutions: ``F.conv2d`` picks another
kernel for 1x1 filters when torch has one thread than when it has two, and so other bits.

Installed on the modules of one VAE, never on a class. Weights are not copied: ``install`` re-lays
each parameter in place so that the stacked weight is a view of it. The view is taken on each call,
so weights loaded later are seen.

Shapes: B batch, C channels, T frames, L frames with their history, H height, W width, K taps.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import Tensor, nn

ConvForm = Literal["conv3d", "stacked"]


def prepare_vae(vae: AutoencoderKLWan) -> ConvForm:
    """Give the VAE the faster form its device and dtype allow; return its name for the receipt.

    Call it after weights, device and dtype are final; calling it again decides anew.
    """
    if stacking_pays(vae):
        install(vae)
        return "stacked"
    uninstall(vae)
    return "conv3d"


def stacking_pays(vae: AutoencoderKLWan) -> bool:
    """Whether all parameters are fp32 on a CPU whose torch has oneDNN, with nothing hooked in."""
    return (
        torch._C._has_mkldnn
        and bool(torch.backends.mkldnn.enabled)
        and all(p.device.type == "cpu" and p.dtype == torch.float32 for p in vae.parameters())
        and not any(_is_foreign(conv) for conv in _convolutions(vae))
    )


def install(vae: AutoencoderKLWan) -> None:
    """Run the convolutions of this VAE stacked. Undo with ``uninstall`` before saving it."""
    for conv in _convolutions(vae):
        if isinstance(conv, WanCausalConv3d):
            # Stored as [out, kh, kw, kt, in], so that [out, kt * in, kh, kw] is a view.
            relaid = conv.weight.data.permute(0, 3, 4, 2, 1).clone(
                memory_format=torch.contiguous_format
            )
            conv.weight.data = relaid.permute(0, 4, 3, 1, 2)
            conv.__dict__["forward"] = MethodType(_stacked_forward, conv)
        else:
            conv.__dict__["forward"] = MethodType(_conv2d_forward, conv)


def uninstall(vae: AutoencoderKLWan) -> None:
    """Put the class's own forward and the plain weight layout back."""
    for conv in _convolutions(vae):
        if _is_ours(conv):
            del conv.__dict__["forward"]
            conv.weight.data = conv.weight.data.contiguous()


def _convolutions(vae: AutoencoderKLWan) -> list[Any]:
    """The causal 3-D and plain 2-D convolutions; other classes are left alone."""
    return [m for m in vae.modules() if type(m) in (WanCausalConv3d, nn.Conv2d)]


def _is_ours(conv: nn.Module) -> bool:
    function = getattr(conv.__dict__.get("forward"), "__func__", None)
    return function in (_stacked_forward, _conv2d_forward)


def _is_foreign(conv: nn.Module) -> bool:
    """Someone else (an offload hook, say) replaced this module's forward."""
    return "forward" in conv.__dict__ and not _is_ours(conv)


def _stacked_forward(conv: Any, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    """``WanCausalConv3d.forward`` for [B, C, T, H, W] with up to K - 1 frames of history."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return type(conv).forward(conv, x, cache_x)  # type: ignore[no-any-return]
    taps = conv.kernel_size[0]
    x_blhwc, used = _with_history(x, cache_x, conv._padding[4], taps)
    if taps == 1:
        # Frame by frame: diffusers gives the two convolutions outside the feature cache all frames
        # at once, and a frame's bits must not depend on how many came along.
        frames = [
            _conv_frames(conv, x_blhwc[:, i : i + 1], 1)
            for i in range(0, x_blhwc.shape[1], conv.stride[0])
        ]
        return torch.cat(frames, dim=1).permute(0, 4, 1, 2, 3)
    return _conv_frames(conv, x_blhwc, used).permute(0, 4, 1, 2, 3)


def _with_history(x: Tensor, cache_x: Tensor | None, missing: int, taps: int) -> tuple[Tensor, int]:
    """Channels-last frames behind their history, and how many of the taps meet a real frame."""
    x_blhwc = x.permute(0, 2, 3, 4, 1)
    if cache_x is not None and missing:
        past_blhwc = cache_x.to(x.device).permute(0, 2, 3, 4, 1)
        x_blhwc = torch.cat([past_blhwc, x_blhwc], dim=1)
        missing -= cache_x.shape[2]
    if missing and x.shape[2] == 1:
        return x_blhwc, taps - missing
    if missing:
        x_blhwc = F.pad(x_blhwc, (0, 0, 0, 0, 0, 0, missing, 0))
    return x_blhwc, taps


def _conv_frames(conv: Any, x_blhwc: Tensor, used: int) -> Tensor:
    """Stack each output frame's last ``used`` taps on the channel axis and convolve in 2-D."""
    taps = conv.kernel_size[0]
    stride = conv.stride[0]
    batch, length = x_blhwc.shape[:2]
    count = (length - used) // stride + 1
    span = (count - 1) * stride + 1
    stacked = x_blhwc
    if used > 1:
        stacked = torch.cat([x_blhwc[:, k : k + span : stride] for k in range(used)], dim=-1)
    weight = conv.weight.permute(0, 3, 4, 2, 1)[:, :, :, taps - used :]
    out = _onednn_conv2d(
        stacked.flatten(0, 1).permute(0, 3, 1, 2),
        weight.flatten(3).permute(0, 3, 1, 2),
        conv.bias,
        padding=[conv._padding[2], conv._padding[0]],
        stride=list(conv.stride[1:]),
    )
    out_bthwc = out.permute(0, 2, 3, 1)
    return out_bthwc.reshape(batch, count, *out_bthwc.shape[1:])


def _conv2d_forward(conv: Any, x: Tensor) -> Tensor:
    """``nn.Conv2d.forward`` by one kernel, whatever the number of threads."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return type(conv).forward(conv, x)  # type: ignore[no-any-return]
    return _onednn_conv2d(
        x, conv.weight, conv.bias, padding=list(conv.padding), stride=list(conv.stride)
    )


def _onednn_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, padding: list[int], stride: list[int]
) -> Tensor:
    """``F.conv2d`` without its choice of backend, which depends on sizes and thread count.

    One layout always, since another one may mean another kernel and so other bits.
    """
    x_nhwc = x.contiguous(memory_format=torch.channels_last)
    return torch.mkldnn_convolution(
        x_nhwc, weight, bias, padding=padding, stride=stride, dilation=[1, 1], groups=1
    )
