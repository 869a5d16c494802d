"""Uploaded files as a hostile client would send them, checked in the real limited process."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import av
import imageio.v3 as iio
import numpy as np
import pytest
from PIL import Image

from longtake.errors import RequestError
from longtake.queue.upload_check import Checked, Kind, UploadLimits, check_upload
from longtake.settings import MIB

LIMITS = UploadLimits(pixels=1 << 20, frames=40, decode_s=20, memory_bytes=2048 * MIB)
NOISE = np.random.default_rng(1).integers(0, 255, (24, 32, 3), np.uint8)


def clip(path: Path, frames: int = 6, size: tuple[int, int] = (32, 24), fps: int = 8) -> Path:
    data = np.zeros((frames, size[1], size[0], 3), np.uint8)
    data[:, :, ::3] = np.arange(frames, dtype=np.uint8)[:, None, None, None] * 9
    iio.imwrite(path, data, fps=fps, codec="libx264", macro_block_size=1)
    return path


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG that says it has that size, whatever its chunks hold."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + body


def sound(path: Path) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate = 16_000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    return path


def check(path: Path, kind: Kind | None = None, limits: UploadLimits = LIMITS) -> Checked:
    return check_upload(path, "input_reference", "mine.bin", limits, kind)


def test_an_image_is_described_as_it_is_displayed(tmp_path: Path) -> None:
    still = Image.fromarray(NOISE)
    exif = still.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    still.save(tmp_path / "a", "JPEG", exif=exif)

    assert check(tmp_path / "a", "image") == Checked("image", "image/jpeg", 24, 32, 1, None, None)


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.mkv"])
def test_a_clip_is_described(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = np.zeros((6, 24, 32, 3), np.uint8)
    codec = "libvpx-vp9" if name == "a.webm" else "libx264"
    iio.imwrite(path, data, fps=8, codec=codec, macro_block_size=1)
    types = {"a.mp4": "video/mp4", "a.webm": "video/webm", "a.mkv": "video/x-matroska"}

    assert check(path, "video") == Checked("video", types[name], 32, 24, 6, 8.0, 0.75)


@pytest.mark.parametrize("form", ["GIF", "PNG"])
def test_a_moving_picture_is_a_video(tmp_path: Path, form: str) -> None:
    frames = [Image.fromarray(np.roll(NOISE, k, axis=1)) for k in range(3)]
    frames[0].save(tmp_path / "a", form, save_all=True, append_images=frames[1:], duration=100)

    checked = check(tmp_path / "a")

    assert (checked.kind, checked.frames, checked.width) == ("video", 3, 32)


@pytest.mark.parametrize(("kind", "legal"), [("image", "give an image"), ("video", "give a video")])
def test_the_wrong_kind_is_refused(tmp_path: Path, kind: Kind, legal: str) -> None:
    path = clip(tmp_path / "a.mp4")
    if kind == "video":
        Image.fromarray(NOISE).save(path, "PNG")

    with pytest.raises(RequestError, match=f"^input_reference='mine.bin': is a .*; {legal}$"):
        check(path, kind)


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def still_png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(NOISE).save(file, "PNG")
    return file.getvalue()


def damaged(path: Path) -> Path:
    data = clip(path, 30).read_bytes()
    return put(path, data[:1100] + bytes(900) + data[2000:])


def zipped(path: Path) -> Path:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a", "b")
    return put(path, still_png() + archive.getvalue())


def moving_webp(path: Path) -> Path:
    pages = [Image.fromarray(NOISE), Image.fromarray(NOISE[::-1])]
    pages[0].save(path, "WEBP", save_all=True, append_images=pages[1:])
    return path


NEITHER = "neither an image nor a video that can be read to its end"
ZEROS = (b"IDAT", zlib.compress(bytes(60_000 * 3), 9))
LONG_TEXT = (b"zTXt", b"a\0\0" + zlib.compress(bytes(80 * MIB), 9))
# how to make a file that must be refused, and a part of the reason
HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty": (lambda p: put(p, b""), "is empty"),
    "text": (lambda p: put(p, b"no picture"), NEITHER),
    "playlist": (lambda p: put(p, b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"), NEITHER),
    "concat": (lambda p: put(p, b"ffconcat version 1.0\nfile /etc/passwd\n"), NEITHER),
    "short png": (lambda p: put(p, still_png()[:900]), "truncated or damaged"),
    "short mp4": (lambda p: put(p, clip(p).read_bytes()[:600]), NEITHER),
    "mp4 without end": (lambda p: put(p, clip(p).read_bytes()[:-300]), NEITHER),
    "damaged mp4": (damaged, NEITHER),
    "sound": (sound, "has no video in it"),
    "png of 3.6 Gpixels": (
        lambda p: put(p, png(60_000, 60_000, ZEROS)),
        "has too many pixels; at most 1048576 pixels",
    ),
    "png over the setting": (
        lambda p: put(p, png(2000, 1000, ZEROS)),
        "has 2000x1000 pixels; at most 1048576 pixels",
    ),
    "png with a text of 80 MiB": (
        lambda p: put(p, png(8, 8, LONG_TEXT, (b"IDAT", zlib.compress(bytes(200))))),
        "truncated or damaged",
    ),
    "clip over the setting": (
        lambda p: clip(p, 2, (2048, 1024)),
        "has 2048x1024 pixels; at most 1048576 pixels",
    ),
    "clip of many frames": (lambda p: clip(p, 41), "has 41 frames; at most 40 frames"),
    "zip at the end": (zipped, "is a ZIP archive"),
    "pdf in the head": (lambda p: put(p, b"GIF89a%PDF-1.4" + bytes(200)), "is a PDF too"),
    "page in the head": (
        lambda p: put(p, b"BM<ScRiPt>alert(1)</script>" + bytes(90)),
        "is a page or a script too",
    ),
    "animated webp": (moving_webp, "has several frames"),
    "folder": (lambda p: p.parent, "is a folder"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_and_its_path_not_told(tmp_path: Path, name: str) -> None:
    make, reason = HOSTILE[name]
    path = make(tmp_path / "file.mp4")

    with pytest.raises(RequestError) as refused:
        check(path)

    message = str(refused.value)
    assert message.startswith("input_reference='mine.bin': ")
    assert reason in message
    assert str(tmp_path) not in message


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(RequestError, match="is a device or pipe"):
        check(tmp_path / "pipe")


def test_time_and_memory_are_bounded(tmp_path: Path) -> None:
    path = clip(tmp_path / "large.mp4", 30, (1024, 768))

    with pytest.raises(RequestError, match=r"takes longer than 0\.01 s to decode"):
        check(path, limits=UploadLimits(1 << 20, 40, 0.01, 2048 * MIB))
    with pytest.raises(RequestError, match=r"mine\.bin"):
        check(path, limits=UploadLimits(1 << 20, 40, 20, 96 * MIB))


def test_the_process_is_bound_before_the_file_is_looked_at(tmp_path: Path) -> None:
    """The limits of the process itself, as it reports them from within."""
    script = (
        "import json, resource; from longtake.queue.upload_check import UploadLimits, _limit;"
        "_limit(UploadLimits(1, 1, 2.5, 2**31));"
        "print(json.dumps([resource.getrlimit(getattr(resource, 'RLIMIT_' + n))[0] for n in "
        "('AS', 'CPU', 'CORE')]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)

    assert done.stdout.strip() == b"[2147483648, 3, 0]"


def test_the_service_does_not_load_decoders_itself() -> None:
    script = (
        "import sys, longtake.queue.upload_check;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'av', 'PIL', 'numpy')))"
    )

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
