"""Attention backends behind one call.

A query sees every key it is given; what is given is the plan's business (``schedulers/chunks.py``).
Tensors are B, S, H, D: batch, tokens, heads, head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch.nn import functional

from longtake.errors import BackendError

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def sdpa(
    q_BSHD: torch.Tensor,
    k_BSHD: torch.Tensor,
    v_BSHD: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """PyTorch's scaled dot product attention; ``bias`` is added to the scores."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BSHD, v_BSHD))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def choose_backend(name: str, device: torch.device) -> tuple[str, Attend]:
    """The self-attention backend called ``name``; ``auto`` takes what the device has.

    Raises:
        BackendError: no such backend, or it is not installed, or not for this device.
    """
    if name not in BACKENDS:
        raise BackendError(f"backend={name!r}: no such backend; {', '.join(BACKENDS)}")
    if name == "auto":
        usable = device.type == "cuda" and find_spec("flash_attn") is not None
        return choose_backend("flash" if usable else "sdpa", device)
    if name != "sdpa" and device.type != "cuda":
        raise BackendError(f"backend={name}: needs a CUDA device, this is {device.type}")
    return name, BACKENDS[name]()


def _flash() -> Attend:
    if find_spec("flash_attn") is None:
        raise BackendError("backend=flash: the package flash-attn is not installed")
    from flash_attn import flash_attn_func

    attend: Attend = flash_attn_func
    return attend


def _xformers() -> Attend:
    if find_spec("xformers") is None:
        raise BackendError("backend=xformers: the package xformers is not installed")
    from xformers.ops import memory_efficient_attention

    attend: Attend = memory_efficient_attention
    return attend


BACKENDS: dict[str, Callable[[], Attend]] = {
    "auto": lambda: sdpa,
    "sdpa": lambda: sdpa,
    "flash": _flash,
    "xformers": _xformers,
}
