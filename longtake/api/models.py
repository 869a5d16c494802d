"""/v1/models: what may be asked for, from each model's small files."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response
from tokenizers import Tokenizer

from longtake.api.auth import Owner
from longtake.api.errors import problems
from longtake.api.objects import JsonResponse
from longtake.api.service import ServiceDep
from longtake.errors import ModelError, NotFoundError, RequestError
from longtake.queue.catalogue import Catalogue, KnownModel
from longtake.video.clip_models import Geometry, geometry_of, read_pipeline
from longtake.video.manifest import SAMPLERS, Manifest
from longtake.video.request import (
    ATTENTION_PLANS,
    MAX_SECONDS,
    MAX_SIDE,
    MAX_STEPS,
    format_size,
)
from longtake.video.source import component_file

router = APIRouter(prefix="/v1/models", tags=["models"])
READ = problems(401, 403, 404, 429, 503)


class Capabilities(BaseModel):
    """What a model makes.

    ``sizes`` null is any multiple of ``size_multiple``; ``frame_rule`` text is such as 1+4k;
    ``vocabulary`` null reads any word. What is null besides is not known before it is loaded.
    """

    modes: list[str]
    inputs: list[str]
    sizes: list[str] | None
    size_multiple: list[int] | None
    default_size: str | None
    max_side: int
    fps: float | None
    frame_rule: str | None
    num_frames: int | None
    max_seconds: float
    num_inference_steps: int | None
    max_inference_steps: int
    fixed_steps: bool
    guidance_scale: float | None
    flow_shift: float | None
    samplers: list[str]
    attention: list[str]
    chunk: int | None
    window: int | None
    sink: int | None
    vocabulary: list[str] | None


class Model(BaseModel):
    """OpenAI's model object with ``capabilities``; null where its files are not at hand."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    default: bool
    available: bool
    description: str
    licence: str
    capabilities: Capabilities | None


class ModelList(BaseModel):
    """All models, the default first."""

    object: Literal["list"]
    data: list[Model]


@router.get("", response_model=ModelList, responses=READ)
def list_models(service: ServiceDep, who: Owner) -> Response:
    """Models that a request may name."""
    del who
    catalogue = service.catalogue
    data = [model_object(catalogue, name) for name in catalogue.names]
    return JsonResponse({"object": "list", "data": data})


@router.get("/{name:path}", response_model=Model, responses=READ)
def retrieve_model(name: str, service: ServiceDep, who: Owner) -> Response:
    """One model."""
    del who
    if name not in service.catalogue.names:
        raise NotFoundError("model", name)
    return JsonResponse(model_object(service.catalogue, name))


def model_object(catalogue: Catalogue, name: str) -> dict[str, Any]:
    """A model as the API shows it; nothing is fetched for it."""
    known = None
    try:
        known = catalogue.find(name) if catalogue.at_hand(name) else None
        capabilities = capabilities_of(known) if known is not None else None
    except (ModelError, RequestError):
        capabilities = None
    manifest = known.source.manifest if known is not None else catalogue.manifest(name)
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "longtake",
        "default": name == catalogue.default,
        "available": capabilities is not None,
        "description": manifest.description if manifest is not None else "",
        "licence": manifest.licence if manifest is not None else "",
        "capabilities": capabilities,
    }


def capabilities_of(known: KnownModel) -> dict[str, Any]:
    """See ``Capabilities``."""
    common = {
        "modes": list(known.modes),
        "max_side": MAX_SIDE,
        "max_seconds": float(MAX_SECONDS),
        "max_inference_steps": MAX_STEPS,
    }
    if known.source.manifest is not None and known.shape is not None:
        return common | _hybrid(known, known.source.manifest)
    return common | _clip(known)


def _hybrid(known: KnownModel, manifest: Manifest) -> dict[str, Any]:
    if known.shape is None:
        raise ModelError(f"model {known.name}: its sizes are not known")
    schedule = manifest.schedule
    sizes = manifest.sizes
    return {
        "inputs": ["text", "image", "video"],
        "sizes": [format_size(size) for size in sizes] if sizes is not None else None,
        "size_multiple": list(known.shape.size_multiple),
        "default_size": format_size(manifest.size),
        "fps": manifest.fps,
        "frame_rule": f"1+{known.shape.vae.stride_time}k",
        "num_frames": manifest.num_frames,
        "num_inference_steps": schedule.steps,
        "fixed_steps": bool(schedule.timesteps and not schedule.warp),
        "guidance_scale": manifest.guidance_scale,
        "flow_shift": schedule.shift,
        "samplers": list(SAMPLERS),
        "attention": list(ATTENTION_PLANS),
        "chunk": manifest.chunk,
        "window": manifest.window,
        "sink": manifest.sink,
        "vocabulary": _vocabulary(manifest),
    }


def _clip(known: KnownModel) -> dict[str, Any]:
    pipeline = read_pipeline(known.source)
    geometry: Geometry = geometry_of(pipeline)
    numbers = {
        name: value
        for name in ("num_frames", "num_inference_steps", "guidance_scale", "width", "height")
        if isinstance(value := pipeline.parameters.get(name), int | float)
    }
    size = geometry.size
    if size is None and "width" in numbers and "height" in numbers:
        size = int(numbers["width"]), int(numbers["height"])
    return {
        "inputs": ["text", "image"] if "image" in pipeline.parameters else ["text"],
        "sizes": None,
        "size_multiple": list(geometry.multiple),
        "default_size": format_size(size) if size is not None else None,
        "fps": geometry.fps,
        "frame_rule": str(geometry.rule) if geometry.rule is not None else None,
        "num_frames": geometry.num_frames or numbers.get("num_frames"),
        "num_inference_steps": numbers.get("num_inference_steps"),
        "fixed_steps": False,
        "guidance_scale": numbers.get("guidance_scale"),
        "flow_shift": None,
        "samplers": [],
        "attention": [],
        "chunk": None,
        "window": None,
        "sink": None,
        "vocabulary": None,
    }


def _vocabulary(manifest: Manifest) -> list[str] | None:
    if not manifest.closed_vocabulary:
        return None
    ref = manifest.components["tokenizer"]
    return list(_words(component_file(manifest, ref, "tokenizer.json")))


@lru_cache(maxsize=16)
def _words(path: Path) -> tuple[str, ...]:
    """Words of a tokenizer, its special tokens left out."""
    words: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab()
    return tuple(sorted(word for word in words if not word.startswith("<")))
