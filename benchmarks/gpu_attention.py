"""Attention plans and backends at the shapes of Wan 1.3B and 14B, random data, bf16, on one GPU.

Run ``python -m benchmarks.gpu_attention [--json] [--budget-s S] [--dry-run]``. Every row is one
layer's self-attention over all chunks of a video (``longtake bench attention`` says how). A backend
that is not there gets a line that says so, and what the time budget leaves out is named. The dry
run takes tiny shapes on the CPU and only shows that it works.

The error is that of the last chunk's output against exact attention to everything, on random data:
keys that mean nothing lose more by being left out than real ones do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from benchmarks.report import markdown, shown
from longtake.video.attention_bench import PLANS, Row, backends_here, slopes_of
from longtake.video.attention_video import Shape, Where, measure_case, output_error

BUDGET_S = 285.0
LATENT_FRAMES = (21, 42, 84, 168)  # 5, 10, 21 and 42 s at 16 frames a second
TINY_FRAMES = (6, 12)
# 480x832: 1560 tokens a latent frame; LongLive's window and sink
SHAPES = {
    "Wan2.1-1.3B": Shape(heads=12, head_dim=128, frame_tokens=1560, chunk=3, window=12, sink=3),
    "Wan2.1-14B": Shape(heads=40, head_dim=128, frame_tokens=1560, chunk=3, window=12, sink=3),
}
TINY = {
    "tiny, 2 heads": Shape(heads=2, head_dim=16, frame_tokens=16, chunk=3, window=6, sink=1),
    "tiny, 5 heads": Shape(heads=5, head_dim=16, frame_tokens=16, chunk=3, window=6, sink=1),
}
HEAD = ("shape", "plan", "backend", "tokens", "seconds", "peak MiB", "error", "note")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table: what was measured, or why not."""

    shape: str
    plan: str
    backend: str
    tokens: int
    row: Row | None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """As printed."""
        head = (self.shape, self.plan, self.backend, str(self.tokens))
        if self.row is None:
            return (*head, "", "", "", self.note)
        peak, error = self.row.peak_bytes, self.row.error
        return (
            *head,
            shown(self.row.seconds),
            "" if peak is None else shown(peak / MIB),
            "" if error is None else f"{error:.1e}",
            self.note,
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON form: the keys of ``longtake bench attention``, shape and note."""
        found = asdict(self.row) if self.row is not None else {}
        head = {"plan": self.plan, "backend": self.backend, "tokens": self.tokens}
        return {"shape": self.shape, **head, **found, "note": self.note}


def lines(
    shapes: dict[str, Shape], frames: Sequence[int], where: tuple[torch.device, str], until: float
) -> list[Line]:
    """Every case until the deadline; FlexAttention, which compiles for long, after all others."""
    device, dtype = where
    here, missing = backends_here(device, dtype)
    found = [
        Line(name, "", backend, 0, None, why) for name in shapes for backend, why in missing.items()
    ]
    for backend in here:
        for name, shape in shapes.items():
            place = Where(device, dtype, shape)
            for plan in PLANS:
                for count in frames:
                    found.append(_case((name, plan, backend), count, place, until))
                    sys.stderr.write(f"{' '.join(found[-1].cells())}\n")
    return found


def _case(what: tuple[str, str, str], frames: int, where: Where, until: float) -> Line:
    name, plan, backend = what
    tokens = frames * where.shape.frame_tokens
    if perf_counter() > until:
        return Line(name, plan, backend, tokens, None, "skipped: the time budget is spent")
    try:
        seconds, peak = measure_case(PLANS[plan], backend, tokens, where)
        error = output_error(PLANS[plan], backend, tokens, where)
    except Exception as caught:  # a case must not take the others with it, whatever it met
        text = (str(caught).strip().splitlines() or [""])[0]
        return Line(name, plan, backend, tokens, None, f"{type(caught).__name__}: {text[:160]}")
    finally:
        if where.device.type == "cuda":
            torch.cuda.empty_cache()
    return Line(name, plan, backend, tokens, Row(plan, backend, tokens, seconds, peak, error))


def main() -> int:
    """Measure all cases; print a table and slopes, or JSON."""
    began = perf_counter()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help=f"seconds for all ({BUDGET_S:.0f})"
    )
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry-run shows that it works")
    device = torch.device("cpu" if options.dry_run else "cuda")
    dtype = "fp32" if options.dry_run else "bf16"
    shapes, frames = (TINY, TINY_FRAMES) if options.dry_run else (SHAPES, LATENT_FRAMES)
    facts = {
        "device": "CPU" if options.dry_run else torch.cuda.get_device_name(device),
        "dtype": dtype,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    found = lines(shapes, frames, (device, dtype), began + options.budget_s)
    slopes = {
        name: slopes_of([one.row for one in found if one.row is not None and one.shape == name])
        for name in shapes
    }
    if options.json:
        document = {
            "conditions": facts,
            "shapes": {name: asdict(shape) for name, shape in shapes.items()},
            "rows": [line.as_dict() for line in found],
            "slopes": slopes,
            "seconds": perf_counter() - began,
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return 0
    told = ", ".join(f"{name} {value}" for name, value in facts.items() if value)
    table = markdown(HEAD, [line.cells() for line in found])
    steep = [
        (name, plan, backend, "" if value is None else f"{value:.2f}")
        for name, plans in slopes.items()
        for plan, by_backend in plans.items()
        for backend, value in by_backend.items()
    ]
    second = markdown(("shape", "plan", "backend", "log time / log tokens"), steep)
    sys.stdout.write(f"{told}\n\n{table}\n\n{second}\n\n{perf_counter() - began:.0f} s in all\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
