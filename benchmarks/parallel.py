"""One forward by two ranks of one thread each, against one rank of one thread.

Run ``python -m benchmarks.parallel [--quick] [--json]``. The ranks are processes over gloo; a CPU
with fewer than two free cores cannot show what they gain. Worked out, the full form takes 3 to 4
minutes on two quiet cores of 50 GFLOPS each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.report import Figure, Row, Scale, run

ROOT = Path(__file__).parents[1]
LAYOUTS = {"ulysses=2": 1.7, "ring=2": 1.6}
RANKS = 2
LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Settings:
    """A random model and a chunk: widths, latents (h, w), frames seen before it, and repeats."""

    layers: int
    heads: int
    head_dim: int
    ffn_dim: int
    latent: tuple[int, int]
    past: int
    repeats: int


SETTINGS = {
    # as wide as Wan 2.1 1.3B, four layers of it
    Scale.FULL: Settings(4, 12, 128, 6144, (64, 86), 0, 3),
    Scale.QUICK: Settings(1, 12, 128, 6144, (64, 86), 0, 2),
    Scale.SMALLEST: Settings(1, 2, 16, 64, (8, 8), 1, 1),
}


def figure(scale: Scale) -> Figure:
    """Layouts take turns with one rank, in the same processes."""
    use = SETTINGS[scale]
    measured = _measure(use)
    alone = measured["alone"]
    rows = []
    for layout, target in LAYOUTS.items():
        gain = median(a / b for a, b in zip(alone, measured[layout], strict=True))
        rows.append(Row(f"one rank / {layout}", gain, "x", target, at_least=True))
    rows += [Row(f"one forward, {name}", median(times), "s") for name, times in measured.items()]
    rows.append(Row("parameters", measured["parameters"][0] / 1e6, "M"))
    rows = [row for row in rows if row.name != "one forward, parameters"]
    tokens = 3 * use.latent[0] * use.latent[1] // 4
    method = (
        f"Random weights, {use.layers} layers of {use.heads} heads; a chunk of {tokens} tokens "
        f"that sees {use.past} latent frames before it. Medians of {use.repeats} rounds, in each "
        "of which all take a turn, after a small one to warm up; one thread a process."
    )
    return Figure("Two ranks", rows, method)


def _measure(use: Settings) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        told = json.dumps({**asdict(use), "layouts": list(LAYOUTS)})
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = []
        try:
            for rank in range(RANKS):
                line = [sys.executable, "-m", "benchmarks.parallel_child"]
                line += [str(rank), str(RANKS), folder, told]
                processes.append(subprocess.Popen(line, cwd=ROOT, env=environment))
            codes = [process.wait(LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        measured: dict[str, list[float]] = json.loads((Path(folder) / "result.json").read_text())
        return measured


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", {"parallel": figure}))
