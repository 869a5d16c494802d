"""Images and clips as users give them, good, odd and broken."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from longtake.errors import MediaError, RequestError
from longtake.video.media import fit_image, fit_note, read_clip, read_image
from longtake.video.segments import Frames
from longtake.video.writer import open_writer

SIZE = (48, 32)


def picture(width: int = 40, height: int = 20) -> Frames:
    """Red to the left, blue to the right, brighter downwards."""
    image = np.zeros((height, width, 3), np.uint8)
    image[:, : width // 2, 0] = np.linspace(100, 255, height, dtype=np.uint8)[:, None]
    image[:, width // 2 :, 2] = np.linspace(100, 255, height, dtype=np.uint8)[:, None]
    return image


def moving(count: int, size: tuple[int, int] = SIZE) -> Frames:
    width, height = size
    frames = np.zeros((count, height, width, 3), np.uint8)
    for index in range(count):
        frames[index] = 4 * index
        frames[index, : height // 2, : width // 2] = (200, 4 * index, 40)
    return frames


def make_clip(path: Path, count: int, fps: float = 16, size: tuple[int, int] = SIZE) -> Path:
    with open_writer(path, size=size, fps=fps) as writer:
        writer.write(moving(count, size))
    return path


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixel."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    parts = [
        struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (chunk, data)
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "JPEG", "GIF"])
def test_image_kinds(tmp_path: Path, kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    path = tmp_path / "image"
    path.write_bytes(saved(Image.fromarray(picture()), kind, **options))
    image = read_image(path)
    assert image.dtype == np.uint8
    assert image.shape == (20, 40, 3)
    if kind in ("JPEG", "GIF"):
        assert np.abs(image.astype(int) - picture()).mean() < 8
    else:
        assert np.array_equal(image, picture())


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    path = tmp_path / "phone.png"
    Image.fromarray(picture()).save(path, exif=exif)
    assert np.array_equal(read_image(path), np.rot90(picture(), -1))


def test_grey_palette_and_opaque_alpha_become_rgb(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    source = Image.fromarray(picture())
    for mode in ("L", "1", "RGBA", "LA", "P"):
        source.convert(mode).save(path)
        assert np.array_equal(read_image(path), np.asarray(source.convert(mode).convert("RGB")))


def test_first_picture_of_a_phone_jpeg(tmp_path: Path) -> None:
    path = tmp_path / "phone.jpg"
    main, preview = Image.new("RGB", (16, 8), (200, 0, 0)), Image.new("RGB", (8, 4), (0, 0, 200))
    main.save(path, "MPO", save_all=True, append_images=[preview])
    image = read_image(path)
    assert image.shape == (8, 16, 3)
    assert np.abs(image.mean((0, 1)) - (200, 0, 0)).max() < 3


def transparent() -> bytes:
    return saved(Image.new("RGBA", (8, 8), (255, 0, 0, 128)))


def animated() -> bytes:
    frames = [Image.fromarray(frame) for frame in moving(3)]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


def deep() -> bytes:
    return saved(Image.fromarray(np.full((8, 8), 40000, np.uint16)))


def cut(kind: str) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = saved(Image.fromarray(noise), kind)
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"hello world" * 20, "is not an image.*legal: PNG, JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
        (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "is not an image"),
        (cut("PNG"), "is truncated or damaged"),
        (cut("JPEG"), "is truncated or damaged"),
        (cut("WEBP"), "is truncated or damaged|is not an image"),
        (cut("BMP"), "is truncated or damaged"),
        (png_header(16, 16), "is truncated or damaged"),
        (png_header(9000, 9000), "more than 67108864"),
        (png_header(60000, 60000), "more than 67108864"),
        (transparent(), "has transparent pixels; put it on a background first"),
        (animated(), "has several frames"),
        (deep(), "has pixels of kind I;16; save it with 8 bits"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[:24],
)
def test_bad_images(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(data)
    with pytest.raises(MediaError, match=message) as caught:
        read_image(path, field="input_reference")
    assert caught.value.field == "input_reference"
    assert caught.value.value == path


@pytest.mark.parametrize("read", [read_image, lambda path: read_clip(path, SIZE, 16, 4)])
def test_what_is_not_a_file(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    for path, message in {
        tmp_path / "none.png": "no such file",
        tmp_path: "is a folder, not a file",
        tmp_path / "pipe": "is a device or pipe",
        tmp_path / "file" / "image.png": "Not a directory",
        tmp_path / "nul\0.png": "null",
    }.items():
        with pytest.raises(MediaError, match=message) as caught:
            read(path)
        assert caught.value.value == path


def test_fit_image_that_fits_is_untouched() -> None:
    image, note = fit_image(picture(), (40, 20))
    assert note == ""
    assert np.array_equal(image, picture())


@pytest.mark.parametrize(
    ("source", "size", "note"),
    [
        ((40, 20), (20, 10), "40x20, scaled to 20x10"),
        ((40, 20), (80, 40), "40x20, scaled to 80x40"),
        ((40, 20), (20, 20), "40x20, cropped around the middle to 20x20"),
        ((40, 20), (16, 16), "40x20, scaled to 32x16, cropped around the middle to 16x16"),
        ((20, 40), (16, 16), "20x40, scaled to 16x32, cropped around the middle to 16x16"),
    ],
)
def test_fit_image_says_what_it_did(
    source: tuple[int, int], size: tuple[int, int], note: str
) -> None:
    image, told = fit_image(picture(*source), size)
    assert told == note == fit_note(source, size)
    assert image.shape == (size[1], size[0], 3)
    assert image.dtype == np.uint8


def test_fit_image_keeps_the_middle() -> None:
    image, _ = fit_image(picture(), (20, 20))
    assert np.array_equal(image, picture()[:, 10:30])
    with pytest.raises(RequestError, match="must be positive"):
        fit_image(picture(), (0, 20))


def test_clip_that_fits_is_not_changed(tmp_path: Path) -> None:
    clip, info = read_clip(make_clip(tmp_path / "clip.png", 9), SIZE, 16, 20)
    assert np.array_equal(clip, moving(9))
    assert (info.frames, info.size, info.fps, info.changes) == (9, SIZE, Fraction(16), ())


@pytest.mark.parametrize("name", ["mp4", "webm", "gif"])
@pytest.mark.parametrize("fps", [16, 25])
def test_clip_kinds(tmp_path: Path, name: str, fps: int) -> None:
    clip, info = read_clip(make_clip(tmp_path / f"clip.{name}", 20, fps), SIZE, fps, 40)
    assert clip.shape == (20, 32, 48, 3)
    assert np.abs(clip.astype(int) - moving(20)).mean((1, 2, 3)).max() < 8
    assert info.changes == ()


def test_changes_of_a_clip_are_told(tmp_path: Path) -> None:
    source = make_clip(tmp_path / "clip.mp4", 33)
    clip, info = read_clip(source, (32, 32), 8, 10)
    assert clip.shape == (10, 32, 32, 3)
    assert info.frames == 33
    assert info.changes == (
        "48x32, cropped around the middle to 32x32",
        "16 fps to 8 fps",
        "cut after 10 frames",
    )
    # Every second frame of the source.
    assert clip[:, 28, 28].mean(-1) == pytest.approx([8 * k for k in range(10)], abs=6)
    slower, info = read_clip(source, SIZE, 32, 200)
    assert len(slower) == 66
    assert info.changes == ("16 fps to 32 fps",)


def test_exactly_max_frames_is_no_cut(tmp_path: Path) -> None:
    clip, info = read_clip(make_clip(tmp_path / "clip.mp4", 9), SIZE, 16, 9)
    assert len(clip) == 9
    assert info.changes == ()


def without_video(path: Path) -> None:
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", 44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def without_times(path: Path) -> None:
    with av.open(str(path), "w", format="matroska") as container:
        stream = container.add_stream("ffv1", 1000)
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        for array in moving(3):
            frame = av.VideoFrame.from_ndarray(array, format="rgb24").reformat(format="yuv420p")
            for packet in stream.encode(frame):
                packet.pts = packet.dts = 0
                packet.duration = 0
                container.mux(packet)


def without_frames(path: Path) -> None:
    with av.open(str(path), "w", format="avi") as container:
        stream = container.add_stream("mpeg4", 16)
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        container.start_encoding()


def cut_clip(name: str, keep: float) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        data = make_clip(path.with_name(f"whole.{name}"), 30).read_bytes()
        path.write_bytes(data[: int(len(data) * keep)])

    return make


def text(content: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        make_clip(path.with_name("secret.mp4"), 3)
        path.write_text(content)

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"hello world" * 50), "ffmpeg cannot read it: "),
        (without_video, "has no video in it"),
        (without_times, "no frame rate"),
        (without_frames, "holds no frames"),
        (cut_clip("mp4", 0.7), "ffmpeg cannot read it: "),
        (cut_clip("mp4", 0.1), "ffmpeg cannot read it: |has no video|holds no frames"),
        (cut_clip("webm", 0.7), "ffmpeg cannot read it: File ended prematurely"),
        (cut_clip("gif", 0.7), "ffmpeg cannot read it: "),
        (cut_clip("png", 0.7), "ffmpeg cannot read it: "),
        (text("ffconcat version 1.0\nfile secret.mp4\n"), "not on whitelist"),
        (text("#EXTM3U\n#EXTINF:1,\nsecret.mp4\n#EXT-X-ENDLIST\n"), "ffmpeg cannot read it: "),
    ],
    ids=[
        "empty", "text", "audio", "times", "frames",
        "mp4", "mp4-head", "webm", "gif", "png", "concat", "playlist",
    ],
)  # fmt: skip
def test_bad_clips(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "clip.mp4"
    make(path)
    with pytest.raises(MediaError, match=message) as caught:
        read_clip(path, SIZE, 16, 100)
    assert caught.value.field == "input_reference"
    assert caught.value.value == path


@pytest.mark.parametrize(
    ("size", "fps", "max_frames", "field"),
    [
        (SIZE, float("nan"), 4, "fps"),
        (SIZE, 0, 4, "fps"),
        (SIZE, 16, 0, "num_frames"),
        ((0, 32), 16, 4, "size"),
    ],
)
def test_illegal_wishes(
    tmp_path: Path, size: tuple[int, int], fps: float, max_frames: int, field: str
) -> None:
    path = make_clip(tmp_path / "clip.mp4", 3)
    with pytest.raises(RequestError) as caught:
        read_clip(path, size, fps, max_frames)
    assert caught.value.field == field
