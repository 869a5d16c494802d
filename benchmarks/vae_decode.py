"""Streaming VAE decode on the CPU: diffusers' conv3d against the stacked form, side by side.

    python benchmarks/vae_decode.py [--json] [--repeats N] [--latent-frames N] [--vae FOLDER]

Both forms run in one process on equal weights and latents, taking turns, so a busy machine slows
both; the figure is the median over the turns. The first turn of each is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from rich.console import Console
from rich.table import Table
from torch import Tensor

import longtake.video
from longtake.video.codec import StreamingDecoder
from longtake.video.stacked_conv import prepare_vae

BUNDLED_VAE = Path(longtake.video.__file__).parent / "papercut" / "vae"
WIDTH, HEIGHT = 128, 80
CHUNK = 2
SEED = 0


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one thread count.

    Attributes:
        ratio: median over the turns of stacked speed / conv3d speed in the same turn.
        max_difference: largest absolute difference of two decoded values (their range is 2).
    """

    threads: int
    conv3d_fps: float
    stacked_fps: float
    ratio: float
    max_difference: float


@dataclass(frozen=True, slots=True)
class Report:
    """What was run, and a row for each thread count."""

    size: str
    latent_frames: int
    repeats: int
    torch_version: str
    stacked_form: str
    same_bits_for_all_threads: bool
    peak_state_bytes: int
    rows: list[Row]


def decode_stream(vae: AutoencoderKLWan, latents: Tensor) -> tuple[Tensor, float, int]:
    """Frames of a chunked decode, frames per second and the largest state between chunks."""
    decoder = StreamingDecoder(vae)
    parts: list[Tensor] = []
    state = 0
    start = time.perf_counter()
    for chunk in torch.split(latents, CHUNK, dim=2):
        parts.append(decoder.decode(chunk))
        state = max(state, decoder.snapshot().nbytes)
    seconds = time.perf_counter() - start
    frames = torch.cat(parts, dim=2)
    return frames, frames.shape[2] / seconds, state


def measure(folder: Path, latent_frames: int, repeats: int) -> Report:
    """Take turns over forms and thread counts."""
    stock, stacked = (
        AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch.float32).eval() for _ in "ab"
    )
    form = prepare_vae(stacked)
    step = 2 ** (len(stock.config.dim_mult) - 1) * (stock.config.patch_size or 1)
    shape = (1, stock.config.z_dim, latent_frames, HEIGHT // step, WIDTH // step)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(SEED))
    speeds: dict[tuple[int, str], list[float]] = {}
    frames: dict[tuple[int, str], Tensor] = {}
    peak = 0
    for turn in range(repeats + 1):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name, vae in (("conv3d", stock), ("stacked", stacked)):
                frames[threads, name], fps, state = decode_stream(vae, latents)
                peak = max(peak, state)
                if turn:
                    speeds.setdefault((threads, name), []).append(fps)
    return Report(
        size=f"{WIDTH}x{HEIGHT}",
        latent_frames=latent_frames,
        repeats=repeats,
        torch_version=torch.__version__,
        stacked_form=form,
        same_bits_for_all_threads=torch.equal(frames[1, "stacked"], frames[2, "stacked"]),
        peak_state_bytes=peak,
        rows=[make_row(threads, speeds, frames) for threads in (1, 2)],
    )


def make_row(
    threads: int,
    speeds: dict[tuple[int, str], list[float]],
    frames: dict[tuple[int, str], Tensor],
) -> Row:
    """Medians and the difference at one thread count."""
    stock, stacked = speeds[threads, "conv3d"], speeds[threads, "stacked"]
    difference = (frames[threads, "conv3d"] - frames[threads, "stacked"]).abs().max()
    return Row(
        threads=threads,
        conv3d_fps=statistics.median(stock),
        stacked_fps=statistics.median(stacked),
        ratio=statistics.median(b / a for a, b in zip(stock, stacked, strict=True)),
        max_difference=difference.item(),
    )


def show(report: Report) -> None:
    """The report as a table."""
    table = Table(
        title=f"streaming VAE decode, {report.size}, {report.latent_frames} latent frames"
    )
    for name in ("threads", "conv3d fps", f"{report.stacked_form} fps", "ratio", "max difference"):
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(
            str(row.threads),
            f"{row.conv3d_fps:.1f}",
            f"{row.stacked_fps:.1f}",
            f"{row.ratio:.2f}",
            f"{row.max_difference:.1e}",
        )
    console = Console()
    console.print(table)
    console.print(f"peak feature state: {report.peak_state_bytes / 2**20:.2f} MiB")
    console.print(f"stacked, 1 and 2 threads, same bits: {report.same_bits_for_all_threads}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repeats", type=int, default=5, help="counted turns (5)")
    parser.add_argument("--latent-frames", type=int, default=8, help="length of the stream (8)")
    parser.add_argument("--vae", type=Path, default=BUNDLED_VAE, help="folder in diffusers format")
    options = parser.parse_args()
    report = measure(options.vae, options.latent_frames, options.repeats)
    if options.json:
        sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
    else:
        show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
