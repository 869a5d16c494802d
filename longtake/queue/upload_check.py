"""What an uploaded file is, found out by decoding all of it in a process with limits.

``check_upload`` starts ``python -m longtake.queue.upload_check`` in a session of its own: bounded
address space, processor time, file size and wall clock, an empty environment and an empty folder.
It decodes the way the engine will, so what is accepted here is not refused later, and prints one
line of JSON. A file that makes a decoder crash, loop or swallow memory ends that process only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from longtake.errors import MediaError, RequestError
from longtake.settings import MIB, Settings

Kind = Literal["image", "video"]

START_S = 10.0  # for the process to start and import its decoders
_TAIL_BYTES = 65_557  # where a ZIP's end record can begin: 22 bytes and a comment of 65,535
_HEAD_BYTES = 1024
_DECODED_SIZE = (16, 16)
_SCRATCH_BYTES = 256 * MIB  # for the clip of that size
_ANSWER_BYTES = 65_536
_UNREADABLE = "cannot be decoded"
_NEITHER = "is neither an image nor a video that can be read to its end"
_MARKUP = (b"<html", b"<script", b"<svg", b"<!doctype", b"<?php", b"<?xml")
_VIDEO_TYPES = (
    (b"ftypqt", 4, "video/quicktime"),
    (b"ftyp", 4, "video/mp4"),
    (b"\x1aE\xdf\xa3", 0, "video/x-matroska"),
    (b"AVI ", 8, "video/x-msvideo"),
    (b"GIF8", 0, "image/gif"),
    (b"\x89PNG", 0, "image/apng"),
    (b"OggS", 0, "video/ogg"),
    (b"FLV", 0, "video/x-flv"),
)


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """What the check may use: pixels of a frame, frames, seconds and bytes of memory."""

    pixels: int
    frames: int
    decode_s: float
    memory_bytes: int

    @classmethod
    def of(cls, settings: Settings) -> UploadLimits:
        """The limits that the settings give."""
        return cls(
            settings.max_upload_pixels,
            settings.max_upload_frames,
            settings.upload_decode_s,
            settings.upload_memory_bytes,
        )


@dataclass(frozen=True, slots=True)
class Checked:
    """What a file turned out to be; an image has one frame and no rate. Size as displayed."""

    kind: Kind
    content_type: str
    width: int
    height: int
    frames: int
    fps: float | None
    seconds: float | None


def check_upload(
    path: Path, field: str, name: str, limits: UploadLimits, kind: Kind | None = None
) -> Checked:
    """What the file at ``path`` is. ``name`` is what messages call it; ``kind`` what it must be.

    Raises:
        RequestError: it is neither an image nor a video, is damaged, or passes a limit.
    """
    with tempfile.TemporaryDirectory(prefix="longtake-check-") as folder:
        command = [sys.executable, "-P", "-m", "longtake.queue.upload_check"]
        work = json.dumps([str(path), kind, asdict(limits)])
        process = subprocess.Popen(  # noqa: S603 - our own module; the path is an argument of it
            [*command, work],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        output, late = _output(process, limits.decode_s + START_S)
    try:
        answer = json.loads(output)
    except ValueError:
        late = late or process.returncode == -signal.SIGXCPU
        reason = f"takes longer than {limits.decode_s:g} s to decode" if late else _UNREADABLE
        raise RequestError(field, name, reason) from None
    if "reason" in answer:
        raise RequestError(field, name, answer["reason"], answer["legal"])
    return Checked(**answer)


def _environment(folder: str) -> dict[str, str]:
    """Nothing of the service's own, such as secrets; threads would reserve address space."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
    kept = {key: os.environ[key] for key in ("PATH", "PYTHONPATH", "LANG") if key in os.environ}
    return {**kept, **single, "TMPDIR": folder, "HOME": folder}


def _output(process: subprocess.Popen[bytes], limit_s: float) -> tuple[bytes, bool]:
    """What the process says, and whether it had to be stopped; ends all that it started."""
    late = threading.Event()

    def stop() -> None:
        late.set()
        _kill(process)

    timer = threading.Timer(limit_s, stop)
    timer.start()
    try:
        output = process.stdout.read(_ANSWER_BYTES) if process.stdout else b""
    finally:
        timer.cancel()
        timer.join()
        # Before it is waited for, while its number cannot belong to another process.
        _kill(process)
        process.wait()
        if process.stdout:
            process.stdout.close()
    return output, late.is_set()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the group that the process leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _limit(limits: UploadLimits) -> None:
    """Bind this process and its children before anything looks at the file."""
    cpu_s = math.ceil(limits.decode_s)
    for what, soft, hard in (
        (resource.RLIMIT_AS, limits.memory_bytes, limits.memory_bytes),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_FSIZE, _SCRATCH_BYTES, _SCRATCH_BYTES),
        (resource.RLIMIT_NOFILE, 128, 128),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        ceiling = resource.getrlimit(what)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(what, (soft, hard))


def _inspect(path: Path, kind: Kind | None, limits: UploadLimits) -> Checked:
    # Here, because the limits come first and the parent needs no decoder.
    from longtake.video import ffmpeg

    ffmpeg.check_file(path, "file")
    _refuse_polyglot(path)
    image_type = _image_type(path, limits)
    found: Kind = "image" if image_type else "video"
    if kind is not None and kind != found:
        raise RequestError("file", path, f"is a {found}", f"give a{'n' * (kind == 'image')} {kind}")
    return _check_image(path, image_type) if image_type else _check_video(path, limits)


def _refuse_polyglot(path: Path) -> None:
    """Refuse a file that another program would take for an archive, a document or a page."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read()
    what = ""
    if b"%PDF-" in head:
        what = "a PDF"
    elif any(mark in head.lower() for mark in _MARKUP):
        what = "a page or a script"
    else:
        end = tail.rfind(b"PK\x05\x06")
        # the last field of the record is the length of the comment, which ends the file
        if end >= 0 and len(tail) >= end + 22:
            comment = int.from_bytes(tail[end + 20 : end + 22], "little")
            what = "a ZIP archive" if len(tail) == end + 22 + comment else ""
    if what:
        raise RequestError("file", path, f"is {what} too", "save it anew as an image or a video")


def _image_type(path: Path, limits: UploadLimits) -> str | None:
    """The content type of a still image of legal size; None for what has several frames or none."""
    import warnings

    from PIL import Image, UnidentifiedImageError

    from longtake.video.media import IMAGE_FORMATS

    warnings.simplefilter("error", Image.DecompressionBombWarning)
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            moving = getattr(image, "is_animated", False)
            if image.format in ("GIF", "PNG") and moving:
                return None
            pixels = image.width * image.height
            if pixels > limits.pixels:
                reason = f"has {image.width}x{image.height} pixels"
                raise RequestError("file", path, reason, f"at most {limits.pixels} pixels")
            return image.get_format_mimetype() or "application/octet-stream"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        legal = f"at most {limits.pixels} pixels"
        raise RequestError("file", path, "has too many pixels", legal) from None
    except RequestError:
        raise
    except UnidentifiedImageError:
        return None
    except Exception:
        # Pillow raises whatever its parsers meet
        raise RequestError("file", path, "is truncated or damaged") from None


def _check_image(path: Path, content_type: str) -> Checked:
    from longtake.video.media import read_image

    height, width = read_image(path, field="file").shape[:2]
    return Checked("image", content_type, width, height, 1, None, None)


def _check_video(path: Path, limits: UploadLimits) -> Checked:
    from longtake.video import ffmpeg

    clip = ffmpeg.probe(path, field="file", timeout_s=limits.decode_s)
    width, height = clip.size
    if width * height > limits.pixels:
        reason = f"has {width}x{height} pixels"
        raise RequestError("file", path, reason, f"at most {limits.pixels} pixels")
    if clip.frames > limits.frames:
        counted = "at least " if clip.frames == ffmpeg.MAX_SOURCE_FRAMES else ""
        reason = f"has {counted}{clip.frames} frames"
        raise RequestError("file", path, reason, f"at most {limits.frames} frames")
    # Every frame, by the very call that will read it for the engine, into a clip of no size.
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "clip.mkv"
        limit, seconds = limits.frames + 1, limits.decode_s
        ffmpeg.normalise_clip(
            path, small, _DECODED_SIZE, clip.fps, max_frames=limit, field="file", timeout_s=seconds
        )
    fps = float(clip.fps)
    return Checked("video", _video_type(path), width, height, clip.frames, fps, clip.frames / fps)


def _video_type(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(64)
    if b"webm" in head[4:]:
        return "video/webm"
    for mark, offset, content_type in _VIDEO_TYPES:
        if head[offset:].startswith(mark):
            return content_type
    return "application/octet-stream"


def _answer(path: Path, kind: Kind | None, limits: UploadLimits) -> dict[str, Any]:
    try:
        return asdict(_inspect(path, kind, limits))
    except RequestError as error:
        return {"reason": _reason(error, path, limits), "legal": error.legal}
    except (MemoryError, OSError):
        return {"reason": f"needs more than {limits.memory_bytes} bytes to decode", "legal": None}


def _reason(error: RequestError, path: Path, limits: UploadLimits) -> str:
    """The error's reason alone: the path is the server's affair."""
    text = str(error).removeprefix(f"file={path}: ").removeprefix(f"file='{path}': ")
    if error.legal:
        text = text.removesuffix(f"; {error.legal}")
    if "SIGXCPU" in text or "ffmpeg took longer" in text:
        return f"takes longer than {limits.decode_s:g} s to decode"
    if isinstance(error, MediaError):
        text = text.replace("ffmpeg cannot read it", _NEITHER)
        text = text.replace(f"file:{path}", "it").replace(str(path), "it")
    return text


def main(argument: str) -> None:
    """Check one file; ``argument`` is JSON: path, kind and limits."""
    path, kind, numbers = json.loads(argument)
    limits = UploadLimits(**numbers)
    _limit(limits)
    sys.stdout.write(json.dumps(_answer(Path(path), kind, limits)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
