"""VAE decode divided over ranks by rows, with the result of one rank.

The layers up to the middle block, which attends globally, run on whole latents on every rank.
After it a rank goes on with its share of the rows, and every convolution that looks up and down
first gets the row above and below from the neighbours; at the picture's edge that row is zeros,
as its padding would be. So nothing is computed twice but two rows a convolution, a stream's
feature cache holds own rows only, and the pixels are those of a whole decode up to the last bits
of the convolution kernels. At the end every rank has the whole frames.

Shapes: B batch, C channels, T frames, H rows, W columns.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import Tensor, nn

from longtake.errors import ParallelError
from longtake.video.parallel_groups import Group
from longtake.video.parallel_layout import bounds, share

ATTRIBUTE = "_longtake_rows"


def divide_decode(vae: AutoencoderKLWan, group: Group) -> None:
    """Decode this VAE's latents by rows over the ranks of ``group``; undo with ``undivide``.

    Call it after the VAE's convolutions have their final form (``stacked_conv.prepare_vae``).
    """
    undivide(vae)
    if group.size > 1:
        vae.decoder.__dict__[ATTRIBUTE] = _Rows(vae.decoder, group)


def undivide(vae: AutoencoderKLWan) -> None:
    """Have every rank decode whole frames again."""
    rows = vae.decoder.__dict__.pop(ATTRIBUTE, None)
    if rows is not None:
        rows.remove()


class _Rows:
    """Hooks on a decoder: cut after the middle block, halo for convolutions, gather at the end."""

    def __init__(self, decoder: Any, group: Group) -> None:
        self._group = group
        self._whole = 0
        self._hooks = [
            decoder.mid_block.register_forward_hook(self._cut),
            decoder.register_forward_hook(self._gather),
        ]
        self._undo: list[tuple[Any, Any]] = []
        for part in (*decoder.up_blocks, decoder.conv_out):
            for conv in part.modules():
                if isinstance(conv, WanCausalConv3d | nn.Conv2d) and conv.kernel_size[-2] > 1:
                    self._widen(conv)

    def remove(self) -> None:
        """Leave the decoder as it was."""
        for hook in self._hooks:
            hook.remove()
        for conv, before in self._undo:
            if before is None:
                del conv.__dict__["forward"]
            else:
                conv.__dict__["forward"] = before

    def _widen(self, conv: Any) -> None:
        """Give a convolution of height 3 its neighbours' rows."""
        if conv.kernel_size[-2] != 3 or conv.stride[-1] != 1:
            raise ParallelError(f"vae: a convolution of kernel {conv.kernel_size} has no such halo")
        before = conv.__dict__.get("forward")
        run = conv.forward

        def forward(_conv: Any, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
            if cache_x is None:
                return _inner(run(self._with_halo(x)))
            both = self._with_halo(torch.cat([cache_x.to(x.device), x], 2))
            past = cache_x.shape[2]
            return _inner(run(both[:, :, past:], both[:, :, :past]))

        self._undo.append((conv, before))
        conv.__dict__["forward"] = MethodType(forward, conv)

    def _cut(self, _block: Any, _args: Any, x_BCTHW: Tensor) -> Tensor:
        self._whole = x_BCTHW.shape[3]
        if self._whole < self._group.size:
            raise ParallelError(f"vae: {self._whole} rows for {self._group.size} ranks")
        first, last = bounds(self._whole, self._group.size, self._group.index)
        return x_BCTHW[:, :, :, first:last].contiguous()

    def _with_halo(self, x: Tensor) -> Tensor:
        """Rows [.., H, W] with one more above and below."""
        row = (*x.shape[:-2], 1, x.shape[-1])
        nothing = (*x.shape[:-2], 0, x.shape[-1])
        index, size = self._group.index, self._group.size
        top, bottom = x[..., :1, :], x[..., -1:, :]
        empty = x[..., :0, :]
        parts, shapes = [empty] * size, [nothing] * size
        if index > 0:
            parts[index - 1], shapes[index - 1] = top, row
        if index < size - 1:
            parts[index + 1], shapes[index + 1] = bottom, row
        came = self._group.exchange(parts, shapes)
        above = came[index - 1] if index > 0 else torch.zeros_like(top)
        below = came[index + 1] if index < size - 1 else torch.zeros_like(bottom)
        return torch.cat([above, x, below], -2)

    def _gather(self, _decoder: Any, _args: Any, frames_BCTHW: Tensor) -> Tensor:
        shape = frames_BCTHW.shape
        rows = share(self._whole, self._group.size)
        scale = shape[3] // rows[self._group.index]
        shapes = [(*shape[:3], n * scale, shape[4]) for n in rows]
        return torch.cat(self._group.gather(frames_BCTHW, shapes), 3)


def _inner(x: Tensor) -> Tensor:
    """Without the outermost rows, whose sums lack a neighbour."""
    return x[..., 1:-1, :]
