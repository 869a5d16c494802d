"""What a benchmark hands back, how it is printed, and the command line all of them share.

Targets are judged and printed, never enforced: a missed one does not change the exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from time import perf_counter
from typing import Any

import torch


class Scale(Enum):
    """How long a benchmark may take."""

    FULL = "full"  # the figures that docs/log.md quotes
    QUICK = "quick"  # under two minutes for all; noisier
    SMALLEST = "smallest"  # does it run at all: the tests' setting


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity.

    Attributes:
        name: what was measured.
        value: the number, in ``unit``.
        unit: unit of value and target.
        target: limit it is judged by; None where it is only reported.
        at_least: True where the target is a lower limit.
        note: how it was measured, where the name leaves that open.
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        """``met`` or ``missed``; empty without a target."""
        if self.target is None:
            return ""
        met = self.value >= self.target if self.at_least else self.value <= self.target
        return "met" if met else "missed"

    def line(self) -> str:
        """``engine overhead | 1.03 x | target <= 1.05 x | met``."""
        sign = ">=" if self.at_least else "<="
        target = "" if self.target is None else f"target {sign} {self.target:g} {self.unit}"
        cells = (self.name, f"{shown(self.value)} {self.unit}", target, self.verdict, self.note)
        return " | ".join(cell.strip() for cell in cells if cell)

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "target": self.target,
            "target_is": "at least" if self.at_least else "at most",
            "verdict": self.verdict,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Table:
    """One quantity against another: column names and lines of numbers."""

    head: tuple[str, ...]
    lines: tuple[tuple[float, ...], ...]

    def text(self) -> str:
        """As Markdown."""
        return markdown(self.head, [[shown(value) for value in line] for line in self.lines])


@dataclass(frozen=True, slots=True)
class Figure:
    """The rows of one benchmark, how they were measured, and a table where one says more."""

    title: str
    rows: Sequence[Row]
    method: str
    table: Table | None = None

    def text(self) -> str:
        """Title, method, a line for each row, the table."""
        lines = "\n".join(row.line() for row in self.rows)
        table = f"\n{self.table.text()}\n" if self.table else ""
        return f"## {self.title}\n\n{self.method}\n\n{lines}\n{table}"

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "title": self.title,
            "method": self.method,
            "rows": [row.as_dict() for row in self.rows],
            "table": asdict(self.table) if self.table else None,
        }


Benchmark = Callable[[Scale], Figure]


def shown(value: float) -> str:
    """Three digits; a whole number as it is."""
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:#.3g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    table = [list(head), *(list(row) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    padded = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in table]
    return "\n".join("| " + " | ".join(row) + " |" for row in padded)


def machine() -> dict[str, Any]:
    """What the figures were measured on; the load says whether it was quiet."""
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def run(description: str, benchmarks: Mapping[str, Benchmark]) -> int:
    """Parse the common options, measure, print; the whole command line of a benchmark.

    Args:
        description: for ``--help``.
        benchmarks: name to function, in the order they run.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(benchmarks)} (all)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--threads", type=int, help="CPU threads (torch's own choice)")
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--quick", action="store_true", help="shorter and noisier")
    scale.add_argument("--smallest", action="store_true", help="only shows that it runs")
    options = parser.parse_args()
    for part in options.parts:
        if part not in benchmarks:
            parser.error(f"{part}: no such part; there are {', '.join(benchmarks)}")
    chosen = {name: benchmarks[name] for name in options.parts or benchmarks}
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    size = Scale.QUICK if options.quick else Scale.SMALLEST if options.smallest else Scale.FULL
    host = machine()
    if not options.json:
        facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in host.items())
        sys.stdout.write(f"{facts}; scale {size.value}\n\n")
    figures: dict[str, Any] = {}
    for name, benchmark in chosen.items():
        began = perf_counter()
        figure = benchmark(size)
        sys.stderr.write(f"{name}: {perf_counter() - began:.0f} s\n")
        figures[name] = figure.as_dict()
        if not options.json:
            sys.stdout.write(f"{figure.text()}\n")
            sys.stdout.flush()
    if options.json:
        document = {"machine": host, "scale": size.value, "figures": figures}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return 0
