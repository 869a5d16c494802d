"""Pictures of a video: a preview of a chunk, a thumbnail of its middle, a sheet of small ones."""

from __future__ import annotations

import io
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image

from longtake.video.segments import Frames

SHEET_FRAMES = 40
TILE_SIDE = 160
THUMBNAIL_SIDE = 640
PREVIEW_SIDE = 320
QUALITY = 80
CONTENT_TYPE = "image/webp"


@dataclass(frozen=True, slots=True)
class Sheet:
    """Where a sprite sheet shows which moment.

    Tile ``i`` is column ``i % columns`` of row ``i // columns`` and shows the video from
    ``i * interval_s`` seconds on.

    Attributes:
        columns, rows: of the grid; the last row may have empty places.
        tiles: pictures in it.
        tile_width, tile_height: pixels of one.
        interval_s: seconds between two.
    """

    columns: int
    rows: int
    tiles: int
    tile_width: int
    tile_height: int
    interval_s: float

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


class Posters:
    """Keeps a few evenly spaced frames of a video as they come, so memory stays flat.

    Args:
        num_frames: length of the video.
        fps: its frames per second.
    """

    def __init__(self, num_frames: int, fps: float) -> None:
        self._step = max(1, math.ceil(num_frames / SHEET_FRAMES))
        self._fps = fps
        self._seen = 0
        self._kept: list[Image.Image] = []

    def add(self, frames: Frames) -> None:
        """The video's next frames, uint8 RGB [T, H, W, 3]."""
        first = -self._seen % self._step
        for frame in frames[first :: self._step]:
            self._kept.append(_within(frame, THUMBNAIL_SIDE))
        self._seen += len(frames)

    def thumbnail(self) -> bytes:
        """WebP of the middle of what came so far."""
        place = round((self._seen - 1) / 2 / self._step)
        return _webp(self._kept[min(place, len(self._kept) - 1)])

    def sheet(self) -> tuple[bytes, Sheet]:
        """WebP of all frames kept so far in a grid, and its geometry."""
        tiles = [picture.copy() for picture in self._kept]
        for tile in tiles:
            tile.thumbnail((TILE_SIDE, TILE_SIDE), Image.Resampling.LANCZOS)
        wide, high = tiles[0].size
        # about as wide as high, so that neither side meets WebP's limit of 16383 pixels
        columns = min(len(tiles), math.ceil(math.sqrt(len(tiles) * high / wide)))
        rows = math.ceil(len(tiles) / columns)
        sheet = Image.new("RGB", (columns * wide, rows * high))
        for place, tile in enumerate(tiles):
            sheet.paste(tile, (place % columns * wide, place // columns * high))
        geometry = Sheet(columns, rows, len(tiles), wide, high, self._step / self._fps)
        return _webp(sheet), geometry


def preview(frames: Frames) -> bytes:
    """Small WebP of a chunk's middle frame."""
    return _webp(_within(frames[len(frames) // 2], PREVIEW_SIDE), method=0)


def _within(frame: Frames, side: int) -> Image.Image:
    """A picture at most ``side`` pixels wide and high; a smaller one keeps its size."""
    picture = Image.fromarray(np.ascontiguousarray(frame))
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    return picture


def _webp(picture: Image.Image, method: int = 4) -> bytes:
    data = io.BytesIO()
    picture.save(data, "WEBP", quality=QUALITY, method=method)
    return data.getvalue()
