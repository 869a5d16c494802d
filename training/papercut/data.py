"""Procedural paper-cut clips: a coloured subject that moves over a place, rendered at any time.

Every motion is periodic or wraps around, with periods that do not divide each other, so an
endless clip stays inside the training distribution without being a short loop. Shapes: frames
are uint8 ``[T, 3, H, W]``; times are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from training.papercut.vocabulary import COLOURS, Combination

HEIGHT, WIDTH, FPS = 80, 128, 16
SOFTNESS_PX = 1.0  # the standard deviation of the blur that every drawing gets
_SUPERSAMPLE = 8
_RADIUS_PX = {"ball": 17.5, "ring": 19.5, "star": 22.5, "fish": 24.0, "triangle": 21.0}

FloatArray = npt.NDArray[np.float32]
FrameArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Scene:
    """A combination with every random choice made: rendering it is a pure function of time."""

    what: Combination
    radius_px: float
    faces_left: bool
    centre_px: tuple[float, float]
    speed: float
    phase: float
    size_px: tuple[float, float]
    sway_px: float
    sway_s: float
    sway_phase: float
    place_phase: float


@dataclass(frozen=True, slots=True)
class Sprite:
    """A subject's coverage and its paper shading times coverage, both ``[S, S]``."""

    alpha: FloatArray
    shaded: FloatArray


def draw_scene(what: Combination, rng: np.random.Generator) -> Scene:
    """Choose size, place and pace for a combination."""

    def between(low: float, high: float) -> float:
        return float(rng.uniform(low, high))

    # A narrow choice of starts: at full noise a few-step sampler commits to one place at once,
    # and where many are likely it smears the subject over two of them.
    wide = {
        "left": (88, 112),
        "right": (16, 40),
        "bounce": (54, 74),
        "circle": (58, 70),
        "still": (54, 74),
    }
    high = {
        "left": (36, 44),
        "right": (36, 44),
        "bounce": (54, 54),
        "circle": (40, 40),
        "still": (36, 44),
    }
    period_s = {"bounce": (1.7, 2.5), "circle": (3.1, 4.3)}.get(what.motion, (1.0, 1.0))
    size = {"bounce": (0.0, between(25, 29)), "circle": (between(20, 24), between(13, 16))}.get(
        what.motion, (0.0, 0.0)
    )
    sideways = what.motion in ("left", "right")
    return Scene(
        what=what,
        radius_px=_RADIUS_PX[what.subject] * between(0.93, 1.07),
        faces_left=what.motion == "left",
        centre_px=(between(*wide[what.motion]), between(*high[what.motion])),
        speed=between(22, 29) if sideways else 1 / between(*period_s),
        phase=between(0, 0.3),
        size_px=size,
        sway_px=between(2.5, 4.5) if what.motion != "still" else 0.0,
        sway_s=between(2.9, 5.3),
        sway_phase=between(0, 1),
        place_phase=between(0, 1),
    )


def track(scene: Scene, times_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The subject's centre over time, in pixels; x is not wrapped."""
    x = np.full_like(times_s, scene.centre_px[0])
    y = np.full_like(times_s, scene.centre_px[1])
    sway = scene.sway_px * np.sin(2 * math.pi * (times_s / scene.sway_s + scene.sway_phase))
    turn = times_s * scene.speed + scene.phase
    match scene.what.motion:
        case "left" | "right":
            x = x + times_s * scene.speed * (-1 if scene.what.motion == "left" else 1)
            y = y + sway
        case "bounce":
            x = x + sway
            y = y - scene.size_px[1] * np.abs(np.sin(math.pi * turn))
        case "circle":
            x = x + scene.size_px[0] * np.cos(2 * math.pi * turn) + 0.5 * sway
            y = y + scene.size_px[1] * np.sin(2 * math.pi * turn)
    return x.astype(np.float32), y.astype(np.float32)


def _outline(subject: str) -> list[list[tuple[float, float]]]:
    """Polygons of a subject in units of its radius, y down, facing right."""
    turn = np.linspace(0, 2 * math.pi, 96, endpoint=False)
    if subject == "star":
        reach = np.where(np.arange(10) % 2 == 0, 1.0, 0.44)
        angle = np.arange(10) * math.pi / 5
        return [
            [
                (float(r * math.sin(a)), float(-r * math.cos(a)))
                for r, a in zip(reach, angle, strict=True)
            ]
        ]
    if subject == "triangle":
        return [[(0.0, -0.92), (0.95, 0.72), (-0.95, 0.72)]]
    if subject == "fish":
        body = [(float(0.2 + 0.78 * np.cos(t)), float(0.54 * np.sin(t))) for t in turn]
        return [body, [(-0.25, 0.0), (-1.0, -0.6), (-1.0, 0.6)]]
    return [[(float(np.cos(t)), float(np.sin(t))) for t in turn]]


def blur(image: FloatArray, sigma_px: float = SOFTNESS_PX) -> FloatArray:
    """Gaussian blur of the last two axes, edges repeated."""
    reach = math.ceil(3 * sigma_px)
    kernel = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma_px**2))
    kernel /= kernel.sum()
    for axis in (-2, -1):
        pad = [(0, 0)] * image.ndim
        pad[axis] = (reach, reach)
        padded = np.pad(image, pad, mode="edge")
        length = image.shape[axis]
        parts = [k * np.take(padded, range(i, i + length), axis=axis) for i, k in enumerate(kernel)]
        image = np.sum(parts, axis=0, dtype=np.float32)
    return image


@lru_cache(maxsize=2048)
def sprite(subject: str, radius_px: float, faces_left: bool) -> Sprite:
    """Draw a subject once, softly, on a square just large enough."""
    half = math.ceil(radius_px) + 4
    side = 2 * half
    scale = _SUPERSAMPLE
    picture = Image.new("L", (side * scale, side * scale), 0)
    pen = ImageDraw.Draw(picture)
    middle, radius = half * scale, radius_px * scale
    for polygon in _outline(subject):
        pen.polygon([(middle + x * radius, middle + y * radius) for x, y in polygon], fill=255)
    if subject == "ring":
        hole = 0.5 * radius
        pen.ellipse([middle - hole, middle - hole, middle + hole, middle + hole], fill=0)
    fine = np.asarray(picture, np.float32) / 255
    alpha = blur(fine.reshape(side, scale, side, scale).mean((1, 3)))
    if faces_left:
        alpha = alpha[:, ::-1].copy()
    rows = (np.arange(side, dtype=np.float32)[:, None] - half) / radius_px
    return Sprite(alpha, (alpha * (0.96 - 0.05 * rows)).astype(np.float32))


def _layer(picture: FloatArray, cover: FloatArray, colour: FloatArray) -> FloatArray:
    """Lay a paper sheet of one colour (or one per row) over a picture."""
    return picture * (1 - cover) + colour * cover


def _gradient(top: tuple[int, int, int], bottom: tuple[int, int, int]) -> FloatArray:
    down = np.linspace(0, 1, HEIGHT, dtype=np.float32)[None, :, None]
    first = np.asarray(top, np.float32)[:, None, None]
    return first + (np.asarray(bottom, np.float32)[:, None, None] - first) * down


@lru_cache(maxsize=512)
def place_picture(place: str, phase: float) -> FloatArray:
    """The still background ``[3, H, W]`` in 0..255; ``phase`` moves its parts a little."""
    ys, xs = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32)
    shift = 2 * math.pi * phase
    nudge = 3 * math.sin(shift)

    def land(level: float, wave: float, cycles: float, offset: float) -> FloatArray:
        horizon = level + wave * np.sin(
            2 * math.pi * cycles * xs / WIDTH + offset + 0.6 * math.sin(shift)
        )
        cover: FloatArray = np.clip(ys - horizon + 0.5, 0, 1).astype(np.float32)
        return cover

    def disc(x: float, y: float, radius: float) -> FloatArray:
        inside = radius - np.hypot(xs - x - nudge, ys - y)
        cover: FloatArray = np.clip(inside + 0.5, 0, 1).astype(np.float32)
        return cover

    def paper(red: int, green: int, blue: int) -> FloatArray:
        return np.asarray((red, green, blue), np.float32)[:, None, None]

    match place:
        case "meadow":
            picture = _layer(
                _gradient((140, 190, 232), (208, 228, 240)), disc(24, 16, 9), paper(248, 246, 236)
            )
            picture = _layer(picture, land(50, 4, 1, 0.4), paper(150, 196, 116))
            picture = _layer(picture, land(64, 4, 1, 3.0), paper(112, 168, 92))
        case "night":
            picture = _layer(
                _gradient((20, 22, 58), (58, 56, 104)), disc(104, 16, 8), paper(226, 222, 196)
            )
            picture = _layer(picture, land(54, 6, 1.5, 0.0), paper(34, 40, 66))
            picture = _layer(picture, land(66, 4, 1, 2.0), paper(16, 20, 40))
        case "sea":
            picture = _gradient((196, 220, 230), (226, 236, 238))
            picture = _layer(picture, land(42, 2.5, 2, 0.0), paper(112, 176, 196))
            picture = _layer(picture, land(56, 2.5, 2, 2.2), paper(78, 146, 174))
            picture = _layer(picture, land(69, 2.5, 2, 4.4), paper(52, 116, 150))
        case "desert":
            picture = _layer(
                _gradient((196, 130, 132), (244, 204, 160)), disc(96, 40, 11), paper(252, 238, 206)
            )
            picture = _layer(picture, land(54, 4, 1, 1.0), paper(214, 166, 118))
            picture = _layer(picture, land(66, 4, 1.5, 4.0), paper(178, 126, 90))
        case _:
            picture = _gradient((150, 156, 186), (206, 206, 220))
            picture = _layer(picture, land(52, 5, 1, 5.0), paper(218, 222, 232))
            picture = _layer(picture, land(66, 4, 1, 2.0), paper(244, 245, 248))
    return np.clip(blur(picture), 0, 255).astype(np.float32)


def render(scene: Scene, times_s: FloatArray) -> FrameArray:
    """Draw a scene at the given times."""
    look = sprite(scene.what.subject, round(scene.radius_px * 4) / 4, scene.faces_left)
    colour = np.asarray(COLOURS[scene.what.colour], np.float32)[:, None, None]
    still = place_picture(scene.what.place, round(scene.place_phase * 32) / 32)
    frames = np.repeat(still[None], len(times_s), 0)
    alpha, shaded = (np.pad(layer, 1) for layer in (look.alpha, look.shaded))
    side = alpha.shape[0]
    for frame, x, y in zip(frames, *track(scene, times_s), strict=True):
        left, top = math.floor(x - side / 2 + 0.5), math.floor(y - side / 2 + 0.5)
        fx, fy = x - side / 2 + 0.5 - left, y - side / 2 + 0.5 - top
        cover, sheet = (_shift(layer, fx, fy) for layer in (alpha, shaded))
        rows = np.arange(top, top + side - 1) + 1
        seen = (rows >= 0) & (rows < HEIGHT)
        columns = (np.arange(left, left + side - 1) + 1) % WIDTH
        spot = np.ix_(np.arange(3), rows[seen], columns)
        frame[spot] = frame[spot] * (1 - cover[seen]) + colour * sheet[seen]
    return (frames + 0.5).astype(np.uint8)


def _shift(layer: FloatArray, fx: float, fy: float) -> FloatArray:
    """Move a padded layer right and down by a fraction of a pixel; one row and column less."""
    across = layer[:, 1:] * (1 - fx) + layer[:, :-1] * fx
    return (across[1:] * (1 - fy) + across[:-1] * fy).astype(np.float32)


def frame_times(start_frame: int, count: int) -> FloatArray:
    """Seconds of ``count`` frames from ``start_frame`` on."""
    return (np.arange(start_frame, start_frame + count) / FPS).astype(np.float32)


def sheet(videos: list[FrameArray], moments: int = 8, zoom: int = 1) -> Image.Image:
    """One row a video, ``moments`` frames each, evenly spread."""
    rows = []
    for video in videos:
        picks = np.linspace(0, len(video) - 1, moments).round().astype(int)
        rows.append(np.concatenate([video[i].transpose(1, 2, 0) for i in picks], axis=1))
    picture = Image.fromarray(np.concatenate(rows, axis=0))
    return picture.resize((picture.width * zoom, picture.height * zoom), Image.Resampling.BICUBIC)
