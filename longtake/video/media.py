"""Images and clips that a user gives, as arrays; whatever is changed on the way is said.

Nothing is guessed: an image with several frames, real transparency or more than 8 bits a channel
is refused with what to do about it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from longtake.errors import MediaError, RequestError
from longtake.video import ffmpeg
from longtake.video.segments import Frames, frame_rate

MAX_IMAGE_PIXELS = 1 << 26  # 8192 x 8192, 200 MB as RGB
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


@dataclass(frozen=True, slots=True)
class ClipInfo:
    """A clip as it was: frames, size (w, h), fps; ``changes`` says what was done to it."""

    frames: int
    size: tuple[int, int]
    fps: Fraction
    changes: tuple[str, ...]


def read_image(path: Path, *, field: str = "image") -> Frames:
    """The image as uint8 RGB [H,W,3], turned as its EXIF orientation says."""
    ffmpeg.check_file(path, field)
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            # Before any pixel is decoded: the header of a bomb is small and true.
            _check_image(image, path, field)
            turned = ImageOps.exif_transpose(image)
            if (
                turned.has_transparency_data
                and np.asarray(turned.convert("RGBA"))[..., 3].min() < 255
            ):
                reason = "has transparent pixels; put it on a background first"
                raise MediaError(field, path, reason)
            return np.asarray(turned.convert("RGB"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise MediaError(field, path, f"has more than {MAX_IMAGE_PIXELS} pixels") from None
    except UnidentifiedImageError:
        legal = "legal: " + ", ".join(IMAGE_FORMATS)
        raise MediaError(field, path, "is not an image, or not of a known kind", legal) from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        # Pillow says SyntaxError for a broken PNG.
        raise MediaError(field, path, f"is truncated or damaged: {error}") from error


def _check_image(image: Image.Image, path: Path, field: str) -> None:
    width, height = image.size
    if width * height > MAX_IMAGE_PIXELS:
        reason = f"has {width}x{height} pixels, more than {MAX_IMAGE_PIXELS}"
        raise MediaError(field, path, reason)
    # A phone's MPO is a JPEG with previews or a gain map behind the picture.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise MediaError(field, path, "has several frames; give it as a clip or save one of them")
    if image.mode in _DEEP_MODES:
        raise MediaError(field, path, f"has pixels of kind {image.mode}; save it with 8 bits")


def fit_image(image: Frames, size: tuple[int, int]) -> tuple[Frames, str]:
    """``image`` scaled to cover ``size`` (w, h) and cropped around its middle, and what was done.

    The note is empty where the image already has the size.
    """
    width, height = size
    if width < 1 or height < 1:
        raise RequestError("size", f"{width}x{height}", "width and height must be positive")
    source = Image.fromarray(image)
    note = fit_note(source.size, size)
    if not note:
        return image, note
    fitted = ImageOps.fit(source, size, method=Image.Resampling.LANCZOS)
    return np.asarray(fitted), note


def fit_note(source: tuple[int, int], size: tuple[int, int]) -> str:
    """What scaling ``source`` to cover ``size``, both (w, h), does; empty for nothing."""
    if source == size:
        return ""
    scale = max(Fraction(size[0], source[0]), Fraction(size[1], source[1]))
    scaled = round(source[0] * scale), round(source[1] * scale)
    steps = [f"{source[0]}x{source[1]}"]
    if scaled != source:
        steps.append(f"scaled to {scaled[0]}x{scaled[1]}")
    if scaled != size:
        steps.append(f"cropped around the middle to {size[0]}x{size[1]}")
    return ", ".join(steps)


def read_clip(
    path: Path,
    size: tuple[int, int],
    fps: float | Fraction,
    max_frames: int,
    *,
    field: str = "input_reference",
    timeout_s: float = ffmpeg.TIME_LIMIT_S,
) -> tuple[Frames, ClipInfo]:
    """At most ``max_frames`` of a clip as uint8 RGB [T,H,W,3] of ``size`` (w, h) at ``fps``."""
    width, height = size
    if width < 1 or height < 1:
        raise RequestError("size", f"{width}x{height}", "width and height must be positive")
    if max_frames < 1:
        raise RequestError("num_frames", max_frames, "a clip has at least one frame")
    rate = frame_rate(fps)
    source = ffmpeg.probe(path, field=field, timeout_s=timeout_s)
    with tempfile.TemporaryDirectory(prefix="longtake-") as folder:
        uniform = Path(folder) / "clip.mkv"
        # One more than asked for, to know whether any was left out.
        ffmpeg.normalise_clip(
            path, uniform, size, rate, max_frames=max_frames + 1, field=field, timeout_s=timeout_s
        )
        frames, more = _decode(uniform, size, max_frames)
    if len(frames) == 0:
        raise MediaError(field, path, "none of its frames can be decoded")
    changes = [fit_note(source.size, size)]
    # A container may round its times, so a difference too small to move a frame is none.
    if abs(rate / source.fps - 1) * source.frames >= 0.5:
        changes.append(f"{_shown(source.fps)} fps to {_shown(rate)} fps")
    if more:
        changes.append(f"cut after {max_frames} frames")
    kept = tuple(change for change in changes if change)
    return frames, ClipInfo(source.frames, source.size, source.fps, kept)


def _decode(clip: Path, size: tuple[int, int], max_frames: int) -> tuple[Frames, bool]:
    """The frames of a clip of our own making, and whether there were more."""
    frames: list[Frames] = []
    with av.open(str(clip)) as container:
        for frame in container.decode(video=0):
            if len(frames) == max_frames:
                return np.stack(frames), True
            frames.append(cast(Frames, frame.to_ndarray(format="rgb24")))
    if not frames:
        return np.empty((0, size[1], size[0], 3), np.uint8), False
    return np.stack(frames), False


def _shown(fps: Fraction) -> str:
    return f"{float(fps):.6g}"
