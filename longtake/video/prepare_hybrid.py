"""Hybrid mode between a request and its first chunk: plan, load, encode, roll out, store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from longtake.errors import RequestError, ResumeError
from longtake.video.attention_backends import Sizes, choose_backends
from longtake.video.components import check_text_length
from longtake.video.cost import ITEM_SIZES
from longtake.video.inputs import Given, encode_given, input_hash, read_given
from longtake.video.latents import (
    LatentFolder,
    StoredRollout,
    check_same_model,
    check_same_plan,
    rollout_metadata,
)
from longtake.video.manifest import Manifest
from longtake.video.model_cache import ModelCache
from longtake.video.numerics import choose_device, choose_dtype, torch_dtype
from longtake.video.options import EngineOptions, Observer, Piece, Prepared, Storage
from longtake.video.parallel import check_layout, join, stop_flag
from longtake.video.plan import Plan, make_plan, resolve_fps, resolve_size
from longtake.video.probe import measured_rates
from longtake.video.profiles import (
    chosen_backend,
    find_profile,
    profile_asked,
    with_profile,
)
from longtake.video.receipt import engine_section
from longtake.video.request import VideoRequest
from longtake.video.rollout import Chunk, Denoised, OnLatents, rollout
from longtake.video.shapes import read_shape
from longtake.video.source import ModelSource
from longtake.video.vocabulary import check_lengths, vocabulary_warnings


def prepare_hybrid(
    request: VideoRequest,
    source: ModelSource,
    context: tuple[EngineOptions, Storage, Observer],
    check_target: Callable[[Plan], None],
    models: ModelCache,
) -> Prepared:
    """Everything up to the first chunk; arguments as for ``prepare.prepare``."""
    engine, storage, observer = context
    source_folder = LatentFolder(storage.resume) if storage.resume is not None else None
    stored = source_folder.describe() if source_folder is not None else None
    plan, given = plan_hybrid(request, source, engine, source_folder, probe=False)
    if stored is not None:
        check_same_plan(stored, plan)
    check_target(plan)
    _check_empty(engine, storage)
    observer.on_plan(plan)
    observer.on_stage("loading")
    began = perf_counter()
    device = choose_device(engine.device)
    dtype = choose_dtype(engine.dtype, device)
    manifest = _manifest(source)
    backend = chosen_backend(engine.backend, plan.profile)
    _check_prompts(models.tokenizer(manifest), manifest, plan)
    if stored is not None and stored.dtype != dtype:
        raise ResumeError(f"dtype={dtype}: the stored rollout was made in {stored.dtype}")
    model = models.causal(source, manifest, (device, dtype, backend))
    marks = models.fingerprint(device, model.wan.dtype)
    section = engine_section(
        device=device,
        dtype=dtype,
        backend=model.wan.backends.as_dict() | {"vae_convolutions": model.vae_form},
        fingerprint=marks,
    )
    if stored is not None:
        check_same_model(stored, plan, model.hashes)
        if dict(stored.fingerprint) != dict(marks):
            section["guarantee"] = {"level": "L3", "means": "resumed under other numerics"}
    count = source_folder.count if source_folder is not None else 0
    section |= {"profile": plan.profile} | join(engine, model, plan, count)
    ran: dict[str, Any] = {"weights": model.hashes, "dtype": dtype, "fingerprint": marks}
    described = rollout_metadata(plan, given.inputs, input_hash=input_hash(request), **ran)
    if given.pixels is not None:
        observer.on_stage("encoding")
    latents = encode_given(given, model, plan, observer.stopping)
    loaded = perf_counter() - began
    observer.on_stage("generating")
    chunks = rollout(
        plan,
        model,
        inputs=latents,
        stored=source_folder.read_before_gap() if source_folder is not None else (),
        stop=stop_flag(engine, observer),
        on_start=observer.on_start,
        on_step=observer.on_step,
        on_latents=_keeper(engine, storage, described, observer),
    )
    return Prepared(plan, section, model.hashes, given.notes, _pieces(chunks), loaded)


def plan_hybrid(
    request: VideoRequest,
    source: ModelSource,
    engine: EngineOptions,
    resume: LatentFolder | None,
    *,
    probe: bool,
) -> tuple[Plan, Given]:
    """The plan, and the input that was read for it; ``probe`` adds a time estimate."""
    manifest = _manifest(source)
    shape = read_shape(manifest)
    device = choose_device(engine.device)
    dtype = choose_dtype(engine.dtype, device)
    found, notes = find_profile(profile_asked(engine), manifest, shape, device, dtype)
    rollout = None if resume is None else resume.describe()
    stored = None if rollout is None else rollout.request
    wished, used, warned = with_profile(request, found, engine.backend, stored)
    size, fps = resolve_size(request, manifest, shape), resolve_fps(request, manifest)
    given = _stored_input(request, resume)
    if given is None:
        latent_shape = (shape.transformer.in_channels, *shape.latent_size(size))
        given = read_given(request, size, fps, shape.vae.stride_time, latent_shape)
    texts = [request.prompt, *(t.prompt for t in request.prompts), request.negative_prompt or ""]
    changes = [f"input: {change}" for change in given.notes.get("changes", ())]
    check_lengths(manifest, request)
    warnings = (*vocabulary_warnings(manifest, texts), *changes, *notes)
    make = partial(make_plan, inputs=given.inputs, itemsize=ITEM_SIZES[dtype])
    try:
        plan = make(wished, manifest, shape, warnings=(*warnings, *warned))
    except RequestError as error:
        named = engine.profile is not None or error.field != "attention"
        if named or used is None or used["attention"] is None:
            raise
        # found by itself, so the request is not to fail by it
        unfit = f"not used: attention of profile {used['name']}: {error}"
        used |= {"attention": None, "exact": True}
        plan = make(request, manifest, shape, warnings=(*warnings, unfit))
    kv_cache = engine.kv_cache
    if kv_cache is None and rollout is not None:
        kv_cache = rollout.plan.get("kv_cache")
    plan = replace(plan, kv_cache=kv_cache, profile=used)
    check_layout(plan, engine)
    backend, width = chosen_backend(engine.backend, used), shape.transformer
    chosen = choose_backends(
        backend, device, torch_dtype(dtype), Sizes(width.heads, width.head_dim)
    )
    plan = replace(plan, backend=chosen.as_dict())
    if not probe:
        return plan, given
    # only a legal request is worth measuring the machine for
    frames = (manifest.chunk, plan.layout.capacity)
    rates = measured_rates(shape, size, frames, device=device, dtype=dtype)
    return replace(plan, rates=rates), given


def _stored_input(request: VideoRequest, resume: LatentFolder | None) -> Given | None:
    """What an input gave stands in the first stored chunks, if all of those are there."""
    if resume is None:
        return None
    stored = resume.describe()
    now = input_hash(request)
    if None not in (now, stored.input_hash) and now != stored.input_hash:
        field = "image" if request.image is not None else "video"
        raise ResumeError(f"{field}={request.image or request.video}: is another file by now")
    whole = resume.count >= len(stored.plan.get("given", ()))
    if stored.inputs.kind not in ("image", "continue") or not whole:
        return None
    return Given(stored.inputs, None, None, {"kind": stored.inputs.kind})


def _check_empty(engine: EngineOptions, storage: Storage) -> None:
    """Latents are kept in a new folder; with several ranks by rank 0 alone."""
    leader = engine.ranks is None or engine.ranks.leader
    if leader and storage.keep is not None and storage.keep != storage.resume:
        LatentFolder(storage.keep).check_empty()


def _keeper(
    engine: EngineOptions, storage: Storage, described: StoredRollout, observer: Observer
) -> OnLatents | None:
    """Stores a chunk's latents before they are decoded; None where nothing is to be stored."""
    if storage.target is None:
        return None
    if engine.ranks is not None and not engine.ranks.leader:
        return lambda _: None
    keep = LatentFolder(storage.target, sync=storage.sync)
    in_place = storage.target == storage.resume

    def store(made: Denoised) -> None:
        index = made.spec.index
        missing = not (in_place and keep.holds(index))
        if index == 0:
            keep.describe_as(described)
        if missing:
            keep.write(made)
        observer.on_latents(index, stored=missing)

    return store


def _pieces(chunks: Iterator[Chunk]) -> Iterator[Piece]:
    """A chunk's pixels and its entry in the receipt."""
    for chunk in chunks:
        entry = {
            "index": chunk.spec.index,
            "frames": len(chunk.frames),
            "prompt": chunk.prompt,
            "attempt": chunk.attempt,
            "reused": chunk.reused,
            "timings": chunk.timings,
        }
        yield Piece(chunk.frames.numpy(), entry)


def _check_prompts(tokenizer: Any, manifest: Manifest, plan: Plan) -> None:
    check_text_length(manifest, tokenizer, "prompt", plan.request.prompt)
    check_text_length(manifest, tokenizer, "negative_prompt", plan.negative_prompt)
    for switch in plan.switches:
        check_text_length(manifest, tokenizer, "prompts", switch.prompt)


def _manifest(source: ModelSource) -> Manifest:
    if source.manifest is None:
        raise RequestError("mode", "hybrid", f"model {source.name!r} has no manifest", "clip")
    return source.manifest
