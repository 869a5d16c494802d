"""Chunks of frames to packets: the encoders behind the writers.

A chunk becomes a closed group of pictures from a fresh encoder with one thread, so its packets
depend on its frames alone and decode without any packet of another chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias, cast

import av
import av.filter
import numpy as np
from av.codec.context import Flags
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation
from av.video.stream import VideoStream
from numpy.typing import NDArray

from longtake.errors import RequestError

Frames = NDArray[np.uint8]
# A string, because at run time Packet is not generic.
VideoPacket: TypeAlias = "Packet[VideoStream]"

MAX_FPS = 1000
# One palette for several frames keeps still areas free of flicker; not for all of a long chunk,
# which would have to be held in memory.
PALETTE_FRAMES = 16

# Left alone, swscale rounds coarsely; these make a flat colour come back within one level.
_SCALING = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INP


@dataclass(frozen=True, slots=True)
class Codec:
    """How one format is encoded and muxed."""

    muxer: str
    encoder: str
    pix_fmt: str
    options: Mapping[str, str]
    muxer_options: Mapping[str, str]


# veryfast against medium at 480x832: 76 to 31 frames a second, same PSNR, 20 % more bytes.
# aud: two one-frame segments in a row are two IDR pictures with equal idr_pic_id, which only an
# access unit delimiter tells apart.
H264 = Codec(
    muxer="mp4",
    encoder="libx264",
    pix_fmt="yuv420p",
    options={"preset": "veryfast", "crf": "17", "bf": "0", "aud": "1"},
    muxer_options={"movflags": "faststart+use_metadata_tags"},
)
VP9 = Codec(
    muxer="webm",
    encoder="libvpx-vp9",
    pix_fmt="yuv420p",
    options={"crf": "24", "b": "0", "deadline": "good", "cpu-used": "4", "row-mt": "0"},
    muxer_options={},
)
GIF = Codec(muxer="gif", encoder="gif", pix_fmt="pal8", options={}, muxer_options={"loop": "0"})
# Against the defaults at 480x832: 4 times as fast and 3 % smaller.
APNG = Codec(
    muxer="apng",
    encoder="apng",
    pix_fmt="rgb24",
    options={"pred": "mixed", "compression_level": "3"},
    muxer_options={"plays": "0"},
)


@dataclass(frozen=True, slots=True)
class ChunkEncoder:
    """Turns chunks into packets that decode without any packet of another chunk."""

    codec: Codec
    size: tuple[int, int]
    fps: Fraction

    def configure(self, context: VideoCodecContext) -> None:
        """Give an unopened context the settings that every segment shares."""
        context.width, context.height = self.size
        context.pix_fmt = self.codec.pix_fmt
        context.framerate = self.fps
        context.time_base = 1 / self.fps
        context.sample_aspect_ratio = Fraction(1)
        context.thread_count = 1
        context.options = dict(self.codec.options)
        if self.codec.pix_fmt == "yuv420p":
            context.flags |= Flags.global_header
            context.colorspace = Colorspace.ITU709
            context.color_range = ColorRange.MPEG
            context.color_primaries = ColorPrimaries.BT709
            context.color_trc = ColorTrc.BT709

    def encode(self, frames: Frames, start: int) -> list[VideoPacket]:
        """One segment: ``frames`` from a fresh encoder, the first one shown at frame ``start``."""
        context = cast(VideoCodecContext, av.CodecContext.create(self.codec.encoder, "w"))
        self.configure(context)
        packets: list[VideoPacket] = []
        for frame in timed_frames(frames, start, self.fps):
            packets += context.encode(_to_bt709(frame))
        return packets + context.encode(None)


def timed_frames(frames: Frames, start: int, fps: Fraction) -> Iterator[VideoFrame]:
    """RGB frames for PyAV, numbered from ``start``."""
    for index, array in enumerate(frames, start):
        frame = VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
        frame.pts = index
        frame.time_base = 1 / fps
        yield frame


def _to_bt709(frame: VideoFrame) -> VideoFrame:
    return frame.reformat(
        format="yuv420p",
        dst_colorspace=Colorspace.ITU709,
        dst_color_range=ColorRange.MPEG,
        interpolation=_SCALING,
        threads=1,
    )


def palettised(frames: Frames, start: int, fps: Fraction) -> Iterator[VideoFrame]:
    """``frames`` as a GIF shows them, each run of PALETTE_FRAMES in one palette made for it."""
    for first in range(0, len(frames), PALETTE_FRAMES):
        yield from _one_palette(frames[first : first + PALETTE_FRAMES], start + first, fps)


def _one_palette(frames: Frames, start: int, fps: Fraction) -> Iterator[VideoFrame]:
    graph = av.filter.Graph()
    height, width = frames.shape[1:3]
    rgb = av.VideoFormat("rgb24")
    source = graph.add_buffer(width=width, height=height, format=rgb, time_base=1 / fps)
    split = graph.add("split")
    generate = graph.add("palettegen", "stats_mode=full:reserve_transparent=0")
    use = graph.add("paletteuse", "dither=bayer:bayer_scale=3")
    sink = graph.add("buffersink")
    source.link_to(split)
    split.link_to(generate, 0, 0)
    split.link_to(use, 1, 0)
    generate.link_to(use, 0, 1)
    use.link_to(sink)
    graph.configure()
    for frame in timed_frames(frames, start, fps):
        graph.push(frame)
    graph.push(None)
    for index in range(start, start + len(frames)):
        frame = cast(VideoFrame, graph.pull())
        frame.pts = index
        frame.time_base = 1 / fps
        yield frame


def frame_rate(fps: float | Fraction, field: str = "fps") -> Fraction:
    """``fps`` as a ratio: 23.976 is 2997/125, and 24000/1001 as a float is found again."""
    if not math.isfinite(fps) or not 0 < fps <= MAX_FPS:
        raise RequestError(field, fps, "not a frame rate", f"more than 0, at most {MAX_FPS}")
    rate = Fraction(fps).limit_denominator(1001)
    if rate == 0:
        raise RequestError(field, fps, "too slow to be written", "at least 1/1001")
    return rate


def check_even(size: tuple[int, int], kind: str) -> None:
    """Refuse what yuv420p cannot hold: it has one colour for each two by two pixels."""
    width, height = size
    if width % 2 or height % 2:
        nearest = f"nearest {width + width % 2}x{height + height % 2}"
        reason = f"{kind} needs an even width and height"
        raise RequestError("size", f"{width}x{height}", reason, nearest)
