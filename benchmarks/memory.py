"""Peak memory of a long video against a short one, each in a process of its own.

Run ``python -m benchmarks.memory [--quick] [--json] [--threads N]``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.report import Figure, Row, Scale, run

ROOT = Path(__file__).parents[1]
MIB = 2**20
MAX_GROWTH = 1.05
MAX_SLOWDOWN = 1.1
STEADY_FROM = 4  # the window of the default plan is full, and the first chunks' warm-up is over


@dataclass(frozen=True, slots=True)
class Settings:
    """Frames of the short and of the long video, how often each is made, chunks at either end."""

    short: int
    long: int
    repeats: int
    chunks: int


SETTINGS = {
    Scale.FULL: Settings(149, 597, 3, 12),
    Scale.QUICK: Settings(149, 293, 1, 8),
    Scale.SMALLEST: Settings(5, 13, 1, 1),
}


@dataclass(frozen=True, slots=True)
class Video:
    """What one process reported."""

    peak_mib: float
    chunk_s: list[float]

    def last_over_early(self, chunks: int) -> float:
        """Median time of the last chunks over that of the first steady ones."""
        early = self.chunk_s[STEADY_FROM : STEADY_FROM + chunks] or self.chunk_s[:1]
        return median(self.chunk_s[-chunks:]) / median(early)


def figure(scale: Scale) -> Figure:
    """Short and long take turns."""
    use = SETTINGS[scale]
    turns = [(_make(use.short), _make(use.long)) for _ in range(use.repeats)]
    ratio = median(long.peak_mib / short.peak_mib for short, long in turns)
    slower = median(long.last_over_early(use.chunks) for _, long in turns)
    rows = [
        Row(f"peak memory, {use.long} / {use.short} frames", ratio, "x", MAX_GROWTH),
        Row(f"peak of {use.short} frames", median(short.peak_mib for short, _ in turns), "MiB"),
        Row(f"peak of {use.long} frames", median(long.peak_mib for _, long in turns), "MiB"),
        Row(f"last chunks / steady early ones of {use.long} frames", slower, "x", MAX_SLOWDOWN),
    ]
    method = (
        "Each video in a new process, by longtake.video.generate to an mp4; peak resident memory "
        f"as the kernel counted it; medians of {use.repeats}, short and long taking turns. The "
        f"last row is the median of the last {use.chunks} chunks over that of {use.chunks} from "
        "the window's filling on, encoding included, in one and the same video: on a busy machine "
        "benchmarks.length, which interleaves both ends, says more."
    )
    return Figure("Memory and time of a long video", rows, method)


def _make(frames: int) -> Video:
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{frames}.mp4"
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory_child", str(frames), str(path)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    report = json.loads(done.stdout.splitlines()[-1])
    return Video(report["peak_bytes"] / MIB, report["chunk_s"])


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", {"memory": figure}))
