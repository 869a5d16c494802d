"""Tokens against time, memory and error, for every attention plan and backend on this device.

Time is that of one layer's self-attention over all chunks of a video of so many tokens, at random
numbers: what a chunk's queries read, chunk by chunk, as a rollout does. Its slope over the tokens,
both as logarithms, is 2 where cost grows with the square of the length and 1 where a second of
video costs the same however long the video is. Memory is the most that the last chunk's call takes
beyond its inputs. The error is measured elsewhere: on activations of the bundled model
(``attention_trial.py``), whatever shape the times are taken at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import linear_regression
from typing import Any

import torch

from longtake.errors import BackendError, ModelError, RequestError
from longtake.video.attention_backends import MAKERS, why_not
from longtake.video.attention_plan import Scope, resolve_attention
from longtake.video.attention_trial import Way, try_ways
from longtake.video.attention_video import Shape, Where, measure_case, over_everything
from longtake.video.components import load_model
from longtake.video.manifest import DEFAULT_MODEL
from longtake.video.memory import is_out_of_memory
from longtake.video.numerics import choose_device, choose_dtype, torch_dtype
from longtake.video.source import find_model

# every form of plan, by the name that rows and slopes have
PLANS = {
    "full": "global",
    "chunked:1024": "global+chunked:1024",
    "window": "window",
    "topk:0.5": "global+topk:0.5",
    "topk:8": "global+topk:8",
    "radial": "global+radial",
}
CPU_TOKENS, DEVICE_TOKENS = (1024, 2048, 4096), (16384, 32768, 65536)
MAX_TOKENS = 2**20
ERROR_CHUNKS = 12
CPU_SHAPE = Shape(heads=4, head_dim=64, frame_tokens=32, chunk=4, window=12, sink=4)
DEVICE_SHAPE = Shape(heads=12, head_dim=128, frame_tokens=1024, chunk=4, window=12, sink=4)


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; the names are those of the JSON.

    Attributes:
        plan: of ``PLANS``.
        backend: by name.
        tokens: of the whole video.
        seconds: median of all chunks' calls together.
        peak_bytes: most memory beyond the inputs in the last chunk's call; None where not counted.
        error: against full attention, relative root mean square; None where it is not measured.
    """

    plan: str
    backend: str
    tokens: int
    seconds: float
    peak_bytes: int | None
    error: float | None


def backends_here(
    device: torch.device, dtype: str, names: Sequence[str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Backends that run here, and of the others why not.

    Raises:
        RequestError: a name that is no backend.
        BackendError: a named one does not run here.
    """
    reasons = {name: why_not(name, device, torch_dtype(dtype)) for name in MAKERS}
    for name in names or ():
        if name not in MAKERS:
            raise RequestError("backend", name, "no such backend", ", ".join(MAKERS))
        if reasons[name] is not None:
            raise BackendError(f"backend={name}: {reasons[name]}")
    here = [name for name, reason in reasons.items() if reason is None]
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    return [name for name in here if names is None or name in names], missing


def check_tokens(tokens: Sequence[int], shape: Shape) -> tuple[int, ...]:
    """Token counts in increasing order, each once.

    Raises:
        RequestError: one is no whole number of frames, or out of range.
    """
    size, least = shape.frame_tokens, shape.frame_tokens * shape.chunk
    for count in tokens:
        if not least <= count <= MAX_TOKENS:
            raise RequestError("tokens", count, "is out of range", f"{least} to {MAX_TOKENS}")
        if count % size:
            below = count // size * size
            reason = f"a latent frame has {size} here"
            raise RequestError("tokens", count, reason, f"nearest {below} or {below + size}")
    return tuple(sorted(set(tokens)))


def measure(
    tokens: Sequence[int],
    backends: Sequence[str],
    where: Where,
    errors: Mapping[tuple[str, str], float],
    told: Callable[[str], None],
) -> tuple[list[Row], list[dict[str, Any]]]:
    """All rows, and the cases that there was no memory for."""
    rows: list[Row] = []
    skipped: list[dict[str, Any]] = []
    # FlexAttention compiles for minutes on CUDA, so it comes last
    for backend in backends:
        for plan, text in PLANS.items():
            for count in tokens:
                told(f"{backend}, {plan}, {count} tokens")
                try:
                    seconds, peak = measure_case(text, backend, count, where)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    case = {"plan": plan, "backend": backend, "tokens": count}
                    skipped.append(case | {"reason": "out of memory"})
                    continue
                rows.append(Row(plan, backend, count, seconds, peak, errors.get((plan, backend))))
    return rows, skipped


def activation_errors(
    plans: Mapping[str, str], backends: Sequence[str], device: torch.device, dtype: str
) -> dict[tuple[str, str], float]:
    """Errors of plans and backends on the bundled model's queries, keys and values.

    Args:
        plans: text by name.
        backends, device, dtype: what to compute with.
    """
    manifest = find_model(DEFAULT_MODEL).manifest
    if manifest is None:
        raise ModelError(f"the bundled model {DEFAULT_MODEL} has no manifest")
    model = load_model(manifest, device=device, dtype=dtype, backend="sdpa")
    scope = Scope(
        window=manifest.window,
        sink=manifest.sink,
        chunk=manifest.chunk,
        tokens=model.shape.frame_tokens(manifest.size),
        layers=model.shape.transformer.layers,
        steps=manifest.schedule.steps,
    )
    pairs = [(name, backend) for backend in backends for name in plans]
    ways = [Way(resolve_attention(over_everything(plans[n]), scope), b) for n, b in pairs]
    tried = try_ways(ways, model, ERROR_CHUNKS, layout="global")
    return {pair: one.error for pair, one in zip(pairs, tried, strict=True)}


def slope(points: Iterable[tuple[float, float]]) -> float | None:
    """Slope of the line through (log x, log y) with the least squares; None of fewer than 2 x."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    return linear_regression(*zip(*logs, strict=True)).slope


def slopes_of(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """Slopes of seconds over tokens by plan, then by backend."""
    found: dict[str, dict[str, float | None]] = {}
    for plan, backend in dict.fromkeys((row.plan, row.backend) for row in rows):
        same = [(r.tokens, r.seconds) for r in rows if (r.plan, r.backend) == (plan, backend)]
        found.setdefault(plan, {})[backend] = slope(same)
    return found


def fastest(rows: Sequence[Row], plan: str) -> str:
    """The backend that takes the least time for a plan at most tokens."""
    longest = max(row.tokens for row in rows if row.plan == plan)
    best = min(
        (row for row in rows if (row.plan, row.tokens) == (plan, longest)), key=lambda r: r.seconds
    )
    return best.backend


def as_document(
    rows: Sequence[Row], where: Where, missing: Mapping[str, str], skipped: Sequence[Any]
) -> dict[str, Any]:
    """JSON form; ``slopes`` are those of each plan's fastest backend."""
    by_backend = slopes_of(rows)
    return {
        "device": str(where.device),
        "dtype": where.dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "shape": asdict(where.shape),
        "plans": dict(PLANS),
        "error_on": f"{DEFAULT_MODEL}, {ERROR_CHUNKS} chunks",
        "rows": [asdict(row) for row in rows],
        "slopes": {plan: found[fastest(rows, plan)] for plan, found in by_backend.items()},
        "slopes_by_backend": by_backend,
        "missing": dict(missing),
        "skipped": list(skipped),
    }


def bench_attention(
    tokens: Sequence[int] | None,
    backends: Sequence[str] | None,
    how: tuple[str | None, str | None],
    told: Callable[[str], None],
) -> dict[str, Any]:
    """``longtake bench attention``: the JSON document.

    Args:
        tokens: of the videos; None for what suits the device.
        backends: by name; None for all that are here.
        how: device and dtype by name.
        told: hears what is measured next.

    Raises:
        RequestError: of ``tokens`` or ``backend``.
        BackendError: a named backend does not run here.
        DeviceError: no such device or dtype.
    """
    device = choose_device(how[0])
    dtype = choose_dtype(how[1], device)
    cpu = device.type == "cpu"
    where = Where(device, dtype, CPU_SHAPE if cpu else DEVICE_SHAPE)
    counts = check_tokens(tokens or (CPU_TOKENS if cpu else DEVICE_TOKENS), where.shape)
    names, missing = backends_here(device, dtype, backends)
    told(f"errors on activations of {DEFAULT_MODEL}")
    errors = activation_errors(PLANS, names, device, dtype)
    rows, skipped = measure(counts, names, where, errors, told)
    return as_document(rows, where, missing, skipped)
