"""What one training step of the transformer looks at: chunk instances cut from the latent pool.

Four kinds, from easy to whole: ``image`` (first latent frames alone), ``first`` (first chunks),
``start`` (the first four chunks of a video, each predicted from the clean ones before it) and
``later`` (the sink and two consecutive chunks from any later moment). ``start`` and ``later``
show exactly what the engine's cache holds: noised clean chunks, sink plus one predecessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.papercut.causal import CHUNK, Chunks
from training.papercut.vocabulary import CAPTION_FORMS, caption, combinations

CONTEXT_NOISE = 0.1  # what the clean pass is told, in training and in the engine
START_CHUNKS = 4
SUBJECT_WEIGHT = 4.0
EXTRA_STARS = 0.2  # of the clips: the one subject that comes out wrong more often than right
_COMBINATIONS = combinations()
_STARS = tuple(what.index for what in _COMBINATIONS if what.subject == "star")


@dataclass(frozen=True, slots=True)
class Batch:
    """Instances, their target velocities and loss weights, and the captions of the clips."""

    chunks: Chunks
    target: Tensor
    weight: Tensor
    captions: list[str]


@dataclass(frozen=True, slots=True)
class Look:
    """One kind's structure for a single clip: chunk numbers and what each chunk sees."""

    clean: tuple[int, ...]
    noisy: tuple[int, ...]
    sees: dict[int, tuple[int, ...]]


STRUCTURES = {
    "start": Look((0, 1, 2), (0, 1, 2, 3), {0: (), 1: (0,), 2: (0, 1), 3: (0, 2)}),
    "later": Look((0, 1, 2), (1, 2, 3), {0: (), 1: (0,), 2: (0, 1), 3: (0, 2)}),
}


class Pool:
    """The latent shards on disk, all in memory; ``refresh`` picks up new ones."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self.known: set[Path] = set()
        self.shards: list[dict[str, Tensor]] = []

    def refresh(self) -> None:
        """Load shards that were written since the last look."""
        for path in sorted(self.folder.glob("shard-*.pt")):
            if path not in self.known:
                self.known.add(path)
                self.shards.append(
                    {name: part.to(self.device) for name, part in torch.load(path).items()}
                )

    def draw(self, rng: np.random.Generator, count: int) -> list[dict[str, Tensor]]:
        """``count`` random clips, stars among them more often than the pool has them."""
        clips = []
        for number in rng.integers(0, len(self.shards), count):
            shard = self.shards[int(number)]
            choice = np.arange(len(shard["what"]))
            stars = choice[np.isin(shard["what"].cpu().numpy(), _STARS)]
            if len(stars) and rng.random() < EXTRA_STARS:
                choice = stars
            index = int(rng.choice(choice))
            clips.append({name: part[index] for name, part in shard.items()})
        return clips


def draw_sigmas(rng: np.random.Generator, count: int, low: float) -> Tensor:
    """Mostly the noise levels a shifted few-step schedule visits, some of everything."""
    uniform = rng.uniform(low, 1, count)
    shift = rng.uniform(2.5, 6.0, count)
    sigma = shift * uniform / (1 + (shift - 1) * uniform)
    anywhere = rng.random(count) < 0.1
    return torch.from_numpy(np.where(anywhere, rng.uniform(0.02, 1, count), sigma)).float()


def captions_of(
    rng: np.random.Generator, clips: list[dict[str, Tensor]], dropout: float
) -> list[str]:
    """A random wording of each clip's caption; now and then none."""
    texts = []
    for clip in clips:
        dropped = rng.random() < dropout
        what = _COMBINATIONS[int(clip["what"])]
        texts.append("" if dropped else caption(what, int(rng.integers(CAPTION_FORMS))))
    return texts


class Maker:
    """Draws batches of a kind; all randomness comes from its own generators."""

    def __init__(self, pool: Pool, seed: int, *, sampler_sigmas: tuple[float, ...] = ()) -> None:
        self.pool = pool
        self.rng = np.random.default_rng(seed)
        self.noise = torch.Generator(device=pool.device).manual_seed(seed)
        self.sampler_sigmas = sampler_sigmas

    def make(self, kind: str, clips: int, copies: int) -> Batch:
        """``clips`` clips of a kind, every noisy chunk ``copies`` times at different noise."""
        drawn = self.pool.draw(self.rng, clips)
        texts = captions_of(self.rng, drawn, 0.1)
        if kind in ("image", "first"):
            return self._alone(drawn, texts, 1 if kind == "image" else CHUNK)
        return self._sequence(drawn, texts, kind, copies)

    def _sigmas(self, count: int) -> Tensor:
        sigmas = draw_sigmas(self.rng, count, 0.15)
        if self.sampler_sigmas:
            # at sigma 1 there is only a mean to learn: half as often as the other levels
            odds = np.ones(len(self.sampler_sigmas))
            odds[0] = 0.5
            levels = self.rng.choice(self.sampler_sigmas, count, p=odds / odds.sum())
            exact = torch.from_numpy(levels).float()
            sigmas = torch.where(torch.from_numpy(self.rng.random(count) < 0.7), exact, sigmas)
        return sigmas.to(self.pool.device)

    def _random(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.noise, device=like.device)

    def _alone(self, drawn: list[dict[str, Tensor]], texts: list[str], frames: int) -> Batch:
        clean = torch.stack([clip["start"][:, :frames] for clip in drawn]).float()
        masks = torch.stack([clip["start_mask"][:frames] for clip in drawn])
        count = len(drawn)
        rows = torch.arange(count, device=clean.device)
        sees = ((rows, rows.new_zeros(count, 0)),)
        return self._finish(clean, masks, rows, sees, 0, texts)

    def _sequence(
        self, drawn: list[dict[str, Tensor]], texts: list[str], kind: str, copies: int
    ) -> Batch:
        look = STRUCTURES[kind]
        parts, masks = zip(*(self._cut(clip, kind) for clip in drawn), strict=True)
        count = len(drawn)
        latents, covers = (
            torch.stack(parts, 1).float(),
            torch.stack(masks, 1),
        )  # chunk number, clip, ...
        order = [*look.clean, *(number for number in look.noisy for _ in range(copies))]
        rows = torch.arange(len(order) * count, device=latents.device).view(len(order), count)
        where = {number: rows[index] for index, number in enumerate(look.clean)}
        sees = []
        for size in range(3):
            picked = [index for index, number in enumerate(order) if len(look.sees[number]) == size]
            queries = torch.cat([rows[index] for index in picked])
            backs = [
                torch.stack([where[seen] for seen in look.sees[order[index]]], 1)
                for index in picked
                if size
            ]
            sees.append(
                (queries, torch.cat(backs) if backs else queries.new_zeros(len(queries), 0))
            )
        clips = torch.arange(count, device=latents.device).repeat(len(order))
        chosen = torch.tensor(order, device=latents.device)
        clean_rows = len(look.clean) * count
        return self._finish(
            latents[chosen].flatten(0, 1),
            covers[chosen].flatten(0, 1),
            clips,
            tuple(sees),
            clean_rows,
            texts,
        )

    def _cut(self, clip: dict[str, Tensor], kind: str) -> tuple[Tensor, Tensor]:
        """Chunks ``[chunks, C, T, H, W]`` of a clip and their subject masks."""
        latents, masks = clip["start"], clip["start_mask"]
        if kind == "later":
            latents = torch.cat([latents[:, :CHUNK], clip["later"]], 1)
            masks = torch.cat([masks[:CHUNK], clip["later_mask"]])
        chunks = latents.view(len(latents), -1, CHUNK, *latents.shape[2:]).transpose(0, 1)
        return chunks[:START_CHUNKS], masks.view(-1, CHUNK, *masks.shape[1:])[:START_CHUNKS]

    def _finish(
        self,
        clean: Tensor,
        masks: Tensor,
        clips: Tensor,
        sees: tuple[tuple[Tensor, Tensor], ...],
        clean_rows: int,
        texts: list[str],
    ) -> Batch:
        """Noise the instances: clean ones lightly and never quite as told, noisy ones as told."""
        count = len(clean)
        sigmas = torch.full((count,), CONTEXT_NOISE, device=clean.device)
        sigmas[clean_rows:] = self._sigmas(count - clean_rows)
        real = sigmas.clone()
        spread = self.rng.choice(
            [0.0, 0.05, 0.1, 0.2, 0.3], clean_rows, p=[0.1, 0.2, 0.4, 0.2, 0.1]
        )
        real[:clean_rows] = torch.from_numpy(spread).float().to(clean.device)
        noise = self._random(clean)
        level = real.view(-1, 1, 1, 1, 1)
        mixed = (1 - level) * clean + level * noise
        weight = 1 + (SUBJECT_WEIGHT - 1) * masks[clean_rows:, None].float()
        target = (noise - clean)[clean_rows:]
        return Batch(
            Chunks(mixed, sigmas, clips, sees, clean_rows), target, weight / weight.mean(), texts
        )
