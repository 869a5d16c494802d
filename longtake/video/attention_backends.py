"""Attention backends: what each can do, whether it is here, and which is fastest here.

A backend that is named and is missing, or cannot do what the plan needs, is an error that says why;
nothing is replaced silently. ``auto`` measures the candidates once a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Protocol

import torch

from longtake.errors import BackendError
from longtake.video.attention import Attend, AttendLse, Partial, attend_lse, sdpa
from longtake.video.attention_flex import adds_bias, flex_function

LSE = "lse"  # gives the log-sum-exp, so that parts can be merged
BIAS = "bias"  # adds a bias to the scores
LACKS = {LSE: "gives no log-sum-exp", BIAS: "adds no bias to the scores"}
WARM_UPS, REPEATS = 2, 5
HALF = (torch.bfloat16, torch.float16)
# dtypes and widest head; xformers has kernels for wider ones, which not every build holds
LIMITS: dict[str, tuple[tuple[torch.dtype, ...], int]] = {
    "flash": (HALF, 256),
    "xformers": ((*HALF, torch.float32), 256),
}


class AttendBiased(Protocol):
    """Attention with an optional bias [B or 1, H or 1, S_q or 1, S_k] on the scores."""

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
        attend_biased: the same with a bias on the scores, or None for no bias.
        can: of ``LSE`` and ``BIAS``; without the latter, ``attend_biased`` takes no bias.
    """

    name: str
    attend: Attend
    attend_lse: AttendLse
    attend_biased: AttendBiased
    can: frozenset[str]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What computes the attention of a causal model.

    Attributes:
        own, cross: of self- and cross-attention.
        because: why cross-attention has another one; None if it has not.
    """

    own: Backend
    cross: Backend
    because: str | None = None

    def as_dict(self) -> dict[str, str]:
        """Names, as plan and receipt have them."""
        names = {"self_attention": self.own.name, "cross_attention": self.cross.name}
        return names if self.because is None else names | {"because": self.because}


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
        sizes: shape that ``auto`` measures at; with one candidate nothing is measured. Without
            sizes no width of heads is refused.

    Raises:
        BackendError: no such backend, or it is missing, or not able to do this.
    """
    width = None if sizes is None else sizes.head_dim
    if name == "auto":
        able = tuple(n for n in MEASURED if why_not(n, device, dtype, needs, width) is None)
        if len(able) == 1:
            return make_backend(able[0], device)
        measured = (one_device(device), dtype or torch.bfloat16, sizes or Sizes())
        return make_backend(_fastest(able, *measured), device)
    reason = why_not(name, device, dtype, needs, width)
    if reason is not None:
        raise BackendError(f"backend={name}: {reason}")
    return make_backend(name, device)


def choose_backends(name: str, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Chosen:
    """Backends of a causal model; cross-attention has that of self-attention where that can do it.

    Its scores have a bias, which stands for the padding of prompts (``CausalWan.encode_text``).
    What cannot add one leaves cross-attention to SDPA: its keys are few.

    Raises:
        BackendError: as of ``choose_backend``, for self-attention.
    """
    own = choose_backend(name, device, dtype, sizes=sizes)
    reason = why_not(own.name, device, dtype, [BIAS], sizes.head_dim)
    if reason is None:
        return Chosen(own, own)
    because = f"{own.name} {reason}, as a prompt's padding needs"
    return Chosen(own, make_backend("sdpa", device), because)


def why_not(
    name: str,
    device: torch.device,
    dtype: torch.dtype | None,
    needs: Iterable[str] = (),
    head_dim: int | None = None,
) -> str | None:
    """Why a backend cannot be used here for this; None if it can.

    Args:
        name: of ``MAKERS``.
        device, dtype: where and in what; without a dtype none is refused.
        needs: of ``LSE`` and ``BIAS``.
        head_dim: width of a head; without one none is refused.
    """
    if name not in MAKERS:
        return f"no such backend; {', '.join(BACKENDS)}"
    reason = _missing(name, one_device(device)) or beyond_limits(name, dtype, head_dim)
    if reason is not None:
        return reason
    lacking = set(needs) - make_backend(name, device).can
    return " and ".join(LACKS[need] for need in sorted(lacking)) or None


def beyond_limits(name: str, dtype: torch.dtype | None, head_dim: int | None) -> str | None:
    """Which limit of a backend's kernels this is beyond, wherever they run; None if none."""
    dtypes, widest = LIMITS.get(name, ((), None))
    if dtypes and dtype is not None and dtype not in dtypes:
        *others, last = (str(kind).removeprefix("torch.") for kind in dtypes)
        this = str(dtype).removeprefix("torch.")
        return f"computes in {', '.join(others)} and {last}, this is {this}"
    if widest is not None and head_dim is not None and head_dim > widest:
        return f"has heads of at most {widest} channels, these have {head_dim}"
    return None


def one_device(device: torch.device) -> torch.device:
    """The device under the one name that caches know it by: ``cuda`` is the current one."""
    if device.type != "cuda":
        return torch.device(device.type)
    if device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def make_backend(name: str, device: torch.device) -> Backend:
    """The backend's functions, made once a device; the caller has asked ``why_not``."""
    return _made(name, one_device(device))


@lru_cache
def _made(name: str, device: torch.device) -> Backend:
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
        score_mod = None if bias is None else adds_bias(bias)
        return run(q_BSHD, k_BSHD, v_BSHD, score_mod=score_mod).out

    return Backend("flex", attend, with_lse, biased, frozenset({LSE, BIAS}))


def _without_bias(name: str, attend: Attend) -> AttendBiased:
    """A backend that takes no bias, in the form of one that does."""

    def biased(
        q_BSHD: torch.Tensor,
        k_BSHD: torch.Tensor,
        v_BSHD: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if bias is not None:
            raise BackendError(f"backend={name}: {LACKS[BIAS]}")
        return attend(q_BSHD, k_BSHD, v_BSHD)

    return biased


MEASURED = ("sdpa", "flash", "xformers")  # what ``auto`` takes; flex is for block masks
PACKAGES = {"flash": "flash_attn", "xformers": "xformers"}
MAKERS: dict[str, Callable[[torch.device], Backend]] = {
    "sdpa": _sdpa,
    "flash": _flash,
    "xformers": _xformers,
    "flex": _flex,
}
BACKENDS = ("auto", *MAKERS)
