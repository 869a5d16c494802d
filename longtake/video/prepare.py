"""A request becomes a plan and a stream of finished pieces, in either mode.

``generate.py`` turns those pieces into files. Whatever can be refused is refused before weights are
loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from longtake.errors import RequestError
from longtake.video.clip_plan import ClipPlan
from longtake.video.latents import LatentFolder, merge_request
from longtake.video.model_cache import ModelCache
from longtake.video.options import EngineOptions, Observer, Prepared, Storage
from longtake.video.plan import Plan
from longtake.video.prepare_clip import plan_clip, prepare_clip
from longtake.video.prepare_hybrid import plan_hybrid, prepare_hybrid
from longtake.video.request import VideoRequest
from longtake.video.source import ModelSource, find_model


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
        return plan_clip(request, source, engine or EngineOptions(), probe=probe)
    return plan_hybrid(request, source, engine or EngineOptions(), None, probe=probe)[0]


def resolve_request(request: VideoRequest | None, resume: Path | None) -> VideoRequest:
    """The request to run: the caller's, or the stored one with what the caller names now."""
    if resume is not None:
        return merge_request(LatentFolder(resume).describe().request, request)
    if request is None:
        raise RequestError("prompt", None, "is missing")
    return request


def prepare(
    request: VideoRequest,
    engine: EngineOptions,
    storage: Storage,
    observer: Observer,
    check_target: Callable[[Plan | ClipPlan], None],
    models: ModelCache | None = None,
) -> Prepared:
    """Plan, check, load.

    Args:
        request: from ``resolve_request``.
        engine, storage, observer: how, from where, and whom to tell.
        check_target: refuses a plan whose result could not be written, before weights load.
        models: where the model may be loaded already, and stays for the next request.
    """
    source = find_model(request.model)
    run = prepare_hybrid if choose_mode(request, source) == "hybrid" else prepare_clip
    return run(request, source, (engine, storage, observer), check_target, models or ModelCache())
