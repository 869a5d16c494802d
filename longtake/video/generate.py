"""From a request to files: the one function behind ``longtake generate``."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from longtake.errors import Interrupted, OutputError, RequestError
from longtake.video.clip_plan import ClipPlan
from longtake.video.numerics import configure
from longtake.video.options import EngineOptions, Observer, Prepared, SilentObserver, Storage
from longtake.video.plan import Plan
from longtake.video.prepare import prepare, resolve_request
from longtake.video.receipt import is_receipt, make_receipt, write_receipt
from longtake.video.request import VideoRequest
from longtake.video.writer import FRAMES_DIR, Writer, file_format, open_writer


@dataclass(frozen=True, slots=True)
class Target:
    """Where results go; at least one of ``path`` and ``frames_dir``.

    Attributes:
        path: the video; its extension decides the format unless ``format`` does.
        format: mp4, webm, gif or png.
        frames_dir: folder for lossless PNG frames.
    """

    path: Path | None
    format: str | None = None
    frames_dir: Path | None = None

    @property
    def receipt(self) -> Path:
        """``ball.json`` beside ``ball.mp4``; ``frames.json`` beside the folder ``frames``."""
        for field, path in (("output", self.path), ("frames_dir", self.frames_dir)):
            if path is not None and not path.name:
                raise OutputError(field, path, "is a folder, or has no name")
        if self.path is not None:
            return self.path.with_suffix(".json")
        if self.frames_dir is not None:
            return self.frames_dir.with_name(f"{self.frames_dir.name}.json")
        raise RequestError("output", None, "is missing", "a file, a folder of frames, or both")

    def check(self, plan: Plan | ClipPlan) -> None:
        """Refuse what could not be written, before anything is made.

        Raises:
            OutputError: no such folder, not writable, or a folder in the file's place.
            RequestError: the format cannot hold this video.
        """
        receipt = self.receipt
        if self.path is not None:
            file_format(self.path, self.format)
            if self.path == self.frames_dir:
                raise OutputError("frames_dir", self.frames_dir, "is the video's name too")
            if receipt == self.path:
                raise OutputError("output", self.path, "is the receipt's name; choose another")
        _check_kept(plan.request, self.path, receipt)
        named = (("output", self.path), ("frames_dir", self.frames_dir), ("output", receipt))
        for field, path in named:
            if path is None:
                continue
            _check_folder(field, path)
            if path.is_dir() and field == "output":
                raise OutputError(field, path, "is a folder")
        for writer in self.open(plan):
            writer.abort()

    def open(self, plan: Plan | ClipPlan) -> list[Writer]:
        """Writers for a plan's frames."""
        metadata = video_metadata(plan)
        kinds = ((self.path, self.format), (self.frames_dir, FRAMES_DIR))
        with ExitStack() as undo:
            writers: list[Writer] = []
            for path, kind in kinds:
                if path is not None:
                    writer = open_writer(
                        path, size=plan.size, fps=plan.fps, format=kind, metadata=metadata
                    )
                    undo.callback(writer.abort)
                    writers.append(writer)
            undo.pop_all()
        return writers


@dataclass(frozen=True, slots=True)
class Result:
    """What was made; ``state`` is ``done`` or ``stopped``."""

    state: str
    frames: int
    receipt: dict[str, Any]
    files: tuple[Path, ...]


def generate(
    request: VideoRequest | None,
    target: Target,
    engine: EngineOptions | None = None,
    *,
    storage: Storage | None = None,
    observer: Observer | None = None,
) -> Result:
    """Make a video and its receipt.

    Args:
        request: what to make; None takes the request that ``storage.resume`` holds.
        target: where it goes.
        engine: device, dtype and backend.
        storage: chunk latents to keep and to go on from.
        observer: told about progress, and asked whether to stop.

    Raises:
        LongtakeError: see ``longtake.errors``. Nothing half-written is left behind.
    """
    storage, observer = storage or Storage(), observer or SilentObserver()
    if storage.target is not None and storage.target in (target.path, target.frames_dir):
        raise OutputError("keep_latents", storage.target, "is where the video goes")
    configure()
    resolved = resolve_request(request, storage.resume)
    prepared = prepare(resolved, engine or EngineOptions(), storage, observer, target.check)
    entries, timings = _write_all(prepared, target, observer)
    frames = sum(entry["frames"] for entry in entries)
    state = "done" if frames == prepared.plan.num_frames else "stopped"
    receipt = make_receipt(
        prepared.plan.as_dict(),
        state=state,
        frames=frames,
        weights=prepared.weights,
        engine=prepared.engine,
        chunks=entries,
        inputs=prepared.inputs,
        timings=timings,
    )
    write_receipt(target.receipt, receipt)
    made = [path for path in (target.path, target.frames_dir) if path is not None]
    return Result(state, frames, receipt, (*made, target.receipt))


def _write_all(
    prepared: Prepared, target: Target, observer: Observer
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run the plan and write every piece as it comes; receipt entries and seconds by stage."""
    entries: list[dict[str, Any]] = []
    encode_s = 0.0
    began = perf_counter()
    with ExitStack() as stack:
        writers = [stack.enter_context(writer) for writer in target.open(prepared.plan)]
        for piece in prepared.pieces:
            ready = perf_counter()
            for writer in writers:
                writer.write(piece.frames)
            encode_s += perf_counter() - ready
            entries.append(piece.entry)
            observer.on_chunk(len(piece.frames))
        if not entries:
            raise Interrupted("stopped before the first chunk was finished; nothing was written")
        ready = perf_counter()
        for writer in writers:
            writer.close()
        encode_s += perf_counter() - ready
    total = perf_counter() - began
    return entries, stage_timings(entries, prepared.load_s, encode_s, total)


def stage_timings(
    entries: list[dict[str, Any]], load_s: float, encode_s: float, total_s: float
) -> dict[str, float]:
    """Seconds by stage of a whole video, and frames per second, for its receipt."""
    stages: dict[str, float] = {}
    for entry in entries:
        for stage, seconds in entry["timings"].items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    frames = sum(entry["frames"] for entry in entries)
    timings = {"load": load_s, **stages, "encode": encode_s, "total": total_s}
    return {**timings, "frames_per_second": frames / total_s}


def video_metadata(plan: Plan | ClipPlan) -> dict[str, str]:
    """What an mp4 says about itself."""
    return {
        "title": plan.prompts[0][:200],
        "comment": plan.prompts[0],
        "prompt": plan.prompts[0],
        "seed": str(plan.seed),
        "model": plan.model,
    }


def _check_kept(request: VideoRequest, path: Path | None, receipt: Path) -> None:
    """Nothing of the caller's own is overwritten: not the input, not a file that is no receipt."""
    for name in (request.image, request.video):
        if name is not None and path is not None and Path(name).resolve() == path.resolve():
            raise OutputError("output", path, "is the input")
    if receipt.is_file() and not is_receipt(receipt):
        reason = "is there and is no receipt of longtake; choose another name for the video"
        raise OutputError("output", receipt, reason)


def _check_folder(field: str, path: Path) -> None:
    """The folder that will hold ``path`` exists and takes a file."""
    folder = path.parent
    if not folder.is_dir():
        raise OutputError(field, path, f"the folder {folder} does not exist")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"the folder {folder} cannot be written: {error.strerror}"
        raise OutputError(field, path, reason) from error
