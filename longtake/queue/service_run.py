"""One ``Work`` in the engine process: runs its request, makes its files, tells what happens.

Order of a chunk: its latents are written and reported, then it is decoded, then its segment and
preview are written and reported. Chunks that an earlier attempt left are replayed, and their
segments are used as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from longtake.errors import DecodeMemoryError, Interrupted, LongtakeError, ResumeError
from longtake.queue.attempt_folder import AttemptFolder
from longtake.queue.failures import failed
from longtake.queue.faults import Faults
from longtake.queue.messages import (
    ChunkDone,
    EngineMessage,
    Failed,
    File,
    Finished,
    LatentsStored,
    Pictured,
    Planned,
    Stage,
    StepDone,
    StepStarted,
    Stopped,
    Work,
)
from longtake.queue.records import ArtifactKind
from longtake.video.clip_plan import ClipPlan
from longtake.video.fragments import (
    FragmentEncoder,
    check_playable,
    count_frames,
    join_segments,
)
from longtake.video.generate import stage_timings, video_metadata
from longtake.video.memory import resident_bytes
from longtake.video.model_cache import ModelCache
from longtake.video.numerics import choose_device, choose_dtype
from longtake.video.options import EngineOptions, Piece, Prepared, Storage
from longtake.video.parallel_follow import begin
from longtake.video.plan import Plan
from longtake.video.posters import Posters, preview
from longtake.video.prepare import choose_mode
from longtake.video.prepare_clip import prepare_clip
from longtake.video.prepare_hybrid import prepare_hybrid
from longtake.video.profiles import expected_backend
from longtake.video.receipt import make_receipt
from longtake.video.request import VideoRequest, request_from_mapping
from longtake.video.rollout import StepEvent
from longtake.video.source import ModelSource, find_model

log = logging.getLogger(__name__)
INPUTS = ("image", "video")
# pictures of a clip may take this share of its time
PICTURES_SHARE = 0.05
Outcome = Finished | Stopped | Failed


class Link(Protocol):
    """The way to the worker."""

    def send(self, message: EngineMessage, *, more: bool = False) -> None:
        """Tell the worker; with ``more``, together with the next message, which comes at once."""

    @property
    def stop(self) -> bool:
        """True once the worker asks to stop."""

    @property
    def keep(self) -> bool:
        """True if what is finished by then should become a video."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What lives longer than one ``Work``: options, the loaded model, faults asked for by tests."""

    options: EngineOptions
    models: ModelCache
    faults: Faults

    def preload(self, name: str) -> None:
        """Load a model before the first job asks for it; the job tells if that fails."""
        try:
            source = find_model(name)
            if source.manifest is None:
                return
            device = choose_device(self.options.device)
            dtype = choose_dtype(self.options.dtype, device)
            how = (device, dtype, expected_backend(self.options, source.manifest, device, dtype))
            model = self.models.causal(source, source.manifest, how)
            self.models.fingerprint(device, model.wan.dtype)
        except LongtakeError as error:
            log.warning("model %s is not loaded: %s", name, error)


def run_work(work: Work, engine: Engine, link: Link) -> Outcome:
    """Do one attempt; never raises."""
    engine.faults.begin()
    run = _Run(work, engine, link)
    try:
        return run.make()
    except Interrupted:
        return Stopped(0, (), resident_bytes())
    except Exception as error:  # whatever it is, the worker hears of it and the process goes on
        chunk = error.chunk if isinstance(error, DecodeMemoryError) else run.chunk
        return run.public(failed(error, run.stage, chunk, resident_bytes()))


class _Run:
    """An attempt under way; the observer of its rollout.

    Attributes:
        stage, chunk: where it is.
    """

    def __init__(self, work: Work, engine: Engine, link: Link) -> None:
        self.stage = "planning"
        self.chunk: int | None = None
        self._work = work
        self._engine = engine
        self._link = link
        self._folder = AttemptFolder(work.folder)
        self._warnings: list[str] = []
        self._clip = False
        self._begin(0)

    def _begin(self, stored: int) -> None:
        self._stored = stored
        self._frames = 0
        self._entries: list[dict[str, Any]] = []
        self._encode_s = self._pictures_s = 0.0
        self._began = perf_counter()

    def make(self) -> Outcome:
        """The whole attempt; stored chunks that do not fit (other weights) are made again."""
        request = request_from_mapping(self._work.request)
        source = find_model(request.model)
        self._clip = choose_mode(request, source) == "clip"
        stored = 0 if self._clip else self._folder.stored
        if stored:
            try:
                return self._hybrid(request, source, stored)
            except ResumeError as error:
                why = self._public_text(str(error))
                self._warnings.append(f"stored chunks were made again: {why}")
        self._folder.clear_chunks()
        if not self._clip:
            return self._hybrid(request, source, 0)
        self._begin(0)
        begin(self._engine.options.ranks)
        # the service's choice for its KV caches asks nothing of a video that has none
        options = self._engine.options.for_clip
        context = (options, Storage(), self)
        return self._run(prepare_clip(request, source, context, self._check, self._engine.models))

    def _hybrid(self, request: VideoRequest, source: ModelSource, stored: int) -> Outcome:
        self._begin(stored)
        begin(self._engine.options.ranks, stored)
        latents = self._folder.latents
        # the worker puts what it publishes on the disk
        storage = Storage(None if stored else latents, latents if stored else None, sync=False)
        context = (self._engine.options, storage, self)
        return self._run(prepare_hybrid(request, source, context, self._check, self._engine.models))

    def _check(self, plan: Plan | ClipPlan) -> None:
        check_playable(plan.size, plan.fps)

    def _run(self, prepared: Prepared) -> Outcome:
        plan = prepared.plan
        self._posters = Posters(plan.num_frames, plan.fps)
        for piece in prepared.pieces:
            if not self._entries:
                self._encoder = FragmentEncoder(plan.size, plan.fps)
            self._store(piece)
        done = self._frames == plan.num_frames
        files: tuple[File, ...] = ()
        if done or (self._link.keep and self._frames):
            timings, files = self._finish(prepared, "done" if done else "stopped")
        if done:
            return Finished(self._frames, files, timings, resident_bytes())
        return Stopped(self._frames, files, resident_bytes())

    def _store(self, piece: Piece) -> None:
        """Make a chunk's segment and preview unless they are there, and report it."""
        began = perf_counter()
        entry, frames = piece.entry, piece.frames
        index = entry["index"]
        files = self._write_header() if index == 0 else []
        self._posters.add(frames)
        segment = self._folder.segment(index)
        known = index < self._stored and count_frames(self._folder.header, segment) == len(frames)
        if not known:
            files += self._write_segment(piece)
        self._frames += len(frames)
        seconds = perf_counter() - began
        self._encode_s += seconds
        self._entries.append(entry)
        timings = {**entry["timings"], "encode": seconds}
        reused = index < self._stored
        self._link.send(ChunkDone(index, len(frames), self._frames, reused, timings, tuple(files)))

    def _write_header(self) -> list[File]:
        """The init segment, unless it is there; segments of another one are not used."""
        header, encoder = self._folder.header, self._encoder
        if header.is_file() and header.read_bytes() == encoder.header:
            return []
        width, height = encoder.size
        details = {"codecs": encoder.codecs, "width": width, "height": height, "fps": encoder.fps}
        for index in range(self._stored):
            self._folder.segment(index).unlink(missing_ok=True)
        return [self._folder.write(ArtifactKind.INIT, header, encoder.header, **details)]

    def _write_segment(self, piece: Piece) -> list[File]:
        index, count = piece.entry["index"], len(piece.frames)
        fps = self._encoder.fps
        data = self._encoder.encode(piece.frames, self._frames, index)
        details = {
            "index": index,
            "start_frame": self._frames,
            "frames": count,
            "start_s": self._frames / fps,
            "seconds": count / fps,
        }
        folder, picture = self._folder, preview(piece.frames)
        return [
            folder.write(ArtifactKind.SEGMENT, folder.segment(index), data, **details),
            folder.write(ArtifactKind.PREVIEW, folder.preview(index), picture, index=index),
        ]

    def _finish(self, prepared: Prepared, state: str) -> tuple[dict[str, float], tuple[File, ...]]:
        """The video, its pictures and its receipt, of all chunks so far."""
        self._enter("finishing", None)
        began = perf_counter()
        folder, plan = self._folder, prepared.plan
        segments = [folder.segment(index) for index in range(len(self._entries))]
        metadata = video_metadata(plan) | self._work.metadata
        join_segments(folder.video, folder.header, segments, frames=self._frames, metadata=metadata)
        width, height = plan.size
        shape = {"frames": self._frames, "width": width, "height": height, "fps": plan.fps}
        sheet, geometry = self._posters.sheet()
        self._encode_s += perf_counter() - began
        total = perf_counter() - self._began
        timings = stage_timings(self._entries, prepared.load_s, self._encode_s, total)
        receipt = make_receipt(
            self._public_plan(plan),
            state=state,
            frames=self._frames,
            weights=prepared.weights,
            engine=prepared.engine,
            chunks=self._entries,
            inputs=_public(prepared.inputs),
            timings=timings,
        )
        kinds = ArtifactKind
        return timings, (
            folder.report(kinds.VIDEO, folder.video, **shape),
            folder.write(kinds.THUMBNAIL, folder.thumbnail, self._posters.thumbnail()),
            folder.write(kinds.SPRITESHEET, folder.sheet, sheet, **geometry.as_dict()),
            folder.write_json(kinds.RECEIPT, folder.receipt, receipt),
        )

    def _public_plan(self, plan: Plan | ClipPlan) -> dict[str, Any]:
        data = plan.as_dict()
        warnings = [*data["warnings"], *self._warnings]
        return {**data, "request": _public(data["request"]), "warnings": warnings}

    def public(self, message: Failed) -> Failed:
        """The message as a user may see it."""
        return replace(message, message=self._public_text(message.message))

    def _public_text(self, text: str) -> str:
        """A text without the folders that the service's own files lie in."""
        text = text.replace(f"{self._folder.root}/", "")
        for name in INPUTS:
            path = self._work.request.get(name)
            if isinstance(path, str):
                text = text.replace(path, Path(path).name)
        return text

    def _enter(self, stage: str, chunk: int | None) -> None:
        self.stage, self.chunk = stage, chunk
        self._link.send(Stage(stage, chunk))

    def on_plan(self, plan: Plan | ClipPlan) -> None:
        """Tell the plan."""
        data = self._public_plan(plan)
        steps = plan.steps or 0
        self._link.send(Planned(data, data["chunks"]["count"], steps))

    def on_stage(self, stage: str) -> None:
        """Tell the stage; a stop asked for by now saves the loading."""
        if self.stopping():
            raise Interrupted("stopped before the first step")
        self._enter(stage, None)

    def on_start(self, event: StepEvent) -> None:
        """Tell that a step begins."""
        self.stage, self.chunk = "generating", event.chunk
        self._link.send(StepStarted(event.chunk, event.step))
        self._engine.faults.step()

    def on_step(self, event: StepEvent) -> None:
        """Tell that a step is done; after the last one of a clip its decode comes."""
        done = StepDone(event.chunk, event.chunks, event.step, event.steps)
        more = event.step < event.steps and event.picture is None
        self._link.send(done, more=more)
        if self._clip and event.step == event.steps:
            self._enter("decoding", event.chunk)
        elif event.picture is not None:
            self._show(event.picture, event.step)

    def _show(self, picture: Callable[[], Any], step: int) -> None:
        """Report a picture, unless pictures have taken too much of the time."""
        began = perf_counter()
        ranks = self._engine.options.ranks
        divided = ranks is not None and ranks.size > 1  # its VAE decode asks for every rank
        if divided or self._pictures_s > PICTURES_SHARE * (began - self._began):
            return
        frame = preview(picture())
        file = self._folder.write(ArtifactKind.PREVIEW, self._folder.preview(step), frame)
        self._pictures_s += perf_counter() - began
        self._link.send(Pictured(file))

    def on_latents(self, chunk: int, *, stored: bool) -> None:
        """Report latents that were not there before; the chunk is decoded next."""
        if stored:
            self._link.send(LatentsStored(chunk, self._folder.latent_files(chunk)), more=True)
        self._enter("decoding", chunk)

    def on_chunk(self, frames: int) -> None:
        """Nothing: chunks are reported as their files are made."""

    def stopping(self) -> bool:
        """The stop flag; for a video of what is finished, stored chunks are replayed first."""
        replaying = len(self._entries) < self._stored
        return self._link.stop and not (self._link.keep and replaying)


def _public(data: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of inputs: their names, and not where on this machine they lie."""
    names = {n: Path(data[n]).name for n in INPUTS if isinstance(data.get(n), str)}
    return {**data, **names}
