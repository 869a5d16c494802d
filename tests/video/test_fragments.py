"""Fragmented mp4: the same pixels as the plain file, whoever made which segment."""

from __future__ import annotations

import io
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from longtake.errors import OutputError, RequestError
from longtake.video.fragments import FragmentEncoder, count_frames, join_segments
from longtake.video.writer import open_writer

Pixels = NDArray[np.uint8]
SIZE, FPS = (64, 48), 16
COUNTS = (5, 8, 1, 4)


@pytest.fixture(scope="module")
def chunks() -> list[Pixels]:
    """Noise that moves a little from frame to frame, and stands still in the last chunk."""
    draw = np.random.default_rng(0)
    made = []
    for count in COUNTS:
        steps = draw.integers(0, 4, (count, 48, 64, 3)).cumsum(0)
        made.append((60 + steps).astype(np.uint8))
    made[-1][:] = made[-1][0]
    return made


def decoded(data: bytes) -> tuple[Pixels, list[float | None]]:
    """All frames of a file and their times."""
    with av.open(io.BytesIO(data), "r") as container:
        frames = list(container.decode(video=0))
    pixels = np.stack([frame.to_ndarray(format="rgb24") for frame in frames])
    return pixels.astype(np.uint8), [frame.time for frame in frames]


def boxes(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Boxes of one level and their content."""
    while data:
        size, kind = struct.unpack(">I4s", data[:8])
        yield kind.decode(), data[8:size]
        data = data[size:]


def encode(chunks: list[Pixels], size: tuple[int, int] = SIZE) -> tuple[bytes, list[bytes]]:
    """Header and segments, each from an encoder of its own, the last segment first."""
    starts = [0, *itertools.accumulate(len(chunk) for chunk in chunks)]
    jobs = list(enumerate(zip(chunks, starts, strict=False)))
    made = {i: FragmentEncoder(size, FPS).encode(c, s, i) for i, (c, s) in reversed(jobs)}
    return FragmentEncoder(size, FPS).header, [made[i] for i in range(len(chunks))]


def store(folder: Path, header: bytes, segments: list[bytes]) -> tuple[Path, list[Path]]:
    """Header and segments as files."""
    paths = [folder / f"{index}.m4s" for index in range(len(segments))]
    for path, data in zip([folder / "init.mp4", *paths], [header, *segments], strict=True):
        path.write_bytes(data)
    return folder / "init.mp4", paths


@pytest.fixture
def plain(tmp_path: Path, chunks: list[Pixels]) -> bytes:
    """What the mp4 writer makes of the chunks."""
    path = tmp_path / "plain.mp4"
    with open_writer(path, size=SIZE, fps=FPS, metadata={"prompt": "a ball"}) as writer:
        for chunk in chunks:
            writer.write(chunk)
    return path.read_bytes()


def test_header_and_segments_play_as_the_plain_file(chunks: list[Pixels], plain: bytes) -> None:
    header, segments = encode(chunks)
    pixels, times = decoded(header + b"".join(segments))
    expected, expected_times = decoded(plain)
    assert np.array_equal(pixels, expected)
    assert times == expected_times == [i / FPS for i in range(sum(COUNTS))]


def test_a_segment_plays_without_those_before_it(chunks: list[Pixels], plain: bytes) -> None:
    header, segments = encode(chunks)
    pixels, times = decoded(header + segments[1])
    assert np.array_equal(pixels, decoded(plain)[0][5:13])
    assert times[0] == 5 / FPS


def test_boxes_say_what_a_player_needs(chunks: list[Pixels]) -> None:
    header, segments = encode(chunks)
    assert [kind for kind, _ in boxes(header)] == ["ftyp", "moov"]
    starts = []
    for index, segment in enumerate(segments):
        assert [kind for kind, _ in boxes(segment)] == ["moof", "mdat"]
        fragment = dict(boxes(dict(boxes(segment))["moof"]))
        assert struct.unpack(">I", fragment["mfhd"][4:]) == (index + 1,)
        track = dict(boxes(fragment["traf"]))
        starts.append(struct.unpack(">Q", track["tfdt"][4:])[0])
        # default-base-is-moof, and no offset of a file: MediaSource knows no file
        assert struct.unpack(">I", track["tfhd"][:4])[0] & 0x020001 == 0x020000
    assert starts == [s * 1024 for s in (0, 5, 13, 14)]


def test_the_codec_is_the_streams_own() -> None:
    encoder = FragmentEncoder((128, 80), 16)
    with av.open(io.BytesIO(encoder.header)) as container:
        config = container.streams.video[0].codec_context.extradata
    assert config is not None
    assert encoder.codecs == f"avc1.{config[1:4].hex()}" == "avc1.64000a"
    assert FragmentEncoder((1280, 720), 24).codecs == "avc1.64001f"


def test_a_header_depends_on_size_and_rate_alone(chunks: list[Pixels]) -> None:
    one, other = FragmentEncoder(SIZE, FPS), FragmentEncoder(SIZE, FPS)
    other.encode(chunks[0], 0, 0)
    assert one.header == other.header
    assert one.header != FragmentEncoder(SIZE, 24).header
    assert one.encode(chunks[1], 5, 1) == other.encode(chunks[1], 5, 1)


@pytest.mark.parametrize("fps", [24000 / 1001, 23.976, 60, 1])
def test_times_are_exact_at_any_rate(chunks: list[Pixels], fps: float) -> None:
    encoder = FragmentEncoder(SIZE, fps)
    far = 100_000
    data = encoder.header + encoder.encode(chunks[0], far, 9)
    with av.open(io.BytesIO(data), "r") as container:
        first = next(container.decode(video=0))
    assert first.time == pytest.approx(far / fps, rel=1e-9)


def test_joined_segments_are_the_plain_file(
    tmp_path: Path, chunks: list[Pixels], plain: bytes
) -> None:
    header, segments = store(tmp_path, *encode(chunks))
    target = tmp_path / "joined.mp4"
    metadata = {"prompt": "a ball\0!"}
    join_segments(target, header, segments, frames=sum(COUNTS), metadata=metadata)
    joined = target.read_bytes()
    assert [kind for kind, _ in boxes(joined)] == ["ftyp", "moov", "free", "mdat"]
    assert dict(boxes(joined))["mdat"] == dict(boxes(plain))["mdat"]
    pixels, times = decoded(joined)
    assert np.array_equal(pixels, decoded(plain)[0])
    assert times == decoded(plain)[1]
    with av.open(str(target)) as container:
        assert container.metadata["prompt"] == "a ball\N{REPLACEMENT CHARACTER}!"
        assert container.streams.video[0].average_rate == FPS
        # the parser would see more key frames than there are: ask the index
        stream = container.streams.video[0]
        keys = [entry.timestamp for entry in stream.index_entries if entry.is_keyframe]
    assert keys == [s * 1024 for s in (0, 5, 13, 14)]


def test_a_damaged_segment_makes_no_file(tmp_path: Path, chunks: list[Pixels]) -> None:
    header, segments = store(tmp_path, *encode(chunks))
    damaged, garbage = tmp_path / "damaged.m4s", tmp_path / "garbage.m4s"
    damaged.write_bytes(segments[1].read_bytes()[:-500])
    garbage.write_bytes(b"not a segment at all")
    for listed in (
        [segments[0], damaged],
        [segments[0], garbage],
        [garbage],
        [segments[0], tmp_path / "missing.m4s"],
        segments[:1],
    ):
        with pytest.raises(OutputError):
            join_segments(tmp_path / "joined.mp4", header, listed, frames=13, metadata={})
    assert list(tmp_path.glob("*joined*")) == []


def test_frames_of_a_segment_are_counted(tmp_path: Path, chunks: list[Pixels]) -> None:
    header, segments = store(tmp_path, *encode(chunks))
    assert [count_frames(header, path) for path in segments] == list(COUNTS)
    whole = segments[1].read_bytes()
    segments[1].write_bytes(whole[: len(whole) // 2])
    assert count_frames(header, segments[1]) < 8
    assert count_frames(header, tmp_path / "missing.m4s") == 0
    assert count_frames(tmp_path / "missing.mp4", segments[0]) == 0


def test_what_no_mp4_holds_is_refused() -> None:
    with pytest.raises(RequestError, match="even width and height; nearest 64x48"):
        FragmentEncoder((63, 48), 16)
    with pytest.raises(RequestError, match="frame rate"):
        FragmentEncoder((64, 48), 0)
