"""Stage 1: fit the linear transform, write the untrained autoencoder, render the pool of latents.

``python -m training.papercut.prepare --clips 8000``; a second call adds what is missing. Each
shard holds normalised latents of the start of clips and of a later stretch of the same clips.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.papercut import autoencoder, data, transform
from training.papercut.distributed import Group, launch, log_to_stderr, save
from training.papercut.places import work_folder
from training.papercut.vocabulary import combinations, draw_combination

LOG = logging.getLogger(__name__)
SHARD_CLIPS = 250
START_LATENTS, LATER_LATENTS = 12, 9
LATEST_START_S = 90.0
FIT_CLIPS = 120


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line chose."""

    folder: Path
    clips: int
    minutes: float


def fresh_clips(rng: np.random.Generator, count: int, frames: int) -> Tensor:
    """Pixels ``[B, 3, T, H, W]`` of random trained combinations, from their first frame on."""
    times = data.frame_times(0, frames)
    videos = [data.render(data.draw_scene(draw_combination(rng), rng), times) for _ in range(count)]
    return transform.pixels(torch.from_numpy(np.stack(videos)))


def load_transform(folder: Path) -> transform.Transform:
    """The transform this folder's models were trained with."""
    return transform.Transform(**torch.load(folder / "transform.pt"))


def ensure_transform(folder: Path) -> None:
    """Fit the transform and build the autoencoder, once a folder."""
    if (folder / "transform.pt").exists():
        return
    torch.manual_seed(0)
    video = fresh_clips(np.random.default_rng(0), FIT_CLIPS, 13)
    fitted = transform.fit(video)
    LOG.info("linear ceiling %.2f dB", transform.ceiling_db(fitted, video[:24]))
    with autoencoder.stacked_convolutions():
        model = autoencoder.build(fitted, video[:50])
    model.save_pretrained(folder / "vae-init")
    save(fitted.state(), folder / "transform.pt")


def subject_weights(tracks: tuple[data.FloatArray, data.FloatArray], radius_px: float) -> Tensor:
    """How much of each latent cell the subject covers over its four frames: ``[T', H/8, W/8]``."""
    rows = np.arange(4, data.HEIGHT, 8, dtype=np.float32)[:, None]
    columns = np.arange(4, data.WIDTH, 8, dtype=np.float32)[None]
    masks = []
    for x, y in zip(*tracks, strict=True):
        across = np.abs(columns - x % data.WIDTH)
        across = np.minimum(across, data.WIDTH - across)
        masks.append(np.hypot(across, rows - y) < radius_px + 5)
    return torch.from_numpy(np.stack(masks))


def render_shard(fitted: transform.Transform, seed: int) -> dict[str, Tensor]:
    """Latents, subject masks and combination numbers of ``SHARD_CLIPS`` new clips."""
    rng = np.random.default_rng(1000 + seed)
    parts: dict[str, list[Tensor]] = {
        name: [] for name in ("start", "later", "start_mask", "later_mask", "what")
    }
    for _ in range(SHARD_CLIPS):
        scene = data.draw_scene(draw_combination(rng), rng)
        opening = data.frame_times(0, 1 + 4 * (START_LATENTS - 1))
        skipped = 4 * int(rng.integers(START_LATENTS, int(LATEST_START_S * data.FPS / 4))) + 1
        later = data.frame_times(skipped, 4 * LATER_LATENTS)
        for name, times, first in (("start", opening, True), ("later", later, False)):
            video = transform.pixels(torch.from_numpy(data.render(scene, times))[None])
            latents = fitted.normalise(transform.encode(fitted, video, first=first))
            parts[name].append(latents.half())
            middles = times[0::4] if first else times[1::4]
            parts[f"{name}_mask"].append(
                subject_weights(data.track(scene, middles), scene.radius_px)[None]
            )
        parts["what"].append(torch.tensor([scene.what.index]))
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def render_pool(group: Group, options: Options) -> None:
    """Render this process's share of the missing shards."""
    fitted = load_transform(options.folder)
    started, made = time.monotonic(), 0
    for number in range(group.rank, options.clips // SHARD_CLIPS, group.size):
        path = options.folder / "pool" / f"shard-{number:03d}.pt"
        if path.exists():
            continue
        if made and time.monotonic() - started >= options.minutes * 60:
            return
        save(render_shard(fitted, number), path)
        made += SHARD_CLIPS
        if group.leads:
            LOG.info("%d clips, %.1f a second", made, made / (time.monotonic() - started))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="folder for everything that is made")
    parser.add_argument("--clips", type=int, default=8000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="of rendering, this time")
    chosen = parser.parse_args()
    log_to_stderr()
    folder = work_folder(chosen.work)
    LOG.info(
        "working in %s; %d combinations, %d processors",
        folder,
        len(combinations()),
        os.cpu_count() or 1,
    )
    (folder / "pool").mkdir(exist_ok=True)
    ensure_transform(folder)
    options = Options(folder, chosen.clips, chosen.minutes)
    launch(render_pool, options, device="cpu", processes=os.cpu_count())


if __name__ == "__main__":
    main()
