"""Writers: real encodes and decodes of tiny clips, and every way in which a target is refused."""

from __future__ import annotations

import subprocess
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import imageio_ffmpeg
import numpy as np
import pytest
from av.video.codeccontext import VideoCodecContext
from PIL import Image

from longtake.errors import OutputError
from longtake.video.segments import (
    APNG,
    H264,
    VP9,
    ChunkEncoder,
    Codec,
    Frames,
)
from longtake.video.writer import FORMATS, FRAMES_DIR, open_writer

SIZE = (48, 32)
CHUNKS = [9, 8, 8]
FILES = [name for name in FORMATS if name != FRAMES_DIR]


def moving(count: int, size: tuple[int, int] = SIZE) -> Frames:
    """A bright bar over a gradient; every frame differs from the one before."""
    width, height = size
    frames = np.zeros((count, height, width, 3), np.uint8)
    frames[..., 0] = np.linspace(0, 200, width, dtype=np.uint8)
    frames[..., 2] = np.linspace(200, 40, height, dtype=np.uint8)[:, None]
    for index in range(count):
        frames[index, :, (3 * index) % width : (3 * index) % width + 6, 1] = 220
    return frames


def flat(colour: tuple[int, int, int], count: int = 4) -> Frames:
    return np.broadcast_to(np.array(colour, np.uint8), (count, SIZE[1], SIZE[0], 3)).copy()


def split(frames: Frames, counts: list[int]) -> list[Frames]:
    return np.split(frames, np.cumsum(counts)[:-1])


def write(path: Path, chunks: list[Frames], fps: float | Fraction = 16) -> Path:
    with open_writer(path, size=SIZE, fps=fps) as writer:
        for chunk in chunks:
            writer.write(chunk)
    return path


def decode(path: Path) -> Frames:
    with av.open(str(path)) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


def interrupted(path: Path, kind: str) -> None:
    with open_writer(path, size=SIZE, fps=16, format=kind) as writer:
        writer.write(moving(4))
        raise KeyboardInterrupt


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("name", FILES)
def test_every_frame_comes_back(tmp_path: Path, name: str) -> None:
    frames = moving(25)
    path = write(tmp_path / f"clip.{name}", split(frames, CHUNKS))
    back = decode(path)
    assert back.shape == frames.shape
    # Each frame is nearest to itself (or to one 16 away, where the bar is back), so none is
    # doubled, dropped or out of order.
    for index, frame in enumerate(back):
        errors = np.abs(frames.astype(int) - frame).mean((1, 2, 3))
        assert errors[index] < 13
        assert (int(errors.argmin()) - index) % 16 == 0
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["png", FRAMES_DIR])
def test_png_is_lossless(tmp_path: Path, name: str) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (25, 32, 48, 3), np.uint8)
    path = tmp_path / f"clip.{name}"
    with open_writer(path, size=SIZE, fps=16, format=name) as writer:
        for chunk in split(frames, CHUNKS):
            writer.write(chunk)
    if name == "png":
        back = decode(path)
    else:
        names = [f"frame_{index:06d}.png" for index in range(25)]
        assert sorted(p.name for p in path.iterdir()) == names
        back = np.stack([np.asarray(Image.open(path / name)) for name in names])
    assert np.array_equal(back, frames)


def test_animated_png_plays_in_pillow_and_one_frame_is_a_plain_png(tmp_path: Path) -> None:
    with Image.open(write(tmp_path / "many.png", [moving(5)])) as image:
        assert getattr(image, "n_frames", 1) == 5
        assert image.info["duration"] == pytest.approx(1000 / 16)
    path = write(tmp_path / "one.png", [moving(1)])
    assert b"acTL" not in path.read_bytes()
    with Image.open(path) as image:
        assert np.array_equal(np.asarray(image), moving(1)[0])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("colour", [(230, 20, 30), (10, 200, 60), (30, 60, 220), (255, 255, 255)])
def test_flat_colours_survive(tmp_path: Path, name: str, colour: tuple[int, int, int]) -> None:
    back = decode(write(tmp_path / f"flat.{name}", [flat(colour), flat(colour)]))
    assert np.abs(back.mean((0, 1, 2)) - colour).max() < 3


@pytest.mark.parametrize("name", ["mp4", "webm"])
def test_colour_is_tagged_and_really_bt709(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / f"red.{name}", [flat((255, 0, 0))])
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert context.pix_fmt == "yuv420p"
        assert (context.colorspace, context.color_range) == (1, 1)
        if name == "mp4":
            assert (context.color_primaries, context.color_trc) == (1, 1)
        frame = next(container.decode(video=0))
        luma = np.asarray(frame.planes[0])[0]
    # Pure red has luma 16 + 219 x 0.2126 in bt709, 16 + 219 x 0.299 in bt601.
    assert abs(int(luma) - 62.6) <= 2


@pytest.mark.parametrize(
    ("fps", "exact"),
    [
        (16, Fraction(16)),
        (23.976, Fraction(2997, 125)),
        (24000 / 1001, Fraction(24000, 1001)),
        (Fraction(30000, 1001), Fraction(30000, 1001)),
        (12.5, Fraction(25, 2)),
    ],
)
def test_constant_frame_rate(tmp_path: Path, fps: float | Fraction, exact: Fraction) -> None:
    path = write(tmp_path / "clip.mp4", split(moving(25), CHUNKS), fps)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == exact
        assert stream.frames == 25
        assert stream.time_base is not None
        assert stream.duration is not None
        assert stream.duration * stream.time_base == 25 / exact
        packets = [packet for packet in container.demux(stream) if packet.size]
    assert [packet.pts for packet in packets] == [packet.dts for packet in packets]
    times = [packet.pts * packet.time_base for packet in packets if packet.pts is not None]
    assert times == [index / exact for index in range(25)]


@pytest.mark.parametrize("name", ["mp4", "webm", "gif"])
def test_a_single_frame_lasts_as_long_as_any(tmp_path: Path, name: str) -> None:
    with av.open(str(write(tmp_path / f"clip.{name}", [moving(1)], 10))) as container:
        assert container.duration == av.time_base // 10


def test_encoders_do_not_look_at_the_number_of_cores() -> None:
    for codec in (H264, VP9, APNG):
        context = av.CodecContext.create(codec.encoder, "w")
        ChunkEncoder(codec, SIZE, Fraction(16)).configure(cast(VideoCodecContext, context))
        assert context.thread_count == 1


def test_mp4_starts_with_its_index(tmp_path: Path) -> None:
    data = write(tmp_path / "clip.mp4", [moving(9)]).read_bytes()
    boxes, at = [], 0
    while at < len(data):
        boxes.append(data[at + 4 : at + 8].decode())
        at += int.from_bytes(data[at : at + 4], "big")
    assert boxes.index("moov") < boxes.index("mdat")


@pytest.mark.parametrize("name", ["mp4", "webm"])
def test_metadata_can_be_read_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"clip.{name}"
    told = {"title": "a red bäll", "prompt": "a red bäll; über\na=b #1 \N{SNOWMAN}", "seed": "7"}
    with open_writer(path, size=SIZE, fps=16, metadata=told) as writer:
        writer.write(moving(4))
    with av.open(str(path)) as container:
        found = {key.lower(): value for key, value in container.metadata.items()}
    assert {key: found.get(key) for key in told} == told
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path)]
    shown = subprocess.run([*command, "-f", "ffmetadata", "-"], capture_output=True, check=True)
    assert "seed=7" in shown.stdout.decode().lower()


def test_metadata_with_nul_or_lone_surrogate_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    with open_writer(path, size=SIZE, fps=16, metadata={"prompt": "a\0b\udc80c"}) as writer:
        writer.write(moving(1))
    with av.open(str(path)) as container:
        assert container.metadata["prompt"] == "a\N{REPLACEMENT CHARACTER}b?c"


@pytest.mark.parametrize("name", ["mp4", "webm"])
def test_each_chunk_is_a_closed_group_of_pictures(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / f"clip.{name}", split(moving(25), CHUNKS))
    whole = decode(path)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        starts = [i for i, packet in enumerate(packets) if packet.is_keyframe]
        assert starts == [0, 9, 17]
        decoder = av.CodecContext.create(stream.codec_context.name, "r")
        decoder.extradata = stream.codec_context.extradata
        alone = [f for p in packets[9:17] for f in decoder.decode(p)] + decoder.decode(None)  # type: ignore[attr-defined]
    assert np.array_equal(np.stack([f.to_ndarray(format="rgb24") for f in alone]), whole[9:17])


def test_chunks_of_one_frame(tmp_path: Path) -> None:
    frames = moving(7)
    back = decode(write(tmp_path / "clip.mp4", split(frames, [1, 1, 1, 4])))
    assert len(back) == 7
    assert np.abs(back.astype(int) - frames).mean((1, 2, 3)).max() < 13


@pytest.mark.parametrize("name", ["mp4", "webm"])
def test_pixels_do_not_depend_on_an_interruption(tmp_path: Path, name: str) -> None:
    chunks = split(moving(25), CHUNKS)
    whole = decode(write(tmp_path / f"whole.{name}", chunks))
    stopped = open_writer(tmp_path / f"again.{name}", size=SIZE, fps=16)
    stopped.write(chunks[0])
    stopped.write(chunks[1])
    stopped.abort()
    assert np.array_equal(decode(write(tmp_path / f"again.{name}", chunks)), whole)


@pytest.mark.parametrize("codec", [H264, VP9])
def test_a_segment_is_the_same_alone(codec: Codec) -> None:
    encoder = ChunkEncoder(codec, SIZE, Fraction(16))
    first, second = split(moving(17), [9, 8])
    encoder.encode(first, 0)
    after = [bytes(packet) for packet in encoder.encode(second, 9)]
    assert [bytes(packet) for packet in encoder.encode(second, 0)] == after


@pytest.mark.parametrize("name", FILES)
def test_closing_after_any_chunk_leaves_a_playable_file(tmp_path: Path, name: str) -> None:
    chunks = split(moving(25), CHUNKS)
    for count in (1, 2):
        path = write(tmp_path / f"part{count}.{name}", chunks[:count])
        assert len(decode(path)) == sum(CHUNKS[:count])


@pytest.mark.parametrize("name", FORMATS)
def test_target_appears_only_when_closed(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"clip.{name}"
    writer = open_writer(path, size=SIZE, fps=16, format=name)
    writer.write(moving(9))
    assert writer.frames_written == 9
    if name == FRAMES_DIR:
        assert len(list(path.iterdir())) == 9
    else:
        assert not path.exists()
        assert [p.name.startswith(f".clip.{name}.part-") for p in tmp_path.iterdir()] == [True]
    writer.close()
    writer.close()
    writer.abort()
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OutputError, match="already closed"):
        writer.write(moving(1))


@pytest.mark.parametrize("name", FORMATS)
def test_abort_zero_frames_and_exceptions_leave_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"clip.{name}"
    open_writer(path, size=SIZE, fps=16, format=name).close()
    assert snapshot(tmp_path) == {}
    writer = open_writer(path, size=SIZE, fps=16, format=name)
    writer.write(moving(9))
    writer.abort()
    writer.abort()
    assert snapshot(tmp_path) == {}
    with pytest.raises(KeyboardInterrupt):
        interrupted(path, name)
    assert snapshot(tmp_path) == {}


def test_file_there_before_is_replaced_by_close_and_kept_by_abort(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"old")
    writer = open_writer(path, size=SIZE, fps=16)
    writer.write(moving(4))
    writer.abort()
    assert snapshot(tmp_path) == {"clip.mp4": b"old"}
    assert len(decode(write(path, [moving(4)]))) == 4


def test_link_keeps_being_one(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "clip.mp4"
    link.symlink_to(tmp_path / "far" / "real.mp4")
    write(link, [moving(4)])
    assert link.is_symlink()
    assert len(decode(tmp_path / "far" / "real.mp4")) == 4


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    path = write(tmp_path / "clip.mp4", [moving(1)])
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_png_takes_odd_sizes(tmp_path: Path) -> None:
    with open_writer(tmp_path / "clip.png", size=(47, 31), fps=16) as writer:
        writer.write(moving(2, (47, 31)))
    assert np.array_equal(decode(tmp_path / "clip.png"), moving(2, (47, 31)))


def test_apng_options_are_known() -> None:
    """PyAV drops options that an encoder does not have without a word."""
    context = av.CodecContext.create(APNG.encoder, "w")
    known = {option.name for option in context.supported_options.private}
    generic = {option.name for option in context.supported_options.generic}
    assert set(APNG.options) <= known | generic


def test_longest_legal_name_and_capital_extension(tmp_path: Path) -> None:
    write(tmp_path / ("n" * 251 + ".MP4"), [moving(1)])
    write(tmp_path / "a%03d:b.mp4", [moving(1)])
    assert sorted(len(decode(path)) for path in tmp_path.iterdir()) == [1, 1]
