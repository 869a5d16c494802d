"""Reads colour, subject, motion and place off the pixels of a clip, with no learned weights.

The place is the nearest of the known backgrounds; the subject's pixels are those nearer to one
palette colour than to that background; its kind is the outline that overlaps them best; its motion
is read from the track of their centre, around the horizontal wrap. A clip whose subject cannot be
found, or fits no outline or motion, gets ``NONE`` for that attribute, which is never right.

``python -m training.papercut.judge`` prints the judge's own accuracy on rendered clips.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt
from PIL import Image

from training.papercut import data
from training.papercut.distributed import log_to_stderr
from training.papercut.vocabulary import COLOURS, PLACES, SUBJECTS, Combination, draw_combination

LOG = logging.getLogger(__name__)
NONE = "none"
ATTRIBUTES = ("colour", "subject", "motion", "place")
_BOX = 60  # pixels: the square in which outlines are compared
_PHASES = 8
_SHAPE_FRAMES = 12
_LEAST_OVERLAP = 0.5
_AREA_PX = (120, 2200)
_TILTS = {"star": (-24, -12, 12, 24), "triangle": (-15, 15), "fish": (-15, 15)}  # degrees

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the judge saw; ``overlap`` is how well the best outline fitted (0..1)."""

    colour: str
    subject: str
    motion: str
    place: str
    overlap: float

    def right(self, asked: Combination) -> dict[str, bool]:
        """Attribute by attribute, whether it is what was asked for."""
        return {name: getattr(self, name) == getattr(asked, name) for name in ATTRIBUTES}


@cache
def _backgrounds() -> dict[str, data.FloatArray]:
    return {
        place: np.stack([data.place_picture(place, phase / _PHASES) for phase in range(_PHASES)])
        for place in PLACES
    }


@cache
def _outlines() -> tuple[tuple[str, BoolArray], ...]:
    """Every subject at three sizes, both ways round, upright and tilted; centred on its mass.

    A star that leans is a star: compared with upright outlines alone it would be read as a ball.
    """
    made = []
    for subject, scale, faces_left in product(SUBJECTS, (0.88, 1.0, 1.12), (False, True)):
        radius = round(data._RADIUS_PX[subject] * scale * 4) / 4
        picture = Image.fromarray(data.sprite(subject, radius, faces_left).alpha)
        for tilt in (0, *_TILTS.get(subject, ())):
            alpha = np.asarray(picture.rotate(tilt, Image.Resampling.BILINEAR)) > 0.5
            made.append((subject, _centred(alpha)))
    return tuple(made)


def _centred(mask: BoolArray) -> BoolArray:
    """The mask in a box around its centre of mass; columns wrap around, rows do not."""
    rows, columns = np.nonzero(mask)
    width = mask.shape[1]
    turn = np.exp(2j * math.pi * columns / width).mean()
    x = (
        round(float(np.angle(turn)) / (2 * math.pi) * width)
        if width == data.WIDTH
        else round(columns.mean())
    )
    y = round(rows.mean())
    box = np.zeros((_BOX, _BOX), bool)
    down = rows - y + _BOX // 2
    across = columns - x
    if width == data.WIDTH:
        across = (across + width // 2) % width - width // 2
    across = across + _BOX // 2
    inside = (down >= 0) & (down < _BOX) & (across >= 0) & (across < _BOX)
    box[down[inside], across[inside]] = True
    return box


def find_place(frames: data.FrameArray) -> tuple[str, data.FloatArray]:
    """The nearest known background of the typical frame, and its picture."""
    picks = np.linspace(0, len(frames) - 1, min(len(frames), 21)).round().astype(int)
    typical = np.median(frames[picks], axis=0).astype(np.float32)
    best, name, picture = math.inf, NONE, typical
    for place, pictures in _backgrounds().items():
        for candidate in pictures:
            errors = np.sort(np.abs(typical - candidate).mean(0).ravel())
            score = float(errors[: int(0.75 * errors.size)].mean())
            if score < best:
                best, name, picture = score, place, candidate
    return (name if best < 40 else NONE), picture


def find_subject(frames: data.FrameArray, background: data.FloatArray) -> tuple[str, BoolArray]:
    """The colour that most foreground pixels have, and where it is in each frame."""
    palette = np.asarray(list(COLOURS.values()), np.float32)
    pixels = frames.astype(np.float32)
    from_place = np.linalg.norm(pixels - background, axis=1)
    from_colour = np.stack(
        [np.linalg.norm(pixels - colour[:, None, None], axis=1) for colour in palette], 1
    )
    nearest = from_colour.argmin(1)
    distance = from_colour.min(1)
    seen = (distance < from_place) & (distance < 100)
    counts = np.bincount(nearest[seen & (distance < 60)], minlength=len(palette))
    if counts.sum() < _AREA_PX[0] * len(frames) / 4:
        return NONE, np.zeros_like(seen)
    colour = int(counts.argmax())
    chosen = from_colour[:, colour]
    return tuple(COLOURS)[colour], (chosen < from_place) & (chosen < 110)


def find_kind(masks: BoolArray) -> tuple[str, float]:
    """The subject whose outline overlaps best over a dozen frames, and how well it does."""
    usable = [mask for mask in masks if _AREA_PX[0] < mask.sum() < _AREA_PX[1]]
    if len(usable) < len(masks) / 2:
        return NONE, 0.0
    picks = np.linspace(0, len(usable) - 1, min(len(usable), _SHAPE_FRAMES)).round().astype(int)
    totals = dict.fromkeys(SUBJECTS, 0.0)
    for pick in picks:
        box = _centred(usable[pick])
        best = dict.fromkeys(SUBJECTS, 0.0)
        for subject, outline in _outlines():
            best[subject] = max(best[subject], _overlap(box, outline))
        for subject, value in best.items():
            totals[subject] += value / len(picks)
    kind = max(totals, key=lambda subject: totals[subject])
    return (kind if totals[kind] >= _LEAST_OVERLAP else NONE), totals[kind]


def _overlap(first: BoolArray, second: BoolArray) -> float:
    return float((first & second).sum() / max(1, (first | second).sum()))


def find_motion(masks: BoolArray) -> str:
    """The kind of motion of the masks' centre."""
    areas = masks.sum((1, 2))
    found = areas > _AREA_PX[0]
    if found.mean() < 0.7:
        return NONE
    turns = np.exp(2j * math.pi * np.arange(data.WIDTH) / data.WIDTH)
    columns = masks.sum(1)[found]
    angle = np.unwrap(np.angle((columns * turns).sum(1)))
    x = angle / (2 * math.pi) * data.WIDTH
    y = (masks.sum(2)[found] * np.arange(data.HEIGHT)).sum(1) / areas[found]
    seconds = np.flatnonzero(found) / data.FPS
    speed = float(np.polyfit(seconds, x, 1)[0])
    step = data.FPS
    later = x[step:] - x[:-step]
    if abs(speed) > 11:
        steady = float((np.sign(later) == np.sign(speed)).mean())
        return ("right" if speed > 0 else "left") if steady > 0.8 else NONE
    wide, high = float(x.std()), float(y.std())
    if wide > 8 and high > 5:
        return "circle"
    if high > 4.5 and wide < 8:
        return "bounce"
    return "still" if wide < 4 and high < 3 else NONE


def judge(frames: data.FrameArray) -> Verdict:
    """Judge a clip of uint8 frames ``[T, 3, H, W]``, some five seconds of it."""
    place, picture = find_place(frames)
    colour, masks = find_subject(frames, picture)
    if colour == NONE:
        return Verdict(NONE, NONE, NONE, place, 0.0)
    kind, overlap = find_kind(masks)
    return Verdict(colour, kind, find_motion(masks), place, overlap)


def shares(results: Iterable[tuple[Combination, Verdict]]) -> dict[str, float]:
    """Share right, by attribute and for all four together, in per cent."""
    rights = [verdict.right(asked) for asked, verdict in results]
    table = {name: 100 * float(np.mean([right[name] for right in rights])) for name in ATTRIBUTES}
    return table | {"all": 100 * float(np.mean([all(right.values()) for right in rights]))}


def main() -> None:
    """Judge rendered clips, whose attributes are known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=400)
    chosen = parser.parse_args()
    log_to_stderr()
    rng = np.random.default_rng(4242)
    results = []
    for _ in range(chosen.clips):
        what = draw_combination(rng, held_out=rng.random() < 0.5)
        start = int(rng.integers(0, 900))
        verdict = judge(data.render(data.draw_scene(what, rng), data.frame_times(start, 81)))
        results.append((what, verdict))
        if not all(verdict.right(what).values()):
            LOG.info("wrong: %s read as %s", what, verdict)
    for name, share in shares(results).items():
        LOG.info("%s | %.1f", name, share)


if __name__ == "__main__":
    main()
