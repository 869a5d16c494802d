"""Attention backends: what each can do, whether it is here, and which is fastest here.

A backend that is named and is missing, or cannot do what the plan needs, is an error that says why;
nothing is replaced silently. ``auto`` measures the candidates once a process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch

from longtake.errors import BackendError
from longtake.video.attention import Attend, AttendLse, Partial, attend_lse, sdpa

LSE = "lse"  # gives the log-sum-exp, so that parts can be merged
BIAS = "bias"  # adds a bias to the scores
WARM_UPS, REPEATS = 2, 5
HALF = (torch.bfloat16, torch.float16)


class AttendBiased(Protocol):
    """Attention with an optional bias [B, 1, 1, S] on the scores."""

    def __call__(
        self,
        q_BSHD: torch.Tensor,
        k_BSHD: torch.Tensor,
        v_BSHD: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Output [B, S, H, D]."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute attention.

    Attributes:
        name: as on the command line and in the receipt.
        attend: all keys in one call.
        attend_lse: the same, with the LSE that lets parts be merged.
        attend_biased: the same with a bias [B, 1, 1, S_k] on the scores, or None for no bias.
        can: of ``LSE`` and ``BIAS``; without the latter, ``attend_biased`` takes no bias.
    """

    name: str
    attend: Attend
    attend_lse: AttendLse
    attend_biased: AttendBiased
    can: frozenset[str]


@dataclass(frozen=True, slots=True)
class Sizes:
    """A shape of attention to measure backends at; the default is a chunk of Wan 1.3B."""

    heads: int = 12
    head_dim: int = 128
    queries: int = 4680
    keys: int = 18720


def choose_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    needs: Iterable[str] = (),
    sizes: Sizes | None = None,
) -> Backend:
    """The backend called ``name``, or with ``auto`` the fastest that can do what is needed.

    Args:
        name: ``auto``, ``sdpa``, ``flash``, ``xformers`` or ``flex``.
        device, dtype: where and in what it will run; without a dtype none is refused for it.
        needs: of ``LSE`` and ``BIAS``.
        sizes: shape that ``auto`` measures at; with one candidate nothing is measured.

    Raises:
        BackendError: no such backend, or it is missing, or not able to do this.
    """
    if name == "auto":
        able = [n for n in MEASURED if why_not(n, device, dtype, needs) is None]
        if len(able) > 1:
            kind = dtype or torch.bfloat16
            return make_backend(_fastest(tuple(able), device, kind, sizes or Sizes()), device)
        return make_backend(able[0], device)
    reason = why_not(name, device, dtype, needs)
    if reason is not None:
        raise BackendError(f"backend={name}: {reason}")
    return make_backend(name, device)


def why_not(
    name: str, device: torch.device, dtype: torch.dtype | None, needs: Iterable[str] = ()
) -> str | None:
    """Why a backend cannot be used here for this; None if it can."""
    if name not in MAKERS:
        return f"no such backend; {', '.join(BACKENDS)}"
    reason = _missing(name, device)
    if reason is not None:
        return reason
    if name == "flash" and dtype is not None and dtype not in HALF:
        return f"computes in bf16 and fp16, this is {str(dtype).removeprefix('torch.')}"
    lacking = set(needs) - make_backend(name, device).can
    return f"cannot add a bias to the scores ({', '.join(sorted(lacking))})" if lacking else None


@lru_cache
def make_backend(name: str, device: torch.device) -> Backend:
    """The backend's functions, made once; the caller has asked ``why_not``."""
    return MAKERS[name](device)


@lru_cache
def _missing(name: str, device: torch.device) -> str | None:
    """Why it does not run on this device at all, found out once by running it on one token."""
    package = PACKAGES.get(name)
    if package is not None and device.type != "cuda":
        return f"needs a CUDA device, this is {device.type}"
    if package is not None and find_spec(package) is None:
        return f"the package {package.replace('_', '-')} is not installed"
    if name == "sdpa":
        return None
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    q = torch.ones(1, 1, 1, 64, device=device, dtype=kind)
    try:
        make_backend(name, device).attend_lse(q, q, q)
    except Exception as error:  # kernels raise whatever the device made them trip over
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return f"does not run on this device: {first}"
    return None


@lru_cache
def _fastest(names: tuple[str, ...], device: torch.device, dtype: torch.dtype, sizes: Sizes) -> str:
    """The candidate with the least median time at this shape, taking turns."""
    seconds = measure(names, device, dtype, sizes)
    return min(seconds, key=lambda name: seconds[name])


@torch.inference_mode()
def measure(
    names: Iterable[str], device: torch.device, dtype: torch.dtype, sizes: Sizes
) -> dict[str, float]:
    """Median seconds of one call of each backend on random numbers, taking turns."""
    draw = torch.Generator(device).manual_seed(0)

    def random(tokens: int) -> torch.Tensor:
        shape = (1, tokens, sizes.heads, sizes.head_dim)
        return torch.randn(shape, device=device, dtype=dtype, generator=draw)

    q, k, v = random(sizes.queries), random(sizes.keys), random(sizes.keys)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(WARM_UPS + REPEATS):
        for name, taken in times.items():
            synchronize(device)
            began = perf_counter()
            make_backend(name, device).attend(q, k, v)
            synchronize(device)
            if turn >= WARM_UPS:
                taken.append(perf_counter() - began)
    return {name: median(taken) for name, taken in times.items()}


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sdpa(_: torch.device) -> Backend:
    return Backend("sdpa", sdpa, attend_lse, sdpa, frozenset({LSE, BIAS}))


def _flash(_: torch.device) -> Backend:
    from flash_attn import flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_attn_func(q, k, v)
        return out

    def with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
        return Partial(out, lse[..., : q.shape[1]])

    return Backend("flash", attend, with_lse, _without_bias("flash", attend), frozenset({LSE}))


def _xformers(_: torch.device) -> Backend:
    from xformers import ops

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ops.memory_efficient_attention_forward(q, k, v)
        return out

    def with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
        out, lse = ops.memory_efficient_attention_forward_requires_grad(q, k, v)
        return Partial(out, lse[..., : q.shape[1]])

    return Backend(
        "xformers", attend, with_lse, _without_bias("xformers", attend), frozenset({LSE})
    )


def _flex(device: torch.device) -> Backend:
    """FlexAttention; fused by torch.compile on CUDA, the unfused form elsewhere."""
    run = flex_function(device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return run(q, k, v).out

    def with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
        return run(q, k, v)

    def biased(
        q_BSHD: torch.Tensor,
        k_BSHD: torch.Tensor,
        v_BSHD: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        score_mod = None if bias is None else _adds(bias)
        return run(q_BSHD, k_BSHD, v_BSHD, score_mod=score_mod).out

    return Backend("flex", attend, with_lse, biased, frozenset({LSE, BIAS}))


def _adds(bias: torch.Tensor) -> Any:
    """FlexAttention's form of a bias [B, 1, 1, S_k]."""

    def score_mod(
        score: torch.Tensor, b: torch.Tensor, _h: torch.Tensor, _q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return score + bias[b, 0, 0, kv]

    return score_mod


def _without_bias(name: str, attend: Attend) -> AttendBiased:
    """A backend that takes no bias, in the form of one that does."""

    def biased(
        q_BSHD: torch.Tensor,
        k_BSHD: torch.Tensor,
        v_BSHD: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if bias is not None:
            raise BackendError(f"backend={name}: cannot add a bias to the scores")
        return attend(q_BSHD, k_BSHD, v_BSHD)

    return biased


def flex_function(device: torch.device) -> Callable[..., Partial]:
    """FlexAttention on q, k, v [B, S, H, D], with a ``BlockMask`` and a score function or None.

    Compiled where there is a CUDA device and Triton; elsewhere the unfused form, which makes the
    whole matrix of scores.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    fused = device.type == "cuda" and find_spec("triton") is not None
    call: Any = torch.compile(flex_attention, dynamic=False) if fused else flex_attention

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_mask: Any = None,
        score_mod: Any = None,
    ) -> Partial:
        heads_first = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        with warnings.catch_warnings():
            # it says that the unfused form is slow; whoever named it was told by the bench
            warnings.filterwarnings("ignore", message="flex_attention called without")
            out, more = call(
                *heads_first,
                score_mod=score_mod,
                block_mask=block_mask,
                return_aux=AuxRequest(lse=True),
            )
        return Partial(out.transpose(1, 2), more.lse)

    return run


MEASURED = ("sdpa", "flash", "xformers")  # what ``auto`` takes; flex is for block masks
PACKAGES = {"flash": "flash_attn", "xformers": "xformers"}
MAKERS: dict[str, Callable[[torch.device], Backend]] = {
    "sdpa": _sdpa,
    "flash": _flash,
    "xformers": _xformers,
    "flex": _flex,
}
BACKENDS = ("auto", *MAKERS)
