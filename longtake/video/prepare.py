"""Everything between a request and its first chunk, for both modes.

Here a request becomes a plan and a stream of finished pieces; ``generate.py`` turns those into
files. Whatever can be refused is refused before weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from longtake.errors import RequestError, ResumeError
from longtake.video.clip import ClipPlan, clip_rollout, load_pipeline, make_clip_plan
from longtake.video.components import load_model
from longtake.video.inputs import Given, encode_given, read_given
from longtake.video.latents import (
    LatentFolder,
    StoredRollout,
    check_same_model,
    check_same_request,
    rollout_metadata,
)
from longtake.video.manifest import Manifest
from longtake.video.media import fit_image, read_image
from longtake.video.numerics import (
    ITEM_SIZES,
    choose_device,
    choose_dtype,
    fingerprint,
    torch_dtype,
)
from longtake.video.plan import Plan, make_plan, resolve_fps, resolve_size
from longtake.video.probe import measured_rates
from longtake.video.receipt import engine_section
from longtake.video.request import VideoRequest
from longtake.video.rollout import Chunk, StepEvent, rollout
from longtake.video.shapes import read_shape
from longtake.video.source import ModelSource, find_model
from longtake.video.vocabulary import vocabulary_warnings

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run: None means what the machine is best at."""

    device: str | None = None
    dtype: str | None = None
    backend: str = "auto"


class Observer(Protocol):
    """Told what happens; ``longtake.cli`` draws a progress bar from it."""

    def on_plan(self, plan: Plan | ClipPlan) -> None:
        """The plan is made; nothing is loaded yet."""

    def on_stage(self, stage: str) -> None:
        """``loading`` or ``generating`` begins."""

    def on_step(self, event: StepEvent) -> None:
        """A denoising step is done."""

    def on_chunk(self, frames: int) -> None:
        """``frames`` more pixel frames are done and written."""

    def stopping(self) -> bool:
        """Read between denoising steps; True stops, and finished chunks are kept."""


class SilentObserver:
    """Says nothing and never stops."""

    def on_plan(self, plan: Plan | ClipPlan) -> None:
        """Nothing."""

    def on_stage(self, stage: str) -> None:
        """Nothing."""

    def on_step(self, event: StepEvent) -> None:
        """Nothing."""

    def on_chunk(self, frames: int) -> None:
        """Nothing."""

    def stopping(self) -> bool:
        """Never."""
        return False


@dataclass(frozen=True, slots=True)
class Piece:
    """One finished chunk: pixels [T, H, W, 3] and its entry in the receipt."""

    frames: Pixels
    entry: dict[str, Any]


@dataclass(slots=True)
class Prepared:
    """A loaded model about to run a plan; ``pieces`` does the work as it is read."""

    plan: Plan | ClipPlan
    engine: dict[str, Any]
    weights: Mapping[str, str]
    inputs: Mapping[str, Any]
    pieces: Iterator[Piece]
    load_s: float


@dataclass(frozen=True, slots=True)
class Storage:
    """Chunk latents on disk: where to keep them and where to go on from.

    Attributes:
        keep: folder that every chunk is stored in.
        resume: folder that finished chunks are read from; kept in as well unless ``keep`` differs.
    """

    keep: Path | None = None
    resume: Path | None = None

    @property
    def target(self) -> Path | None:
        """Folder that chunks are stored in."""
        return self.keep or self.resume


def choose_mode(request: VideoRequest, source: ModelSource) -> str:
    """The request's mode, or the model's first."""
    mode = request.mode or source.modes[0]
    if mode not in source.modes:
        reason = f"model {request.model!r} does not run that way"
        raise RequestError("mode", mode, reason, " or ".join(source.modes))
    return mode


def plan_request(
    request: VideoRequest, engine: EngineOptions | None = None, *, probe: bool = True
) -> Plan | ClipPlan:
    """Plan a request without loading weights; ``probe`` adds a time estimate for this machine."""
    source = find_model(request.model)
    if choose_mode(request, source) == "clip":
        return make_clip_plan(request, source)
    return _plan_hybrid(request, source, engine or EngineOptions(), None, probe=probe)[0]


def resolve_request(request: VideoRequest | None, resume: Path | None) -> VideoRequest:
    """The request to run: the caller's, the stored one, or both if they agree.

    Raises:
        ResumeError: they differ in more than length.
    """
    if resume is None:
        if request is None:
            raise RequestError("prompt", None, "is missing")
        return request
    stored = LatentFolder(resume).describe().request
    if request is None:
        return stored
    check_same_request(stored, request)
    return replace(request, seed=stored.seed)


def prepare(
    request: VideoRequest,
    engine: EngineOptions,
    storage: Storage,
    observer: Observer,
    check_target: Callable[[Plan | ClipPlan], None],
) -> Prepared:
    """Plan, check, load.

    Args:
        request: from ``resolve_request``.
        engine, storage, observer: how, from where, and whom to tell.
        check_target: refuses a plan whose result could not be written, before weights load.
    """
    source = find_model(request.model)
    if choose_mode(request, source) == "hybrid":
        return _prepare_hybrid(request, source, (engine, storage, observer), check_target)
    if storage.target is not None:
        field = "resume" if storage.resume else "keep_latents"
        raise RequestError(field, storage.target, "clip mode has no chunks to store", "mode=hybrid")
    plan = make_clip_plan(request, source)
    check_target(plan)
    observer.on_plan(plan)
    observer.on_stage("loading")
    began = perf_counter()
    device = choose_device(engine.device)
    dtype = choose_dtype(engine.dtype, device)
    if engine.backend not in ("auto", "sdpa"):
        raise RequestError("backend", engine.backend, "clip mode runs diffusers' own", "sdpa")
    image, notes = _clip_image(request, plan)
    model = load_pipeline(source, device=device, dtype=dtype)
    loaded = perf_counter() - began
    observer.on_stage("generating")
    chunks = clip_rollout(
        plan, model, image=image, stop=observer.stopping, on_step=observer.on_step
    )
    pieces = (
        Piece(c.frames.numpy(), {"index": 0, "frames": len(c.frames), "timings": dict(c.timings)})
        for c in chunks
    )
    section = engine_section(
        device=device,
        dtype=dtype,
        backend={"attention": "diffusers"},
        fingerprint=fingerprint(device, torch_dtype(dtype)),
    )
    return Prepared(plan, section, model.hashes, notes, pieces, loaded)


def _prepare_hybrid(
    request: VideoRequest,
    source: ModelSource,
    context: tuple[EngineOptions, Storage, Observer],
    check_target: Callable[[Plan | ClipPlan], None],
) -> Prepared:
    engine, storage, observer = context
    stored = LatentFolder(storage.resume).describe() if storage.resume is not None else None
    plan, given = _plan_hybrid(request, source, engine, stored, probe=False)
    check_target(plan)
    if storage.keep is not None and storage.keep != storage.resume:
        LatentFolder(storage.keep).check_empty()
    observer.on_plan(plan)
    observer.on_stage("loading")
    began = perf_counter()
    device = choose_device(engine.device)
    dtype = choose_dtype(engine.dtype, device)
    manifest = _manifest(source)
    model = load_model(manifest, device=device, dtype=dtype, backend=engine.backend)
    for prompt in (*plan.prompts, plan.negative_prompt):
        model.embed(prompt)
    marks = fingerprint(device, model.wan.dtype)
    section = engine_section(
        device=device,
        dtype=dtype,
        backend={
            "self_attention": model.wan.backend,
            "cross_attention": "sdpa",
            "vae_convolutions": model.vae_form,
        },
        fingerprint=marks,
    )
    if stored is not None:
        _check_resume(stored, plan, model.hashes, dtype)
        if dict(stored.fingerprint) != marks:
            section["guarantee"] = {"level": "L3", "means": "resumed under other numerics"}
    described = rollout_metadata(
        plan, given.inputs, weights=model.hashes, dtype=dtype, fingerprint=marks
    )
    latents = encode_given(given, model, plan.input_frames)
    loaded = perf_counter() - began
    observer.on_stage("generating")
    chunks = rollout(
        plan,
        model,
        inputs=latents,
        stored=LatentFolder(storage.resume).read if storage.resume is not None else (),
        stop=observer.stopping,
        on_step=observer.on_step,
    )
    pieces = _pieces(chunks, storage, described)
    return Prepared(plan, section, model.hashes, given.notes, pieces, loaded)


def _plan_hybrid(
    request: VideoRequest,
    source: ModelSource,
    engine: EngineOptions,
    stored: StoredRollout | None,
    *,
    probe: bool,
) -> tuple[Plan, Given]:
    manifest = _manifest(source)
    shape = read_shape(manifest)
    size, fps = resolve_size(request, manifest, shape), resolve_fps(request, manifest)
    if stored is not None and stored.inputs.kind in ("image", "continue"):
        # what the input gave is stored as the first chunks
        given = Given(stored.inputs, None, None, {"kind": stored.inputs.kind})
    else:
        given = read_given(request, size, fps, shape.vae.stride_time)
    device = choose_device(engine.device)
    dtype = choose_dtype(engine.dtype, device)
    rates = None
    if probe:
        seen = manifest.window if request.window is None else request.window
        frames = (manifest.chunk, seen)
        rates = measured_rates(shape, size, frames, device=device, dtype=dtype)
    texts = [request.prompt, *(t.prompt for t in request.prompts), request.negative_prompt or ""]
    changes = [f"input: {change}" for change in given.notes.get("changes", ())]
    plan = make_plan(
        request,
        manifest,
        shape,
        inputs=given.inputs,
        itemsize=ITEM_SIZES[dtype],
        rates=rates,
        warnings=[*vocabulary_warnings(manifest, texts), *changes],
    )
    return plan, given


def _pieces(chunks: Iterator[Chunk], storage: Storage, described: StoredRollout) -> Iterator[Piece]:
    """Store every chunk's latents, then hand its pixels on."""
    keep = LatentFolder(storage.target) if storage.target is not None else None
    in_place = storage.target == storage.resume
    for chunk in chunks:
        if keep is not None:
            if chunk.spec.index == 0:
                keep.describe_as(described)
            if not (in_place and keep.holds(chunk.spec.index)):
                keep.write(chunk)
        entry = {
            "index": chunk.spec.index,
            "frames": len(chunk.frames),
            "prompt": chunk.prompt,
            "attempt": chunk.attempt,
            "reused": chunk.reused,
            "timings": chunk.timings,
        }
        yield Piece(chunk.frames.numpy(), entry)


def _check_resume(
    stored: StoredRollout, plan: Plan, weights: Mapping[str, str], dtype: str
) -> None:
    check_same_model(stored, plan, weights)
    if stored.dtype != dtype:
        raise ResumeError(f"dtype={dtype}: the stored rollout was made in {stored.dtype}")


def _manifest(source: ModelSource) -> Manifest:
    if source.manifest is None:
        raise RequestError("mode", "hybrid", f"model {source.name!r} has no manifest", "clip")
    return source.manifest


def _clip_image(request: VideoRequest, plan: ClipPlan) -> tuple[Pixels | None, dict[str, Any]]:
    if request.image is None:
        return None, {}
    image, note = fit_image(read_image(Path(request.image)), plan.size)
    return image, {"image": request.image, "changes": [note] if note else []}
