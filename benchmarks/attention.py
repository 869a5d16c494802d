"""Exact attention read in chunks against SDPA: time and extra memory over the number of keys.

Run ``python -m benchmarks.attention [--quick] [--json] [--threads N]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from benchmarks.report import Figure, Row, Scale, Table, run
from longtake.video.attention import attend_chunked, sdpa
from longtake.video.attention_readings import CHUNK_TOKENS
from longtake.video.memory import peak_bytes

TOKENS = {
    Scale.FULL: (8192, 16384, 32768),
    Scale.QUICK: (8192, 16384),
    Scale.SMALLEST: (64, 128),
}
PAIRS = {Scale.FULL: 7, Scale.QUICK: 5, Scale.SMALLEST: 1}
QUERIES, HEADS, HEAD_DIM = 1560, 4, 64
MAX_RATIO, MAX_SHARE, MAX_GROWTH = 1.10, 1 / 8, 1.1
CPU = torch.device("cpu")
MIB = 2**20


def figure(scale: Scale) -> Figure:
    """Both take turns on the same random tensors; memory is measured in calls of their own."""
    rows: list[Row] = []
    lines: list[tuple[float, ...]] = []
    for tokens in TOKENS[scale]:
        q, k, v = (_random(n) for n in (min(QUERIES, tokens), tokens, tokens))

        def whole(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            return sdpa(q, k, v)

        def parts(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            return attend_chunked(q, k, v, CHUNK_TOKENS)

        pairs = [(timed(whole), timed(parts)) for _ in range(PAIRS[scale] + 1)][1:]
        ratio = median(part / one for one, part in pairs)
        extra = (peak_bytes(whole, CPU) or 0, peak_bytes(parts, CPU) or 0)
        scores = HEADS * q.shape[1] * tokens * q.element_size()
        rows.append(Row(f"chunked / SDPA, {tokens} keys", ratio, "x", MAX_RATIO))
        seconds = (median(one for one, _ in pairs), median(part for _, part in pairs))
        lines.append((tokens, *(1e3 * s for s in seconds), *(e / MIB for e in extra), scores / MIB))
    most = max(line[4] / line[5] for line in lines)
    rows += [
        Row("chunked, extra memory / the matrix of scores, at most", most, "x", MAX_SHARE),
        Row("chunked, extra memory, most / fewest keys", _growth(lines), "x", MAX_GROWTH),
    ]
    method = (
        f"{QUERIES} queries, {HEADS} heads of {HEAD_DIM}, fp32, {CHUNK_TOKENS} keys at a time; "
        f"medians of {PAIRS[scale]}, taking turns. Extra memory is the peak of the process during "
        "one call over what it held before, output included; the matrix of scores is computed, "
        "not made."
    )
    head = ("keys", "SDPA ms", "chunked ms", "SDPA MiB", "chunked MiB", "scores MiB")
    return Figure("Exact attention in chunks", rows, method, Table(head, tuple(lines)))


def timed(call: Callable[[], torch.Tensor]) -> float:
    """Seconds of one call."""
    began = perf_counter()
    call()
    return perf_counter() - began


def _growth(lines: list[tuple[float, ...]]) -> float:
    return lines[-1][4] / max(lines[0][4], 1e-9)


def _random(tokens: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(tokens)
    return torch.randn(1, tokens, HEADS, HEAD_DIM, generator=draw)


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", {"attention": figure}))
