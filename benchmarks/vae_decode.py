"""Streaming VAE decode on the CPU: diffusers' conv3d against the stacked form.

Run ``python -m benchmarks.vae_decode [--quick] [--json]``. Both forms run in one process on equal
weights and latents, taking turns, so a busy machine slows both. The first turn is not counted.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from statistics import median

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from benchmarks.bundled import bundled_manifest
from benchmarks.report import Figure, Row, Scale, run
from longtake.video.codec import StreamingDecoder
from longtake.video.components import component_folder
from longtake.video.stacked_conv import prepare_vae

THREADS = (1, 2)
FORMS = ("conv3d", "stacked")
MIN_SPEEDUP = 1.0  # it is used where it wins
MAX_DIFFERENCE = 1e-5
SEED = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """Length of the stream in latent frames, and counted turns."""

    latent_frames: int
    repeats: int


SETTINGS = {
    Scale.FULL: Settings(16, 9),
    Scale.QUICK: Settings(8, 3),
    Scale.SMALLEST: Settings(2, 1),
}


@dataclass(slots=True)
class Turns:
    """What the turns of one form with one number of threads gave."""

    speeds: list[float]
    frames: Tensor
    state_bytes: int


def figure(scale: Scale) -> Figure:
    """Take turns over forms and thread counts."""
    use = SETTINGS[scale]
    manifest = bundled_manifest()
    folder = component_folder(manifest, "vae")
    stock, stacked = (
        AutoencoderKLWan.from_pretrained(folder, dtype=torch.float32).eval() for _ in FORMS
    )
    form = prepare_vae(stacked)
    turns = _take_turns(stock, stacked, use, manifest.size, manifest.chunk)
    rows = [row for threads in THREADS for row in _rows(threads, turns)]
    same = torch.equal(turns[1, "stacked"].frames, turns[2, "stacked"].frames)
    state = max(turn.state_bytes for turn in turns.values()) / 2**20
    width, height = manifest.size
    method = (
        f"{width}x{height}, {use.latent_frames} latent frames in chunks of {manifest.chunk}, "
        f"median of {use.repeats} turns; the ratio is the median of the turns' ratios. The engine "
        f"uses {form} here. Its bits with 1 and with 2 threads are "
        f"{'the same' if same else 'NOT the same'}; a stream's state takes {state:.1f} MiB."
    )
    return Figure("VAE decode, stacked against conv3d", rows, method)


def _take_turns(
    stock: AutoencoderKLWan,
    stacked: AutoencoderKLWan,
    use: Settings,
    size: tuple[int, int],
    chunk: int,
) -> dict[tuple[int, str], Turns]:
    step = 2 ** (len(stock.config.dim_mult) - 1) * (stock.config.patch_size or 1)
    shape = (1, stock.config.z_dim, use.latent_frames, size[1] // step, size[0] // step)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(SEED))
    turns: dict[tuple[int, str], Turns] = {}
    before = torch.get_num_threads()
    for turn in range(use.repeats + 1):
        for threads in THREADS:
            torch.set_num_threads(threads)
            for name, vae in zip(FORMS, (stock, stacked), strict=True):
                frames, fps, state = _decode(vae, latents, chunk)
                known = turns.setdefault((threads, name), Turns([], frames, state))
                if turn:
                    known.speeds.append(fps)
    torch.set_num_threads(before)
    return turns


def _decode(vae: AutoencoderKLWan, latents: Tensor, chunk: int) -> tuple[Tensor, float, int]:
    """Frames of a chunked decode, frames per second and the largest state between chunks."""
    decoder = StreamingDecoder(vae)
    parts: list[Tensor] = []
    state = 0
    began = time.perf_counter()
    for part in torch.split(latents, chunk, dim=2):
        parts.append(decoder.decode(part))
        state = max(state, decoder.snapshot().nbytes)
    seconds = time.perf_counter() - began
    frames = torch.cat(parts, dim=2)
    return frames, frames.shape[2] / seconds, state


def _rows(threads: int, turns: dict[tuple[int, str], Turns]) -> list[Row]:
    stock, stacked = (turns[threads, form] for form in FORMS)
    ratio = median(b / a for a, b in zip(stock.speeds, stacked.speeds, strict=True))
    difference = (stock.frames - stacked.frames).abs().max().item()
    where = f"{threads} thread{'s' if threads > 1 else ''}"
    return [
        Row(f"stacked / conv3d, {where}", ratio, "x", MIN_SPEEDUP, at_least=True),
        Row(f"stacked, {where}", median(stacked.speeds), "fps"),
        Row(f"conv3d, {where}", median(stock.speeds), "fps"),
        Row(f"largest difference of a value in -1..1, {where}", difference, "", MAX_DIFFERENCE),
    ]


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", {"vae_decode": figure}))
