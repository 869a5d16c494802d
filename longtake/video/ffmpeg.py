"""Filter graphs over files: clips made uniform, contact sheets, sprite sheets, posters.

The files are untrusted. Each graph runs in a process of its own with a time limit, no shell and
no standard input; it opens local files of the listed kinds only (no playlists, which name other
files and hosts) and refuses pictures of absurd size. A file that is damaged anywhere is refused,
not half used.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import ffmpeg
import imageio_ffmpeg

from longtake.errors import MediaError, OutputError, RequestError
from longtake.video.partfile import PartFile, output_error
from longtake.video.segments import frame_rate

Node: TypeAlias = Any  # ffmpeg-python has no types

TIME_LIMIT_S = 120.0
MAX_PIXELS = 1 << 26  # 8192 x 8192
MAX_SOURCE_FRAMES = 500_000
SHEET_GAP = 4  # pixels between and around the pictures of a contact sheet

_KINDS = "mov,mp4,matroska,webm,avi,gif,apng,flv,mpeg,mpegts,ogg,asf"
_GLOBAL = ("-nostdin", "-hide_banner", "-y", "-xerror", "-v", "error")
_SCALING = "lanczos+accurate_rnd+full_chroma_int+full_chroma_inp"
# libwebp gets RGB, because it would take bt709 for bt601 as a JPEG's reader does.
_PICTURES: Mapping[str, Mapping[str, object]] = {
    ".jpg": {"vcodec": "mjpeg", "q:v": 3},
    ".jpeg": {"vcodec": "mjpeg", "q:v": 3},
    ".png": {"vcodec": "png"},
    ".webp": {"vcodec": "libwebp", "pix_fmt": "bgra", "quality": 85},
}
# What ffmpeg says of damage that it plays over, and so does not fail for.
_DAMAGE = ("ended prematurely", "partial file", "truncated", "corrupt", "decode failed")
_UNTELLING = ("Error opening", "Task finished", "Terminating thread", "Conversion failed")


@dataclass(frozen=True, slots=True)
class Probe:
    """What a clip holds; ``size`` is (w, h) as displayed, ``fps`` the mean rate."""

    frames: int
    size: tuple[int, int]
    fps: Fraction


@dataclass(frozen=True, slots=True)
class Sheet:
    """Where the pictures of a sheet are: row by row, ``tile`` (w, h), ``gap`` around each."""

    columns: int
    rows: int
    tile: tuple[int, int]
    gap: int
    frames: tuple[int, ...]
    seconds: tuple[float, ...]


def check_file(path: Path, field: str) -> None:
    """Refuse what is not a readable, non-empty, regular file, before anything opens it."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise MediaError(field, path, "no such file") from None
    except (OSError, ValueError) as error:
        raise MediaError(field, path, getattr(error, "strerror", None) or str(error)) from error
    if stat.S_ISDIR(status.st_mode):
        raise MediaError(field, path, "is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise MediaError(field, path, "is a device or pipe, not a file")
    if status.st_size == 0:
        raise MediaError(field, path, "is empty")
    if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
        raise MediaError(field, path, "may not be read")


def probe(src: Path, *, field: str = "input_reference", timeout_s: float = TIME_LIMIT_S) -> Probe:
    """Count the frames of ``src`` and tell their size and rate."""
    graph = _open(src, field).output(
        "pipe:1", format="framecrc", c="copy", **{"frames:v": MAX_SOURCE_FRAMES}
    )
    header, rows = _framecrc(_run(graph, src, field, timeout_s))
    if not rows:
        raise MediaError(field, src, "holds no frames")
    fps = _mean_rate(rows, Fraction(header["tb"]))
    if fps is None:
        raise MediaError(field, src, "its frames have no times, so it has no frame rate")
    # Decoded, because only then the size is the one after rotation.
    graph = _open(src, field).output("pipe:1", format="framecrc", **{"frames:v": 1})
    header, decoded = _framecrc(_run(graph, src, field, timeout_s))
    if not decoded:
        raise MediaError(field, src, "its first frame cannot be decoded")
    width, height = header["dimensions"].split("x")
    return Probe(len(rows), (int(width), int(height)), frame_rate(fps, field))


def normalise_clip(
    src: Path,
    dst: Path,
    size: tuple[int, int],
    fps: float | Fraction,
    *,
    max_frames: int | None = None,
    field: str = "input_reference",
    timeout_s: float = TIME_LIMIT_S,
) -> None:
    """Write ``src`` to ``dst`` as lossless RGB (FFV1 in Matroska), ``size`` (w, h), ``fps``.

    Pixels are made square, the picture is scaled to cover ``size`` and cropped around its middle;
    frames are repeated or dropped to keep the speed.
    """
    width, height = size
    stream = (
        _open(src, field)
        .filter("fps", fps=str(frame_rate(fps)))
        .filter("scale", "iw*sar", "ih", flags=_SCALING)
        .filter("setsar", 1)
        .filter("scale", width, height, force_original_aspect_ratio="increase", flags=_SCALING)
        # Before the crop, which in yuv420p could begin at even pixels only.
        .filter("format", "rgb24")
        .filter("crop", width, height)
    )
    limit = {} if max_frames is None else {"frames:v": max_frames}
    part = PartFile(dst)
    try:
        target = f"file:{part.path}"
        graph = stream.output(
            target, format="matroska", vcodec="ffv1", pix_fmt="bgr0", map_metadata=-1, **limit
        )
        _run(graph, src, field, timeout_s, dst)
        part.commit(sync=False)
    except BaseException:
        part.discard()
        raise


def contact_sheet(
    src: Path, dst: Path, columns: int, rows: int, width: int, *, field: str = "input_reference"
) -> Sheet:
    """One picture, about ``width`` wide, of frames from the first to the last, for people."""
    return _sheet(src, dst, (columns, rows), width, SHEET_GAP, field)


def sprite_sheet(
    src: Path, dst: Path, columns: int, rows: int, width: int, *, field: str = "input_reference"
) -> Sheet:
    """The same without gaps, for a player that shows one tile at a time."""
    return _sheet(src, dst, (columns, rows), width, 0, field)


def poster(
    src: Path, dst: Path, *, width: int | None = None, field: str = "input_reference"
) -> None:
    """The middle frame as a picture, ``width`` wide where given."""
    middle = probe(src, field=field).frames // 2
    stream = _open(src, field).filter("select", f"eq(n,{middle})")
    if width is not None:
        stream = stream.filter("scale", width, -1, flags=_SCALING)
    _picture(stream, src, dst, field)


def _sheet(src: Path, dst: Path, grid: tuple[int, int], width: int, gap: int, field: str) -> Sheet:
    columns, rows = grid
    if columns < 1 or rows < 1:
        raise RequestError("columns, rows", grid, "a sheet has at least one of each")
    clip = probe(src, field=field)
    tile_width = (width - (columns + 1) * gap) // columns
    if tile_width < 2:
        raise RequestError("width", width, f"too narrow for {columns} columns")
    tile = tile_width, max(2, round(tile_width * clip.size[1] / clip.size[0]))
    count = min(columns * rows, clip.frames)
    last = clip.frames - 1
    # The middle one where there is only one.
    frames = [round(last * k / (count - 1)) for k in range(count)] if count > 1 else [last // 2]
    stream = (
        _open(src, field)
        .filter("select", "+".join(f"eq(n,{frame})" for frame in frames))
        .filter("scale", *tile, flags=_SCALING)
        .filter("setsar", 1)
        .filter("format", "rgb24")
        .filter("tile", f"{columns}x{rows}", margin=gap, padding=gap, color="white")
    )
    _picture(stream, src, dst, field)
    seconds = tuple(float(frame / clip.fps) for frame in frames)
    return Sheet(columns, rows, tile, gap, tuple(frames), seconds)


def _picture(stream: Node, src: Path, dst: Path, field: str) -> None:
    """Write the first frame of ``stream``; the extension of ``dst`` says as what."""
    options = _PICTURES.get(dst.suffix.lower())
    if options is None:
        reason = f"no picture has the extension {dst.suffix!r}; legal: {', '.join(_PICTURES)}"
        raise OutputError("output", dst, reason)
    part = PartFile(dst)
    try:
        if options["vcodec"] == "mjpeg":
            # A JPEG is read as full-range bt601, whatever the clip is tagged with.
            stream = stream.filter("scale", out_color_matrix="bt601", flags=_SCALING)
            stream = stream.filter("format", "yuvj420p")
        graph = stream.output("pipe:1", format="image2pipe", **{"frames:v": 1}, **options)
        part.path.write_bytes(_run(graph, src, field, TIME_LIMIT_S))
        part.commit(sync=False)
    except OSError as error:
        part.discard()
        raise output_error("output", dst, error) from error
    except BaseException:
        part.discard()
        raise


def _open(src: Path, field: str) -> Node:
    """The video of ``src`` (not a cover picture) as a node."""
    check_file(src, field)
    # file: keeps a name such as concat:a from being read as a protocol.
    return ffmpeg.input(
        f"file:{src.absolute()}",
        protocol_whitelist="file,pipe",
        format_whitelist=_KINDS,
        max_pixels=MAX_PIXELS,
    )["V:0"]


def _run(graph: Node, src: Path, field: str, timeout_s: float, dst: Path | None = None) -> bytes:
    """What the graph wrote to its standard output."""
    command = ffmpeg.compile(graph, cmd=[imageio_ffmpeg.get_ffmpeg_exe(), *_GLOBAL])
    # A file, because a damaged clip can say more than memory should hold.
    with tempfile.TemporaryFile() as log:
        try:
            done = subprocess.run(  # noqa: S603 - a list, never a shell; src is an absolute path
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                timeout=timeout_s,
                check=False,
                # Python ignores SIGXFSZ; so ffmpeg fails with a message and is not killed by it.
                restore_signals=False,
            )
        except subprocess.TimeoutExpired:
            reason = f"ffmpeg took longer than {timeout_s:g} s and was stopped"
            raise MediaError(field, src, reason) from None
        log.seek(max(0, log.tell() - 8192))
        text = log.read().decode(errors="replace")
    for number in (errno.ENOSPC, errno.EFBIG, errno.EROFS):
        if dst is not None and os.strerror(number) in text:
            raise output_error("output", dst, OSError(number, os.strerror(number)))
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise MediaError(field, src, f"ffmpeg was ended by {name} while reading it")
    if "matches no streams" in text:
        raise MediaError(field, src, "has no video in it")
    if done.returncode != 0 or any(sign in text.lower() for sign in _DAMAGE):
        raise MediaError(field, src, f"ffmpeg cannot read it: {_last_line(text)}")
    return done.stdout


def _last_line(text: str) -> str:
    """The last line that tells something, without the address of the part that said it."""
    lines = [line.rpartition("] ")[2].strip() for line in text.splitlines()]
    telling = [line for line in lines if line and not line.startswith(_UNTELLING)]
    return (telling or lines or ["it said nothing"])[-1]


def _mean_rate(rows: list[list[int]], base: Fraction) -> Fraction | None:
    """Frames a second; from the times of first and last, since durations are often rounded."""
    times = [row[2] for row in rows]
    units = Fraction(max(times) - min(times), len(times) - 1) if len(times) > 1 else rows[0][3]
    return 1 / (units * base) if units > 0 else None


def _framecrc(output: bytes) -> tuple[dict[str, str], list[list[int]]]:
    """Header and rows (stream, dts, pts, duration, size) of ffmpeg's framecrc format."""
    header: dict[str, str] = {}
    rows: list[list[int]] = []
    for line in output.decode().splitlines():
        if line.startswith("#"):
            key, _, value = line[1:].partition(":")
            header[key.removesuffix(" 0")] = value.strip()
        else:
            rows.append([int(cell) for cell in line.split(",")[:5]])
    return header, rows
