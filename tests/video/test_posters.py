"""Pictures of a video: the right moments, in the right places."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from longtake.video.posters import SHEET_FRAMES, Posters, preview


def clip(start: int, count: int, size: tuple[int, int] = (128, 80)) -> Any:
    """Frames whose grey says which one it is."""
    width, height = size
    shades = np.arange(start, start + count, dtype=np.uint8).reshape(-1, 1, 1, 1)
    return np.broadcast_to(shades, (count, height, width, 3)).copy()


def shade(picture: Image.Image) -> float:
    """Mean grey of a picture."""
    return float(np.asarray(picture.convert("L"), float).mean())


def opened(data: bytes) -> Image.Image:
    """A picture, which must be a WebP."""
    image = Image.open(io.BytesIO(data), formats=["WEBP"])
    image.load()
    return image


def collect(num_frames: int, chunk: int, made: int | None = None) -> Posters:
    """Posters of a video of so many frames, of which ``made`` came, in chunks."""
    posters = Posters(num_frames, 16)
    made = num_frames if made is None else made
    for start in range(0, made, chunk):
        posters.add(clip(start, min(chunk, made - start)))
    return posters


@pytest.mark.parametrize("chunk", [1, 7, 8, 250])
def test_the_sheet_shows_evenly_spaced_moments(chunk: int) -> None:
    data, geometry = collect(241, chunk).sheet()
    assert geometry.interval_s == 7 / 16
    assert geometry.tiles == 35 <= SHEET_FRAMES
    sheet = opened(data)
    wide, high = geometry.tile_width, geometry.tile_height
    assert sheet.size == (geometry.columns * wide, geometry.rows * high)
    assert (wide, high) == (128, 80)
    for tile in range(geometry.tiles):
        left, top = tile % geometry.columns * wide, tile // geometry.columns * high
        picture = sheet.crop((left, top, left + wide, top + high))
        assert shade(picture) == pytest.approx(7 * tile, abs=3)


def test_a_short_video_shows_every_frame() -> None:
    _, geometry = collect(5, 5).sheet()
    assert (geometry.tiles, geometry.interval_s) == (5, 1 / 16)
    _, geometry = collect(1, 1).sheet()
    assert (geometry.tiles, geometry.columns, geometry.rows) == (1, 1, 1)


@pytest.mark.parametrize(("made", "middle"), [(241, 120), (81, 40), (1, 0), (8, 4)])
def test_the_thumbnail_is_the_middle_of_what_was_made(made: int, middle: int) -> None:
    picture = opened(collect(241, 8, made).thumbnail())
    assert picture.size == (128, 80)
    assert shade(picture) == pytest.approx(middle, abs=4 + 3)


def test_large_frames_are_made_small() -> None:
    posters = Posters(2, 16)
    posters.add(clip(0, 2, (1280, 720)))
    assert opened(posters.thumbnail()).size == (640, 360)
    _, geometry = posters.sheet()
    assert (geometry.tile_width, geometry.tile_height) == (160, 90)


def test_memory_does_not_grow_with_length() -> None:
    posters = Posters(100_000, 16)
    for start in range(0, 100_000, 1000):
        posters.add(clip(start % 256, 1000, (16, 16)))
    assert len(posters._kept) <= SHEET_FRAMES


def test_a_preview_is_the_chunks_middle() -> None:
    picture = opened(preview(clip(100, 9)))
    assert picture.size == (128, 80)
    assert shade(picture) == pytest.approx(104, abs=2)
    assert opened(preview(clip(100, 1, (832, 480)))).size == (320, 185)
