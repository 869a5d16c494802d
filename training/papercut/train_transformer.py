"""Stage 3: train the causal transformer and its text encoder on the pool of latents.

``python -m training.papercut.train_transformer --minutes 85``; the minutes are the whole budget:
a run that was cut off goes on where it was, and a larger budget goes on from a finished one
(learning rates rise again to where the longer schedule has them). Each logged line names loss by
kind of batch, GFLOP/s of all processes and seconds trained.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.papercut.batches import Batch, Maker, Pool
from training.papercut.causal import LAYERS, WIDTH, forward, make_transformer
from training.papercut.distributed import (
    CHECKPOINT_S,
    LONGEST_STEP_S,
    Group,
    clip_gradients,
    launch,
    log_to_stderr,
    save,
)
from training.papercut.muon import Muon
from training.papercut.places import work_folder
from training.papercut.text import encode_prompts, make_encoder, make_tokenizer

LOG = logging.getLogger(__name__)
FLOP_A_TOKEN = 6 * 14 * WIDTH**2 * LAYERS  # forward and backward of the matrices, without attention
# Kinds of batch and their shares, by the part of the budget that is spent.
SCHEDULE = (
    (0.25, {"image": 1.0}),
    (0.42, {"image": 0.45, "first": 0.55}),
    (0.62, {"image": 0.25, "first": 0.3, "start": 0.25, "later": 0.2}),
    (1.00, {"image": 0.22, "first": 0.33, "start": 0.28, "later": 0.17}),
)
SIZES = {"image": (40, 1), "first": (12, 1), "start": (2, 2), "later": (2, 2)}
EXACT_FROM = 0.6  # from here on most noise levels are the sampler's own


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line chose."""

    folder: Path
    minutes: float
    rate: float
    shift: float
    steps: int
    scale: int


def sampler_sigmas(steps: int, shift: float) -> tuple[float, ...]:
    """Noise levels at which a shifted Euler sampler calls the model."""
    line = [1 - index / steps for index in range(steps)]
    return tuple(shift * s / (1 + (shift - 1) * s) for s in line)


def kinds_at(share: float) -> dict[str, float]:
    """The mixture of batch kinds at a part of the budget."""
    return next(mixture for until, mixture in SCHEDULE if share < until or until == 1.0)


class Training:
    """Models, optimizers and averages, saved and restored together."""

    def __init__(self, group: Group, options: Options) -> None:
        torch.manual_seed(0)
        self.group, self.options = group, options
        self.path = options.folder / "transformer-training.pt"
        self.tokenizer = make_tokenizer()
        self.encoder = make_encoder(len(self.tokenizer)).to(group.device)
        self.model = make_transformer().to(group.device)
        named = list(self.model.named_parameters())
        matrices = [p for n, p in named if p.ndim == 2 and n.startswith("blocks.")]
        others = [p for n, p in named if not (p.ndim == 2 and n.startswith("blocks."))]
        self.parameters: list[Tensor] = [*matrices, *others, *self.encoder.parameters()]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            [*others, *self.encoder.parameters()], betas=(0.9, 0.98), weight_decay=0.0
        )
        self.average = [p.detach().clone() for p in self.parameters]
        self.step, self.elapsed_s = 0, 0.0
        if self.path.exists():
            self.restore(torch.load(self.path, map_location=group.device))

    def state(self) -> dict[str, Any]:
        """Everything a later call needs to go on."""
        return {
            "parameters": [p.detach() for p in self.parameters],
            "average": self.average,
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        with torch.no_grad():
            for mine, saved in zip(self.parameters, state["parameters"], strict=True):
                mine.copy_(saved)
        self.average = state["average"]
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]

    def set_rate(self, share: float) -> None:
        """Warm up, hold to half the budget, then cosine down to three per cent."""
        fall = max(0.0, (share - 0.5) / 0.5)
        factor = min(1.0, (self.step + 1) / 60) * (0.03 + 0.485 * (1 + math.cos(math.pi * fall)))
        self.muon.rate = self.options.rate * factor
        for group in self.adam.param_groups:
            group["lr"] = 0.8 * self.options.rate * factor

    def learn(self, batch: Batch) -> float:
        """One step; returns the weighted loss."""
        context = encode_prompts(self.tokenizer, self.encoder, batch.captions)
        made = forward(self.model, batch.chunks, context)
        loss = ((made - batch.target).pow(2) * batch.weight).mean()
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.group.average([p.grad for p in self.parameters if p.grad is not None])
        clip_gradients(self.parameters, 1.0)
        self.muon.step(self.group.rank, self.group.size)
        self.adam.step()
        self.step += 1
        keep = min(0.998, (1 + self.step) / (12 + self.step))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - keep)
        return float(loss.detach())

    def export(self, path: Path) -> None:
        """Save the averaged weights by name, for sampling and export."""
        names = [n for n, _ in self.model.named_parameters()]
        names = [n for n in names if n.startswith("blocks.")]
        own = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for parameter, mean in zip(self.parameters, self.average, strict=True):
                parameter.copy_(mean)
            weights = {
                "model": self.model.state_dict(),
                "encoder": self.encoder.state_dict(),
                "step": self.step,
            }
            save(weights, path)
            for parameter, mine in zip(self.parameters, own, strict=True):
                parameter.copy_(mine)


class Meter:
    """Losses by kind, tokens and time since the last line."""

    def __init__(self) -> None:
        self.losses: defaultdict[str, list[float]] = defaultdict(list)
        self.tokens, self.started = 0, time.monotonic()

    def add(self, kind: str, loss: float, tokens: int) -> None:
        """Note one step."""
        self.losses[kind].append(loss)
        self.tokens += tokens

    def line(self, training: Training) -> str:
        """The log line; starts the next count."""
        spent = time.monotonic() - self.started
        losses = " ".join(
            f"{kind} {sum(part) / len(part):.3f}" for kind, part in sorted(self.losses.items())
        )
        pace = self.tokens * training.group.size / spent
        head = f"step {training.step}, {training.elapsed_s:.0f} s, loss {losses}"
        speed = f"{pace:.0f} tokens/s, {pace * FLOP_A_TOKEN / 1e9:.0f} GFLOP/s"
        text = f"{head}, {speed}, rate {training.muon.rate:.5f}"
        self.losses.clear()
        self.tokens, self.started = 0, time.monotonic()
        return text


def run(group: Group, options: Options) -> None:
    """The training loop of one process."""
    training = Training(group, options)
    pool = Pool(options.folder / "pool", group.device)
    seed = 100_000 * group.rank + training.step
    maker = Maker(pool, seed)
    exact = sampler_sigmas(options.steps, options.shift)
    meter, clock, saved = Meter(), time.monotonic(), training.elapsed_s
    while True:
        training.elapsed_s += min(time.monotonic() - clock, LONGEST_STEP_S)
        clock = time.monotonic()
        training.elapsed_s = group.agree(training.elapsed_s)
        share = training.elapsed_s / (options.minutes * 60)
        if share >= 1:
            break
        if not pool.shards or training.step % 100 == 0:
            pool.refresh()
        training.set_rate(share)
        maker.sampler_sigmas = exact if share >= EXACT_FROM else ()
        kind = pick(kinds_at(share), training.step)
        clips, copies = SIZES[kind]
        batch = maker.make(kind, clips * options.scale, copies)
        loss = training.learn(batch)
        meter.add(kind, loss, batch.chunks.latents[:, 0, :, ::2, ::2].numel())
        if group.leads and training.step % 10 == 0:
            LOG.info(meter.line(training))
        if training.elapsed_s - saved > CHECKPOINT_S:
            saved = training.elapsed_s
            if group.leads:
                save(training.state(), training.path)
                training.export(options.folder / "transformer.pt")
    if group.leads:
        save(training.state(), training.path)
        training.export(options.folder / "transformer.pt")
    group.wait()


def pick(mixture: dict[str, float], step: int) -> str:
    """The kind for a step: the same in every process, in the mixture's shares."""
    point = (step * 0.6180339887) % 1.0
    for kind, share in mixture.items():
        point -= share
        if point < 0:
            return kind
    return next(iter(mixture))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="folder for everything that is made")
    parser.add_argument("--minutes", type=float, default=85.0)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--shift", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--scale", type=int, default=1, help="clips a step, times the CPU's size: more on a GPU"
    )
    parser.add_argument("--device", default="auto")
    chosen = parser.parse_args()
    log_to_stderr()
    folder = work_folder(chosen.work)
    options = Options(folder, chosen.minutes, chosen.rate, chosen.shift, chosen.steps, chosen.scale)
    launch(run, options, device=chosen.device)


if __name__ == "__main__":
    main()
