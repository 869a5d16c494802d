"""Quality of the model on combinations it was never trained on, read off pixels by the judge.

``python -m training.papercut.evaluate`` makes 120 videos of 81 frames, takes 40 of them on to 961,
and prints one row a measure: at 5 s, at 60 s (the last 81 frames). ``--quick`` makes 24 and 4.
Seeds are fixed. Progress goes to standard error, the table alone to standard output.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from training.papercut import data
from training.papercut.autoencoder import stacked_convolutions
from training.papercut.causal import CHUNK
from training.papercut.distributed import log_to_stderr
from training.papercut.judge import Verdict, judge, shares
from training.papercut.places import work_folder
from training.papercut.sample import Decoder, Sampler, Settings, load_checkpoint, rollout
from training.papercut.vocabulary import Combination, caption, combinations

LOG = logging.getLogger(__name__)
SHORT_FRAMES, LONG_FRAMES = 81, 961
ROWS = {
    "colour of the subject right": "colour",
    "kind of subject right": "subject",
    "motion right": "motion",
    "background right": "place",
    "all four right": "all",
}

Results = list[tuple[Combination, Verdict]]


@dataclass(frozen=True, slots=True)
class Amount:
    """How many videos, in what groups."""

    videos: int
    long_videos: int
    batch: int


def prompts_for(count: int) -> list[Combination]:
    """Held-out combinations in a fixed shuffled order, over again when there are more videos."""
    cells = [cell for cell in combinations() if cell.held_out]
    order = np.random.default_rng(11).permutation(len(cells))
    return [cells[int(order[index % len(cells)])] for index in range(count)]


def chunks_for(frames: int) -> int:
    """Chunks that hold a number of frames."""
    return -(-(1 + (frames - 1) // 4) // CHUNK)


def clips(
    sampler: Sampler, cells: list[Combination], seed: int, frames: int, settings: Settings
) -> Iterator[data.FrameArray]:
    """Decoded frames ``[B, T, 3, H, W]`` chunk by chunk."""
    decoder = Decoder(sampler.vae)
    prompts = [caption(cell, 0) for cell in cells]
    for latents in rollout(sampler, prompts, seed, chunks_for(frames), settings):
        yield decoder.frames(latents)


def run(
    sampler: Sampler, amount: Amount, settings: Settings
) -> tuple[Results, Results, list[data.FrameArray]]:
    """Judge all videos; also returns the first frames for a contact sheet."""
    cells = prompts_for(amount.videos)
    short: Results = []
    long: Results = []
    shown: list[data.FrameArray] = []
    started = time.monotonic()
    with stacked_convolutions():
        for first in range(0, amount.videos, amount.batch):
            group = cells[first : first + amount.batch]
            stays = first < amount.long_videos
            recent: data.FrameArray | None = None
            made = 0
            for part in clips(
                sampler, group, 100 + first, LONG_FRAMES if stays else SHORT_FRAMES, settings
            ):
                recent = (
                    part if recent is None else np.concatenate([recent, part], 1)[:, -SHORT_FRAMES:]
                )
                made += part.shape[1]
                if made == SHORT_FRAMES:
                    short += [
                        (cell, judge(video)) for cell, video in zip(group, recent, strict=True)
                    ]
                    shown += list(recent)
            if stays and recent is not None:
                long += [(cell, judge(video)) for cell, video in zip(group, recent, strict=True)]
            LOG.info(
                "%d of %d videos, %.0f s",
                first + len(group),
                amount.videos,
                time.monotonic() - started,
            )
    return short, long, shown


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
    parser.add_argument("--work", type=Path, help="folder for everything that is made")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--videos", type=int)
    parser.add_argument("--long-videos", type=int)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--shift", type=float, default=3.0)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--sheet", type=Path, help="write a contact sheet of the first videos here")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    log_to_stderr()
    torch.set_num_threads(chosen.threads)
    sampler = load_checkpoint(work_folder(chosen.work))
    amount = Amount(24, 4, 4) if chosen.quick else Amount(120, 40, 8)
    if chosen.videos is not None:
        amount = Amount(chosen.videos, chosen.long_videos or 0, min(8, chosen.videos))
    settings = Settings(steps=chosen.steps, shift=chosen.shift, guidance=chosen.guidance)
    short, long, shown = run(sampler, amount, settings)
    for cell, verdict in short:
        LOG.info(
            "asked %s %s %s %s: %s", cell.colour, cell.subject, cell.motion, cell.place, verdict
        )
    if chosen.sheet is not None:
        data.sheet(shown[:12]).save(chosen.sheet)
    sys.stdout.write(table(short, long) + "\n")


if __name__ == "__main__":
    main()
