"""Frames to a file while they are made: mp4, webm, gif, animated png or a folder of PNGs.

Memory does not grow with the length: a chunk of frames is encoded, muxed and forgotten. For mp4
and webm every chunk is a closed group of pictures from a fresh encoder with one thread, and the
file is those segments muxed, never encoded again; so decoded pixels depend on the frames and the
chunk borders alone, not on where a rollout was interrupted.

Nothing half-written ever carries the target's name: work goes to ``.NAME.part-XXXXXXXX`` beside
it, which is renamed by ``close()`` and removed by ``abort()``. A folder of frames does the same
for each of its files.

    with open_writer(Path("ball.mp4"), size=(128, 80), fps=16) as writer:
        for chunk in rollout(...):
            writer.write(chunk.frames)
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, cast

import av
import imageio.v3 as iio
import numpy as np
from av.container import OutputContainer
from av.video.stream import VideoStream

from longtake.errors import OutputError, RequestError
from longtake.video.partfile import PartFile, output_error
from longtake.video.segments import (
    APNG,
    GIF,
    H264,
    VP9,
    ChunkEncoder,
    Frames,
    VideoPacket,
    check_even,
    frame_rate,
    palettised,
    timed_frames,
)

FRAMES_DIR = "frames-dir"
FORMATS = ("mp4", "webm", "gif", "png", FRAMES_DIR)
MAX_GIF_FPS = 50  # a delay under 2/100 s is played as 10/100 s by every browser


class Writer(ABC):
    """Takes chunks of frames; a context manager that closes, or aborts when an error passes."""

    def __init__(self, path: Path, size: tuple[int, int], field: str = "output") -> None:
        self.path = path
        self.size = size
        self._field = field
        self._frames_written = 0
        self._done = False

    @property
    def frames_written(self) -> int:
        """Frames of the chunks written as a whole."""
        return self._frames_written

    def write(self, frames: Frames) -> None:
        """Append one chunk, uint8 RGB [T,H,W,3]; on an error nothing of the file is left."""
        if self._done:
            raise OutputError(self._field, self.path, "already closed")
        width, height = self.size
        legal = frames.ndim == 4 and len(frames) > 0 and frames.shape[1:] == (height, width, 3)
        if not legal or frames.dtype != np.uint8:
            got = f"{frames.dtype} {list(frames.shape)}"
            reason = f"frames must be uint8 [T, {height}, {width}, 3], got {got}"
            self.abort()
            raise OutputError(self._field, self.path, reason)
        with self._aborting():
            self._write(frames)
        self._frames_written += len(frames)

    def close(self) -> None:
        """Finish the file and give it its name; without any frame, leave nothing."""
        if self._done:
            return
        if self._frames_written == 0:
            self.abort()
            return
        with self._aborting():
            self._finish()
        self._done = True

    def abort(self) -> None:
        """Remove everything made here; does nothing after ``close()``."""
        if self._done:
            return
        self._done = True
        self._discard()

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except (OSError, av.FFmpegError) as error:
            self.abort()
            raise output_error(self._field, self.path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @abstractmethod
    def _write(self, frames: Frames) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...

    @abstractmethod
    def _discard(self) -> None: ...


class SegmentWriter(Writer):
    """mp4 and webm: one closed segment a chunk."""

    def __init__(self, path: Path, encoder: ChunkEncoder, metadata: Mapping[str, str]) -> None:
        super().__init__(path, encoder.size)
        self._encoder = encoder
        self._part = PartFile(path)
        self._container: OutputContainer = av.open(
            str(self._part.path),
            "w",
            format=encoder.codec.muxer,
            container_options=dict(encoder.codec.muxer_options),
            metadata_errors="replace",
        )
        self._container.metadata.update(without_nul(metadata))
        # The stream's own encoder never sees a frame: it gives the muxer its headers, which are
        # the same for every segment.
        self._stream = cast(
            VideoStream, self._container.add_stream(encoder.codec.encoder, encoder.fps)
        )
        encoder.configure(self._stream.codec_context)

    def _packets(self, frames: Frames) -> Sequence[VideoPacket]:
        return self._encoder.encode(frames, self._frames_written)

    def _write(self, frames: Frames) -> None:
        # Encoded as a whole before the first packet is muxed: an interrupt in here leaves the
        # file with whole chunks.
        packets = self._packets(frames)
        for packet in packets:
            packet.stream = self._stream
            self._container.mux(packet)

    def _finish(self) -> None:
        self._container.close()
        self._part.commit()

    def _discard(self) -> None:
        # Removed first, so that closing does not spend time on moving the mp4's index.
        self._part.discard()
        with contextlib.suppress(OSError, av.FFmpegError):
            self._container.close()


def without_nul(metadata: Mapping[str, str]) -> dict[str, str]:
    """Texts for a container: a C string ends at a NUL, and would cut the prompt there silently."""
    return {key: text.replace("\0", "\N{REPLACEMENT CHARACTER}") for key, text in metadata.items()}


class PictureWriter(SegmentWriter):
    """gif and png: one encoder for the whole file, since their frames refer to the one before.

    Neither format keeps the metadata; the receipt beside the file does.
    """

    def _packets(self, frames: Frames) -> Sequence[VideoPacket]:
        packets: list[VideoPacket] = []
        make = palettised if self._encoder.codec is GIF else timed_frames
        for frame in make(frames, self._frames_written, self._encoder.fps):
            packets += self._stream.encode(frame)
        return packets

    def _finish(self) -> None:
        for packet in self._stream.encode(None):
            self._container.mux(packet)
        super()._finish()


class FramesDirWriter(Writer):
    """A folder of ``frame_000000.png``, ...; each appears under its name when it is whole."""

    def __init__(self, path: Path, size: tuple[int, int]) -> None:
        super().__init__(path, size, field="frames_dir")
        self._begun = 0
        self._part: PartFile | None = None
        try:
            self._made_folder = not path.is_dir()
            if self._made_folder:
                path.mkdir()
            elif any(path.iterdir()):
                raise OutputError(self._field, path, "the folder is not empty")
        except FileExistsError:
            raise OutputError(self._field, path, "is a file, not a folder") from None
        except (OSError, ValueError) as error:
            raise output_error(self._field, path, error) from error

    def _write(self, frames: Frames) -> None:
        for index, frame in enumerate(frames, self._frames_written):
            self._part = PartFile(self._frame_path(index), self._field)
            # In memory first: imageio reports a full disk a second time when it is collected.
            data = iio.imwrite("<bytes>", frame, extension=".png", compress_level=3)
            self._part.path.write_bytes(data)
            self._part.commit(sync=False)
            self._begun = index + 1

    def _frame_path(self, index: int) -> Path:
        return self.path / f"frame_{index:06d}.png"

    def _finish(self) -> None:
        """Every frame has its name already."""

    def _discard(self) -> None:
        if self._part:
            self._part.discard()
        # The folder was empty, so these names can only be ours.
        for index in range(self._begun):
            self._frame_path(index).unlink(missing_ok=True)
        if self._made_folder:
            # Someone else's file in it keeps the folder.
            with contextlib.suppress(OSError):
                self.path.rmdir()


def open_writer(
    path: Path,
    *,
    size: tuple[int, int],
    fps: float | Fraction,
    format: str | None = None,  # noqa: A002 - the name it has everywhere
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> Writer:
    """A writer for ``path``, whose extension decides unless ``format`` does; size is (w, h)."""
    kind = file_format(path, format)
    rate = frame_rate(fps)
    width, height = size
    if width < 1 or height < 1:
        raise RequestError("size", f"{width}x{height}", "width and height must be positive")
    if kind == FRAMES_DIR:
        return FramesDirWriter(path, size)
    if kind == "gif" and rate > MAX_GIF_FPS:
        raise RequestError("fps", fps, "a gif plays slower than that", f"at most {MAX_GIF_FPS}")
    if kind in ("gif", "png"):
        codec = GIF if kind == "gif" else APNG
        return PictureWriter(path, ChunkEncoder(codec, size, rate), metadata)
    check_even(size, kind)
    codec = H264 if kind == "mp4" else VP9
    return SegmentWriter(path, ChunkEncoder(codec, size, rate), metadata)


def file_format(path: Path, asked: str | None = None) -> str:
    """One of FORMATS, from ``asked`` or else the extension; a contradiction is refused."""
    legal = ", ".join(FORMATS)
    extension = path.suffix.lower().lstrip(".").replace("apng", "png")
    if asked is None:
        if extension not in FORMATS:
            reason = f"no format has the extension {path.suffix!r}; legal: {legal}"
            raise OutputError("output", path, reason)
        return extension
    if asked not in FORMATS:
        raise OutputError("format", asked, f"unknown; legal: {legal}")
    if asked != FRAMES_DIR and extension in FORMATS and extension != asked:
        raise OutputError("format", asked, f"contradicts the name {path.name}")
    return asked
