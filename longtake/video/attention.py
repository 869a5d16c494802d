"""Exact attention: of one set of keys, or of several whose parts are merged.

A query sees every key it is given; what is given is the plan's business (``schedulers/chunks.py``,
``attention_plan.py``). A part of the keys gives a *partial*: its output and the log of the sum of
its exponentiated scores (LSE). Partials of disjoint keys merge into what all keys together give
(online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867; ring attention: arXiv 2310.01889).

Shapes: B batch, S tokens, H heads, D head dimension. Nothing here is causal or differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.nn import functional

from longtake.errors import BackendError

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

FLASH_DIM = 256  # widest head of the aten flash operator on CUDA
MATH_QUERIES, MATH_KEYS = 512, 2048  # block of scores that the fallback makes at once


class Partial(NamedTuple):
    """Attention of some queries to some of the keys.

    Attributes:
        out: [B, S, H, D], normalised over these keys alone.
        lse: [B, H, S] log-sum-exp of the scaled scores, float32 (float64 of float64 inputs).
    """

    out: torch.Tensor
    lse: torch.Tensor


AttendLse = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Partial]


def sdpa(
    q_BSHD: torch.Tensor,
    k_BSHD: torch.Tensor,
    v_BSHD: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """PyTorch's scaled dot product attention; ``bias`` is added to the scores."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BSHD, v_BSHD))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def attend_lse(
    q_BSHD: torch.Tensor,
    k_BSHD: torch.Tensor,
    v_BSHD: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> Partial:
    """What ``sdpa`` gives, and the LSE that makes it mergeable.

    The aten flash operators where they can do it (all of it on a CPU; 16 bit and head dimensions
    that divide by 8 on CUDA, without bias), CUDA's memory-efficient one, else ``attend_lse_math``.

    Args:
        q_BSHD, k_BSHD, v_BSHD: any numbers of queries and keys, at least one of each.
        bias: [B or 1, H or 1, S_q or 1, S_k] added to the scores.

    Raises:
        BackendError: no keys, or a query whose bias masks every key: neither has an answer.
    """
    _check(q_BSHD, k_BSHD, v_BSHD, bias)
    # the raw operators read a head's numbers as if they lay side by side
    q, k, v = (_dense(x).transpose(1, 2) for x in (q_BSHD, k_BSHD, v_BSHD))
    same = q.dtype == k.dtype == v.dtype and q.shape[-1] == v.shape[-1]
    if same and q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=bias
        )
        return Partial(out.transpose(1, 2), lse)
    if same and q.device.type == "cuda" and q.shape[-1] % 8 == 0:
        if q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= FLASH_DIM and bias is None:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]
            return Partial(out.transpose(1, 2), lse)
        if q.dtype != torch.float64 and bias is None:
            out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, None, compute_log_sumexp=True
            )[:2]
            # that kernel pads the LSE to a multiple of 32 queries
            return Partial(out.transpose(1, 2), lse[..., : q.shape[2]])
    return attend_lse_math(q_BSHD, k_BSHD, v_BSHD, bias)


def attend_lse_math(
    q_BSHD: torch.Tensor,
    k_BSHD: torch.Tensor,
    v_BSHD: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> Partial:
    """The same in plain matrix products, for any device, dtype and head dimension.

    At most ``MATH_QUERIES`` x ``MATH_KEYS`` scores a head exist at once. 16-bit inputs are
    computed in float32.
    """
    _check(q_BSHD, k_BSHD, v_BSHD, bias)
    kind = torch.float64 if q_BSHD.dtype == torch.float64 else torch.float32
    q, k, v = (x.transpose(1, 2).to(kind) for x in (q_BSHD, k_BSHD, v_BSHD))
    q = q * (1.0 / math.sqrt(q.shape[-1]))
    bias = None if bias is None else bias.to(kind).expand(*bias.shape[:2], q.shape[2], k.shape[2])
    outs, sums = [], []
    for rows in torch.arange(q.shape[2]).split(MATH_QUERIES):
        some = slice(int(rows[0]), int(rows[-1]) + 1)
        merger = Merger()
        for columns in torch.arange(k.shape[2]).split(MATH_KEYS):
            part = slice(int(columns[0]), int(columns[-1]) + 1)
            scores = q[:, :, some] @ k[:, :, part].transpose(2, 3)
            if bias is not None:
                scores = scores + bias[:, :, some, part]
            lse = scores.logsumexp(-1)
            # of a query that sees none of these keys; anything else that is no number stays so
            nothing = lse.isneginf().unsqueeze(-1)
            weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(nothing, 0.0)
            merger.add(Partial((weights @ v[:, :, part]).transpose(1, 2), lse))
        whole = merger.result()
        outs.append(whole.out)
        sums.append(whole.lse)
    return Partial(torch.cat(outs, 1).to(q_BSHD.dtype), torch.cat(sums, 2))


class Merger:
    """Merges partials of disjoint keys as they come, holding one accumulator.

    The accumulator is float32 (float64 for float64 inputs), whatever the partials' dtype, so the
    result is rounded once. It never writes into a partial it was given.
    """

    def __init__(self) -> None:
        self._out: torch.Tensor | None = None
        self._lse = torch.empty(0)
        self._dtype = torch.float32

    def add(self, part: Partial) -> None:
        """Take one more part; a query that saw nothing in it has an LSE of minus infinity."""
        wide = part.lse.dtype
        if self._out is None:
            self._dtype = part.out.dtype
            # a copy even where the dtype is right: it is written to from now on
            self._out, self._lse = part.out.to(wide, copy=True), part.lse
            return
        lse = torch.logaddexp(self._lse, part.lse)
        weight = (part.lse - lse).exp().masked_fill(lse.isneginf(), 0.0)
        self._out.lerp_(part.out.to(wide), weight.transpose(1, 2).unsqueeze(-1))
        self._lse = lse

    def result(self) -> Partial:
        """All parts together, in the dtype of the first.

        Raises:
            BackendError: nothing was added.
        """
        if self._out is None:
            raise BackendError("attention: nothing to merge")
        return Partial(self._out.to(self._dtype), self._lse)


def merge(partials: Iterable[Partial]) -> Partial:
    """Attention to all keys, from partials of disjoint sets of them (any order, one will do).

    Raises:
        BackendError: there are none.
    """
    merger = Merger()
    for part in partials:
        merger.add(part)
    return merger.result()


def attend_chunked(
    q_BSHD: torch.Tensor,
    k_BSHD: torch.Tensor,
    v_BSHD: torch.Tensor,
    tokens: int,
    attend: AttendLse = attend_lse,
) -> torch.Tensor:
    """Attention to all keys, read ``tokens`` at a time: the same result up to rounding.

    Memory beyond inputs and output is an output-sized accumulator and one part, however many keys
    there are; ``attend`` is called once for every ``tokens`` keys, the last time for the rest.
    """
    keys = k_BSHD.shape[1]
    if keys <= tokens:
        return attend(q_BSHD, k_BSHD, v_BSHD).out
    merger = Merger()
    for start in range(0, keys, tokens):
        part = slice(start, start + tokens)
        merger.add(attend(q_BSHD, k_BSHD[:, part], v_BSHD[:, part]))
    return merger.result().out


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(
    q_BSHD: torch.Tensor, k_BSHD: torch.Tensor, v_BSHD: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Refuse what the operators crash on or answer with made-up numbers."""
    q, k, v = q_BSHD.shape, k_BSHD.shape, v_BSHD.shape
    fits = len(q) == 4 and k[:3] == v[:3] and (q[0], *q[2:]) == (k[0], *k[2:])
    if not fits or 0 in (*q, *k):
        shapes = ", ".join(str(list(shape)) for shape in (q, k, v))
        raise BackendError(
            f"attention: got q, k, v {shapes}; expected [B, S, H, D] of one B, H and D, with one "
            "query and key at least"
        )
    if bias is not None and bias.dtype == torch.bool:
        raise BackendError("attention: got a boolean bias; expected numbers to add, 0 and -inf")
    if bias is not None and bool(bias.isneginf().all(-1).any()):
        raise BackendError("attention: a query whose keys are all masked has no answer")
