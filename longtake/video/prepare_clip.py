"""Clip mode between a request and its clip: plan, load, call the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from longtake.errors import RequestError
from longtake.schedulers.chunks import ChunkSpec, latent_frames
from longtake.video.attention_plan import AttentionPlan
from longtake.video.clip import clip_rollout
from longtake.video.clip_models import read_pipeline
from longtake.video.clip_plan import ClipPlan, make_clip_plan
from longtake.video.cost import ITEM_SIZES, Workload, estimate
from longtake.video.media import fit_image, read_image
from longtake.video.model_cache import ModelCache
from longtake.video.numerics import choose_device, choose_dtype, torch_dtype
from longtake.video.options import EngineOptions, Observer, Piece, Pixels, Prepared, Storage
from longtake.video.parallel import stop_flag
from longtake.video.parallel_clip import check_clip, divide_clip
from longtake.video.probe import measured_rates
from longtake.video.profiles import NONE
from longtake.video.receipt import engine_section
from longtake.video.request import VideoRequest
from longtake.video.shapes import ModelShape, shape_from_configs
from longtake.video.source import ModelSource
from longtake.video.vocabulary import vocabulary_warnings


def prepare_clip(
    request: VideoRequest,
    source: ModelSource,
    context: tuple[EngineOptions, Storage, Observer],
    check_target: Callable[[ClipPlan], None],
    models: ModelCache,
) -> Prepared:
    """Everything up to the call; arguments as for ``prepare.prepare``."""
    engine, storage, observer = context
    if storage.target is not None:
        field = "resume" if storage.resume else "keep_latents"
        raise RequestError(field, storage.target, "clip mode has no chunks to store", "mode=hybrid")
    plan = plan_clip(request, source, engine, probe=False)
    check_target(plan)
    observer.on_plan(plan)
    observer.on_stage("loading")
    began = perf_counter()
    device = choose_device(engine.device)
    dtype = choose_dtype(engine.dtype, device)
    image, notes = _clip_image(request, plan)
    model = models.pipeline(source, device, dtype)
    divided = divide_clip(model, engine)
    loaded = perf_counter() - began
    observer.on_stage("generating")
    chunks = clip_rollout(
        plan,
        model,
        image=image,
        stop=stop_flag(engine, observer),
        on_start=observer.on_start,
        on_step=observer.on_step,
    )
    pieces = (
        Piece(c.frames.numpy(), {"index": 0, "frames": len(c.frames), "timings": dict(c.timings)})
        for c in chunks
    )
    section = engine_section(
        device=device,
        dtype=dtype,
        backend={"attention": "diffusers" if plan.reading is None else model.attention.name},
        fingerprint=models.fingerprint(device, torch_dtype(dtype)),
    )
    return Prepared(plan, section | divided, model.hashes, notes, pieces, loaded)


def plan_clip(
    request: VideoRequest, source: ModelSource, engine: EngineOptions, *, probe: bool
) -> ClipPlan:
    """A clip plan with its warnings, and for Wan its cost; other families have no estimate."""
    known: tuple[str, ...] = ()
    if source.manifest is not None:
        known = vocabulary_warnings(
            source.manifest, [request.prompt, request.negative_prompt or ""]
        )
    plan = make_clip_plan(request, source, warnings=known)
    if engine.kv_cache is not None:
        raise RequestError("kv_cache", engine.kv_cache, "a clip has no KV cache", "leave it out")
    if engine.profile not in (None, NONE):
        raise RequestError("profile", engine.profile, "clip mode reads none", "mode=hybrid, none")
    if engine.backend not in ("auto", "sdpa"):
        raise RequestError("backend", engine.backend, "clip mode runs diffusers' own", "sdpa")
    check_clip(plan, engine)
    shape = _clip_shape(source)
    if shape is None:
        note = f"no estimate of cost for {plan.pipeline}"
        return replace(plan, warnings=(*plan.warnings, note))
    device = choose_device(engine.device)
    dtype = choose_dtype(engine.dtype, device)
    latents = latent_frames(plan.num_frames, shape.vae.stride_time)
    whole = ChunkSpec(0, 0, latents, latents, given=False, past=())
    work = Workload(
        size=plan.size,
        steps=plan.steps or 0,
        passes=2 if (plan.guidance_scale or 1.0) > 1.0 else 1,
        text_length=plan.text_length or 0,
        window=0,
        encoded=1 if plan.from_image else 0,
        itemsize=ITEM_SIZES[dtype],
        vae_itemsize=ITEM_SIZES[_vae_dtype(source) or dtype],
        clean_passes=0,
        reading=AttentionPlan("global", plan.reading) if plan.reading else None,
    )
    rates = None
    if probe:
        rates = measured_rates(shape, plan.size, (latents, latents), device=device, dtype=dtype)
    return replace(plan, cost=estimate(shape, [whole], work, rates))


def _vae_dtype(source: ModelSource) -> str | None:
    return source.manifest.vae_dtype if source.manifest is not None else None


def _clip_shape(source: ModelSource) -> ModelShape | None:
    """Sizes of a Wan pipeline; None for another family."""
    pipeline = read_pipeline(source)
    if not pipeline.name.startswith("Wan"):
        return None
    return shape_from_configs(
        pipeline.config("transformer"),
        pipeline.config("vae"),
        pipeline.config("text_encoder"),
        source.name,
    )


def _clip_image(request: VideoRequest, plan: ClipPlan) -> tuple[Pixels | None, dict[str, Any]]:
    if request.image is None:
        return None, {}
    image, note = fit_image(read_image(Path(request.image)), plan.size)
    return image, {"image": request.image, "changes": [note] if note else []}
