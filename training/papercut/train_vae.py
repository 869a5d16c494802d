"""Stage 2: fine-tune the decoder; the encoder is the frozen linear transform.

``python -m training.papercut.train_vae --minutes 15``; the minutes are the whole budget, so a run
that was cut off goes on where it was, and a larger budget goes on from a finished one. Images
first, then clips; the paths that carry the least-squares solution move slowly (prototype README,
"Stability": one learning rate for everything wrecks the model).
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from training.papercut import data, transform
from training.papercut.autoencoder import decode, decode_images, psnr_db, stacked_convolutions
from training.papercut.distributed import (
    CHECKPOINT_S,
    LONGEST_STEP_S,
    Group,
    clip_gradients,
    launch,
    log_to_stderr,
    save,
)
from training.papercut.places import work_folder
from training.papercut.prepare import ensure_transform, load_transform
from training.papercut.vocabulary import draw_combination

LOG = logging.getLogger(__name__)
IMAGE_SHARE = 0.25
CROP_CELLS = 9  # latent columns of a training crop: full height, centred near the subject
LATENT_NOISE = 0.05
FLOP_A_FRAME = 3 * 0.62e9  # forward and backward of the decoder at 128x80


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line chose."""

    folder: Path
    minutes: float
    rate: float


def rate_factor(name: str) -> float:
    """How fast a decoder weight may move beside the base rate."""
    if name.endswith("norm_out.gamma"):
        return 0.0
    if ".conv1." in name or "norm" in name:
        return 1.0
    return 0.5 if ".conv2." in name or "attentions" in name else 0.1


@dataclass(frozen=True, slots=True)
class Batch:
    """Crops of pixels, their latents, and where the loss counts."""

    video: Tensor
    latents: Tensor
    weight: Tensor


class Crops:
    """Endless training crops, rendered when asked for."""

    def __init__(self, fitted: transform.Transform, seed: int) -> None:
        self.fitted = fitted
        self.rng = np.random.default_rng(seed)

    def draw(self, count: int, frames: int) -> Batch:
        """``count`` crops of clips that start at a random moment, read as starts of a video."""
        videos, latents, weights = zip(*(self._one(frames) for _ in range(count)), strict=True)
        return Batch(torch.cat(videos), torch.cat(latents), torch.cat(weights))

    def _one(self, frames: int) -> tuple[Tensor, Tensor, Tensor]:
        scene = data.draw_scene(draw_combination(self.rng), self.rng)
        times = data.frame_times(int(self.rng.integers(0, 2000)), frames)
        video = transform.pixels(torch.from_numpy(data.render(scene, times))[None])
        latents = transform.encode(self.fitted, video)
        middle = float(data.track(scene, times)[0].mean()) % data.WIDTH / 8
        last = data.WIDTH // 8 - CROP_CELLS
        start = int(np.clip(round(middle - CROP_CELLS / 2 + self.rng.uniform(-2, 2)), 0, last))
        weight = torch.ones(1, 1, 1, 1, CROP_CELLS * 8)
        weight[..., :8] = float(start == 0)
        weight[..., -8:] = float(start == last)
        cut = slice(start * 8, (start + CROP_CELLS) * 8)
        return video[..., cut], latents[..., start : start + CROP_CELLS], weight


def loss_of(made: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Squared error, absolute error and error of slopes; and the squared error alone."""
    error = (made - batch.video) * batch.weight
    squared = error.pow(2).mean() / batch.weight.mean()
    slopes = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    return 10 * squared + 0.5 * error.abs().mean() + 0.2 * slopes, squared.detach()


class Training:
    """Model, optimizer and averages, saved and restored together."""

    def __init__(self, group: Group, options: Options) -> None:
        self.group, self.options = group, options
        self.path = options.folder / "vae-training.pt"
        self.model = AutoencoderKLWan.from_pretrained(options.folder / "vae-init").to(group.device)
        self.model.requires_grad_(False)
        named = [(n, p) for n, p in self.model.decoder.named_parameters() if rate_factor(n) > 0]
        self.names = [name for name, _ in named]
        self.parameters = [parameter.requires_grad_() for _, parameter in named]
        groups = [{"params": [p], "factor": rate_factor(n)} for n, p in named]
        self.optimizer = torch.optim.AdamW(
            groups, lr=options.rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        self.average = [parameter.detach().clone() for parameter in self.parameters]
        self.step, self.elapsed_s = 0, 0.0
        if self.path.exists():
            self.restore(torch.load(self.path, map_location=group.device))

    def state(self) -> dict[str, Any]:
        """Everything a later call needs to go on."""
        return {
            "parameters": [parameter.detach() for parameter in self.parameters],
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        with torch.no_grad():
            for mine, saved in zip(self.parameters, state["parameters"], strict=True):
                mine.copy_(saved)
        self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]

    def set_rate(self, share: float) -> None:
        """Warm up, then cosine down to two per cent over the budget; warm up again for clips."""
        since_switch = (
            abs(share - IMAGE_SHARE) * self.options.minutes * 60
            if share >= IMAGE_SHARE
            else math.inf
        )
        warm = min(1.0, (self.step + 1) / 30, (since_switch + 1) / 30)
        rate = self.options.rate * warm * (0.02 + 0.49 * (1 + math.cos(math.pi * share)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]

    def learn(self, batch: Batch) -> float:
        """One step; returns the batch's PSNR."""
        noise = torch.randn_like(batch.latents) * self.noise_std
        noisy = batch.latents + noise
        single = batch.video.shape[2] == 1
        made = decode_images(self.model, noisy[:, :, 0]) if single else decode(self.model, noisy)
        loss, squared = loss_of(made, batch)
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.group.average(
            [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        )
        clip_gradients(self.parameters, 1.0)
        self.optimizer.step()
        self.step += 1
        keep = min(0.995, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - keep)
        return 10 * math.log10(4 / float(squared))

    @property
    def noise_std(self) -> Tensor:
        """Noise on the latents, per channel: the transformer's latents will not be perfect."""
        std = torch.tensor(self.model.config.latents_std, device=self.group.device)
        return LATENT_NOISE * std.view(1, -1, 1, 1, 1)

    def export(self) -> None:
        """Save the averaged weights as a diffusers folder."""
        own = [parameter.detach().clone() for parameter in self.parameters]
        with torch.no_grad():
            for parameter, mean in zip(self.parameters, self.average, strict=True):
                parameter.copy_(mean)
            self.model.save_pretrained(self.options.folder / "vae")
            for parameter, mine in zip(self.parameters, own, strict=True):
                parameter.copy_(mine)


def unseen(
    fitted: transform.Transform, count: int, frames: int = 13
) -> list[tuple[Tensor, Tensor]]:
    """(pixels, latents) of held-out combinations."""
    rng = np.random.default_rng(77)
    pairs = []
    for _ in range(count):
        scene = data.draw_scene(draw_combination(rng, held_out=True), rng)
        times = data.frame_times(int(rng.integers(0, 2000)), frames)
        video = transform.pixels(torch.from_numpy(data.render(scene, times))[None])
        pairs.append((video, transform.encode(fitted, video)))
    return pairs


def run(group: Group, options: Options) -> None:
    """The training loop of one process."""
    fitted = load_transform(options.folder)
    training = Training(group, options)
    torch.manual_seed(1000 * training.step + group.rank)
    crops = Crops(fitted, 10_000 * training.step + group.rank + 5)
    checks = unseen(fitted, 8)
    clock, saved = time.monotonic(), training.elapsed_s
    frames_seen, began = 0, time.monotonic()
    with stacked_convolutions():
        while True:
            training.elapsed_s += min(time.monotonic() - clock, LONGEST_STEP_S)
            clock = time.monotonic()
            share = group.agree(training.elapsed_s / (options.minutes * 60))
            if share >= 1:
                break
            training.set_rate(share)
            count, frames = (
                (16, 1) if share < IMAGE_SHARE else ((3, 5) if training.step % 3 else (2, 9))
            )
            psnr = training.learn(crops.draw(count, frames))
            frames_seen += count * frames
            if group.leads and training.step % 10 == 0:
                spent = (time.monotonic() - began) * 1e9
                pace = frames_seen * group.size * FLOP_A_FRAME * CROP_CELLS / 16 / spent
                LOG.info(
                    "step %d, %.0f s, %d frames a crop, psnr %.2f dB, %.0f GFLOP/s",
                    *(training.step, training.elapsed_s, frames, psnr, pace),
                )
            if group.agree(float(training.elapsed_s - saved > CHECKPOINT_S)):
                saved = training.elapsed_s
                if group.leads:
                    checkpoint(training, checks)
    if group.leads:
        checkpoint(training, unseen(fitted, 40))
    group.wait()


def checkpoint(training: Training, checks: list[tuple[Tensor, Tensor]]) -> None:
    """Save, export and measure."""
    save(training.state(), training.path)
    training.export()
    exported = AutoencoderKLWan.from_pretrained(training.options.folder / "vae")
    LOG.info(
        "unseen combinations, first and later frames: %.2f / %.2f dB", *psnr_db(exported, checks)
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="folder for everything that is made")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--device", default="auto")
    chosen = parser.parse_args()
    log_to_stderr()
    folder = work_folder(chosen.work)
    ensure_transform(folder)
    launch(run, Options(folder, chosen.minutes, chosen.rate), device=chosen.device)


if __name__ == "__main__":
    main()
