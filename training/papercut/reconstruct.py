"""What the autoencoder keeps: PSNR on unseen clips, and whether the judge still reads them.

``python -m training.papercut.reconstruct`` encodes and decodes rendered clips of combinations that
were never trained on, with the bundled VAE in its stock form, and prints three lines.
"""

from __future__ import annotations

import argparse
import logging
import sys

import numpy as np
import torch

from longtake.video.codec import StreamingDecoder, StreamingEncoder, from_uint8, to_uint8
from longtake.video.components import load_model
from longtake.video.numerics import configure
from longtake.video.source import find_model
from training.papercut import data
from training.papercut.distributed import log_to_stderr
from training.papercut.judge import judge, shares
from training.papercut.vocabulary import draw_combination

LOG = logging.getLogger(__name__)
FRAMES = 81
SEED = 7777


def psnr_db(first: torch.Tensor, second: torch.Tensor) -> float:
    """Peak signal to noise ratio of uint8 pictures."""
    error = (first.float() - second.float()).pow(2).mean()
    return float(10 * torch.log10(255.0**2 / error))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="papercut", help="name or folder (default: the bundled)")
    parser.add_argument("--clips", type=int, default=60)
    chosen = parser.parse_args()
    log_to_stderr()
    configure()
    manifest = find_model(chosen.model).manifest
    if manifest is None:
        raise SystemExit(f"{chosen.model} has no manifest")
    model = load_model(manifest)
    rng = np.random.default_rng(SEED)
    firsts, laters, results = [], [], []
    for number in range(chosen.clips):
        what = draw_combination(rng, held_out=True)
        clip = data.render(data.draw_scene(what, rng), data.frame_times(0, FRAMES))
        pixels = torch.from_numpy(clip.transpose(0, 2, 3, 1).copy())
        latents = StreamingEncoder(model.vae).encode(from_uint8(pixels[None]))
        made = to_uint8(StreamingDecoder(model.vae).decode(latents))[0]
        firsts.append(psnr_db(made[:1], pixels[:1]))
        laters.append(psnr_db(made[1:], pixels[1:]))
        results.append((what, judge(made.numpy().transpose(0, 3, 1, 2))))
        LOG.info("%d of %d clips", number + 1, chosen.clips)
    sys.stdout.write(f"PSNR of first frames | {np.mean(firsts):.2f} dB\n")
    sys.stdout.write(f"PSNR of later frames | {np.mean(laters):.2f} dB\n")
    right = shares(results)["all"]
    sys.stdout.write(f"judge on reconstructions, all four right | {right:.1f} %\n")


if __name__ == "__main__":
    main()
