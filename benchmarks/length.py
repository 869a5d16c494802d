"""Time per chunk against the length of the video, for the window and the global plan.

Run ``python -m benchmarks.length [--quick] [--json] [--threads N]``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from statistics import median

from benchmarks.bundled import (
    default_plan,
    first_steady,
    frames_of_chunks,
    load_bundled,
    next_chunk,
    timed,
)
from benchmarks.report import Figure, Row, Scale, Table, run
from longtake.video.components import CausalModel
from longtake.video.plan import Plan
from longtake.video.rollout import Rollout

CHUNKS = {Scale.FULL: 75, Scale.QUICK: 24, Scale.SMALLEST: 6}
PAIRS = {Scale.FULL: 15, Scale.QUICK: 7, Scale.SMALLEST: 1}
PARTS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
NEIGHBOURS = 2
MAX_GROWTH = 1.1


def figure(scale: Scale) -> Figure:
    """Two plans grow side by side; towards the end an early chunk is made again and again."""
    model = load_bundled()
    frames = frames_of_chunks(model.manifest, model.shape, CHUNKS[scale])
    window = default_plan(model, frames)
    whole = default_plan(model, frames, attention="global")
    rollouts = [Rollout(window, model), Rollout(whole, model)]
    seconds: list[list[float]] = []
    for _ in range(CHUNKS[scale] - PAIRS[scale]):
        seconds.append([timed(partial(next_chunk, rollout))[1] for rollout in rollouts])
    early = _EarlyChunk(window, model)
    ratios: list[float] = []
    for turn in range(PAIRS[scale]):
        steady = early.seconds() if turn % 2 else 0.0
        line = [timed(partial(next_chunk, rollout))[1] for rollout in rollouts]
        seconds.append(line)
        ratios.append(line[0] / (steady or early.seconds()))
    last = seconds[-PAIRS[scale] :]
    rows = [
        Row("last chunks / a steady early chunk", median(ratios), "x", MAX_GROWTH),
        Row("global plan, last chunks", 1e3 * median(line[1] for line in last), "ms"),
        Row("window plan, last chunks", 1e3 * median(line[0] for line in last), "ms"),
    ]
    method = (
        f"{frames} frames in {CHUNKS[scale]} chunks, decode included; both plans take turns chunk "
        f"by chunk. For the ratio the last {PAIRS[scale]} chunks of the window plan take turns "
        f"with chunk {early.index + 1} of another rollout of it, restored and made again each "
        "time; the ratio is the median of the pairs' ratios. The table holds medians of up to "
        f"{2 * NEIGHBOURS + 1} neighbouring chunks."
    )
    return Figure("Time per chunk against length", rows, method, _table(window, seconds))


class _EarlyChunk:
    """The first chunk after the window filled up, again and again."""

    def __init__(self, plan: Plan, model: CausalModel) -> None:
        self._rollout = Rollout(plan, model)
        self.index = first_steady(plan)
        for _ in range(self.index):
            next_chunk(self._rollout)
        self._state = self._rollout.snapshot()
        self.seconds()

    def seconds(self) -> float:
        """Time of making it once more."""
        self._rollout.restore(self._state)
        return timed(partial(next_chunk, self._rollout))[1]


def _table(plan: Plan, seconds: Sequence[Sequence[float]]) -> Table:
    first, last = first_steady(plan), len(seconds) - 1
    lines: dict[int, tuple[float, ...]] = {}
    for part in PARTS:
        index = round(first + part * (last - first))
        near = seconds[max(first, index - NEIGHBOURS) : index + NEIGHBOURS + 1]
        made = sum(spec.keep for spec in plan.chunks if spec.index <= index)
        length = (1 + plan.stride * (made - 1)) / plan.fps
        lines[index] = (
            index + 1,
            length,
            *(1e3 * median(line[i] for line in near) for i in (0, 1)),
        )
    return Table(("chunk", "video s", "window ms", "global ms"), tuple(lines.values()))


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", {"length": figure}))
