"""Quality on combinations that were never trained on: made by the engine, judged off pixels.

``python -m training.papercut.evaluate`` (``make eval``) makes 120 videos of 81 frames with the
bundled model through ``longtake.video.rollout``, takes 40 of them on to 961 frames, and prints one
row a measure: at 5 s, at 60 s (the last 81 frames). ``--quick`` makes 24 and 4. Seeds are fixed, so
two runs with another ``--attention`` (``topk:0.5``, ``global``) differ in that alone.
Progress goes to standard error, the table alone to standard output.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from longtake.video.components import CausalModel, load_model
from longtake.video.numerics import configure
from longtake.video.plan import make_plan
from longtake.video.request import VideoRequest
from longtake.video.rollout import rollout
from longtake.video.source import find_model
from training.papercut import data
from training.papercut.distributed import log_to_stderr
from training.papercut.judge import Verdict, judge, shares
from training.papercut.vocabulary import Combination, caption, combinations

LOG = logging.getLogger(__name__)
SHORT_FRAMES, LONG_FRAMES = 81, 961
FIRST_SEED = 100
SHEET_ROWS = 12
ROWS = {
    "colour of the subject right": "colour",
    "kind of subject right": "subject",
    "motion right": "motion",
    "background right": "place",
    "all four right": "all",
}

Results = list[tuple[Combination, Verdict]]


@dataclass(frozen=True, slots=True)
class Take:
    """One video to make and judge; ``guidance`` and ``attention`` None are the model's own."""

    number: int
    cell: Combination
    frames: int
    model: str
    guidance: float | None
    attention: str | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """What the judge says of a take: of its first 81 frames, and of its last if it is long."""

    take: Take
    short: Verdict
    long: Verdict | None
    shown: data.FrameArray


def prompts_for(count: int) -> list[Combination]:
    """Held-out combinations in a fixed shuffled order, over again when there are more videos."""
    cells = [cell for cell in combinations() if cell.held_out]
    order = np.random.default_rng(11).permutation(len(cells))
    return [cells[int(order[index % len(cells)])] for index in range(count)]


@lru_cache(maxsize=1)
def _model(name: str) -> CausalModel:
    configure(1)
    manifest = find_model(name).manifest
    if manifest is None:
        raise SystemExit(f"{name} has no manifest")
    return load_model(manifest)


def pieces(take: Take) -> Iterator[data.FrameArray]:
    """Frames uint8 ``[T, 3, H, W]`` of one chunk after the other, from the engine."""
    model = _model(take.model)
    request = VideoRequest(
        prompt=caption(take.cell),
        num_frames=take.frames,
        seed=FIRST_SEED + take.number,
        model=take.model,
        guidance_scale=take.guidance,
        attention=take.attention,
    )
    plan = make_plan(request, model.manifest, model.shape)
    for chunk in rollout(plan, model):
        yield chunk.frames.numpy().transpose(0, 3, 1, 2)


def make(take: Take) -> Judged:
    """Make one video and judge it."""
    recent: data.FrameArray | None = None
    opening: data.FrameArray | None = None
    for part in pieces(take):
        recent = part if recent is None else np.concatenate([recent, part])
        if opening is None and len(recent) >= SHORT_FRAMES:
            opening = recent[:SHORT_FRAMES]
        recent = recent[-SHORT_FRAMES:]
    if recent is None or opening is None:
        raise SystemExit(f"a take has at least {SHORT_FRAMES} frames, not {take.frames}")
    long = judge(recent) if take.frames > SHORT_FRAMES else None
    moments = np.linspace(0, SHORT_FRAMES - 1, 8).round().astype(int)
    return Judged(take, judge(opening), long, opening[moments])


def run(takes: list[Take], processes: int) -> list[Judged]:
    """All takes, the longest first, in single-thread processes; in the order asked for."""
    context = multiprocessing.get_context("spawn")
    started = time.monotonic()
    done: dict[int, Judged] = {}
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        ordered = sorted(takes, key=lambda take: -take.frames)
        for future in as_completed([pool.submit(make, take) for take in ordered]):
            judged = future.result()
            done[judged.take.number] = judged
            cell, verdict = judged.take.cell, judged.short
            LOG.info(
                "%d of %d videos, %.0f s; asked %s %s %s %s, got %s %s %s %s (%.2f)",
                len(done),
                len(takes),
                time.monotonic() - started,
                *(cell.colour, cell.subject, cell.motion, cell.place),
                *(verdict.colour, verdict.subject, verdict.motion, verdict.place),
                verdict.overlap,
            )
    return [done[take.number] for take in takes]


def table(short: Results, long: Results) -> str:
    """One row a line: measure, at 5 s, at 60 s."""
    at_5s, at_60s = shares(short), shares(long) if long else None
    lines = []
    for row, name in ROWS.items():
        later = f"{at_60s[name]:.1f} %" if at_60s else "not run"
        lines.append(f"{row} | {at_5s[name]:.1f} % | {later}")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="papercut", help="name or folder (default: the bundled)")
    parser.add_argument("--quick", action="store_true", help="24 videos, 4 of them long")
    parser.add_argument("--videos", type=int, help="how many, in place of 120")
    parser.add_argument(
        "--long-videos", type=int, default=0, help="with --videos: how many to 60 s"
    )
    parser.add_argument("--guidance", type=float, help="default: the model's own")
    parser.add_argument("--attention", metavar="PLAN", help="as of longtake generate")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet of twelve videos here")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    chosen = parser.parse_args()
    log_to_stderr()
    count, stays = (24, 4) if chosen.quick else (120, 40)
    if chosen.videos is not None:
        count, stays = chosen.videos, chosen.long_videos
    takes = [
        Take(
            number,
            cell,
            LONG_FRAMES if number < stays else SHORT_FRAMES,
            chosen.model,
            chosen.guidance,
            chosen.attention,
        )
        for number, cell in enumerate(prompts_for(count))
    ]
    judged = run(takes, chosen.processes)
    if chosen.sheet is not None:
        data.sheet([one.shown for one in judged[:SHEET_ROWS]]).save(chosen.sheet)
    short = [(one.take.cell, one.short) for one in judged]
    long = [(one.take.cell, one.long) for one in judged if one.long is not None]
    sys.stdout.write(table(short, long) + "\n")


if __name__ == "__main__":
    main()
