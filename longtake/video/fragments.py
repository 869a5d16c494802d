"""Fragmented mp4: one header a video and one segment a chunk, playable while it is made.

A segment is a chunk's closed group of pictures from the same encoder as ``writer.py`` uses, in one
``moof`` and ``mdat`` box with its place in the video (ISO/IEC 14496-12, 8.8). Header and segments
one after the other are an mp4 that plays without gaps; ``join_segments`` makes the usual one, with
its index in front, of the very same packets. Each function depends on its arguments alone, so it
does not matter which process made which segment.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream

from longtake.errors import OutputError
from longtake.video.partfile import PartFile, output_error
from longtake.video.segments import H264, ChunkEncoder, Frames, check_even, frame_rate
from longtake.video.writer import without_nul

MOVFLAGS = "empty_moov+default_base_moof+frag_custom+frag_discont+skip_trailer+cmaf"
HEADER_BOXES = ("ftyp", "moov")
SEGMENT_BOXES = ("styp", "moof", "mdat")
# the H.264 parser takes pictures without motion for key frames; the boxes know better
DEMUX = {"fflags": "noparse"}


class FragmentEncoder:
    """Encodes chunks of one video, in any order.

    Attributes:
        size, fps: of the video.
        header: the boxes ftyp and moov, which depend on the two alone.

    Raises:
        RequestError: an odd size, or no frame rate.
    """

    def __init__(self, size: tuple[int, int], fps: float | Fraction) -> None:
        check_playable(size, fps)
        self.size = size
        self.fps = float(fps)
        self._encoder = ChunkEncoder(H264, size, frame_rate(fps))
        width, height = size
        black = np.zeros((1, height, width, 3), np.uint8)
        self.header = _only(HEADER_BOXES, self._mux(black, 0, 0))

    @property
    def codecs(self) -> str:
        """The codec as MediaSource wants it named, ``avc1.PPCCLL`` (RFC 6381)."""
        place = self.header.index(b"avcC") + 4
        return f"avc1.{self.header[place + 1 : place + 4].hex()}"

    def encode(self, frames: Frames, start: int, index: int) -> bytes:
        """A chunk's segment, the boxes moof and mdat.

        Args:
            frames: uint8 RGB [T, H, W, 3].
            start: frames of the video before it.
            index: chunks before it.
        """
        return _only(SEGMENT_BOXES, self._mux(frames, start, index))

    def _mux(self, frames: Frames, start: int, index: int) -> bytes:
        encoder = self._encoder
        data = io.BytesIO()
        options = {"movflags": MOVFLAGS, "fragment_index": str(index + 1)}
        with av.open(data, "w", format="mp4", container_options=options) as container:
            # as in writer.py, the stream's own encoder only gives the muxer its headers
            stream = cast(VideoStream, container.add_stream(H264.encoder, encoder.fps))
            encoder.configure(stream.codec_context)
            for packet in encoder.encode(frames, start):
                packet.duration = 1
                packet.stream = stream
                container.mux(packet)
        return data.getvalue()


def check_playable(size: tuple[int, int], fps: float | Fraction) -> None:
    """Refuse what no mp4 holds: an odd size, or no frame rate (RequestError)."""
    check_even(size, "mp4")
    frame_rate(fps)


def count_frames(header: Path, segment: Path) -> int:
    """Frames of a segment; 0 where the two are not one or cannot be read."""
    try:
        with _demux([header, segment]) as source:
            return sum(packet.size > 0 for packet in source.demux(video=0))
    except (OSError, av.FFmpegError, IndexError):
        return 0


def join_segments(
    target: Path,
    header: Path,
    segments: Iterable[Path],
    *,
    frames: int,
    metadata: Mapping[str, str],
) -> None:
    """One mp4 of a video's segments, its index in front; nothing is encoded again.

    Memory does not grow with the length. The file has its name when it is whole.

    Args:
        target: where to.
        header, segments: in order.
        frames: how many there must be.
        metadata: what the file says about itself.

    Raises:
        OutputError: a segment is missing or damaged, or the target cannot be written.
    """
    part = PartFile(target)
    joined = 0
    try:
        with (
            _demux([header, *segments]) as source,
            av.open(
                str(part.path),
                "w",
                format=H264.muxer,
                container_options=dict(H264.muxer_options),
                metadata_errors="replace",
            ) as container,
        ):
            container.metadata.update(without_nul(metadata))
            stream = container.add_stream_from_template(source.streams.video[0])
            for packet in source.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    container.mux(packet)
                    joined += 1
        if joined != frames:
            reason = f"the segments hold {joined} frames and should hold {frames}"
            raise OutputError("output", target, reason)
        part.commit(sync=False)  # for whoever publishes it to put on the disk
    except (OSError, av.FFmpegError, IndexError) as error:
        raise output_error("output", target, error) from error
    finally:
        part.discard()


class _Chain:
    """Files one after the other as one; only one of them is in memory."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = iter(paths)
        self._file = io.BytesIO()

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; none at the end."""
        while not (data := self._file.read(size)):
            path = next(self._paths, None)
            if path is None:
                return b""
            self._file = io.BytesIO(path.read_bytes())
        return data


def _demux(paths: Iterable[Path]) -> InputContainer:
    return av.open(_Chain(paths), "r", format="mp4", options=DEMUX)


def _only(kinds: tuple[str, ...], data: bytes) -> bytes:
    return b"".join(box for kind, box in _boxes(data) if kind in kinds)


def _boxes(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Top-level boxes of an mp4 and their types."""
    place = 0
    while place < len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        if not 8 <= size <= len(data) - place:
            raise OutputError("output", kind.decode("latin-1"), "is a box without an end")
        yield kind.decode("latin-1"), data[place : place + size]
        place += size
