"""Clip mode before any weight: pipeline + request -> plan of one call. No torch.

Diffusers rounds an illegal frame count or size and says so in its log; here both are refused first,
with the nearest legal values. Of a pipeline whose rule is not known, what came out is compared with
the plan after the run.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from longtake.errors import RequestError
from longtake.video.clip_models import REQUIRED, Geometry, Pipeline, geometry_of, read_pipeline
from longtake.video.clip_reading import ClipReading, reading_as_dict, resolve_clip_reading
from longtake.video.cost import Cost
from longtake.video.plan import DRAWN_SEED_LIMIT
from longtake.video.request import VideoRequest, format_size, nearest_multiple, request_to_mapping
from longtake.video.source import ModelSource

OTHER_MODE = ("prompts", "sampler", "sink", "video", "strength")
OPTIONAL = ("negative_prompt", "num_inference_steps", "guidance_scale")
RATES = ("frame_rate", "fps")
FROM_IMAGE = re.compile("ImageToVideo|Image2Video|I2V")


@dataclass(frozen=True, slots=True)
class ClipPlan:
    """One call of a pipeline, fully resolved.

    Attributes:
        request: what was asked for.
        model, pipeline: name of the model, and diffusers' class that runs it.
        seed: of the one CPU generator.
        size, fps, num_frames: of the video; size is width and height.
        steps: ``num_inference_steps``; None where the pipeline takes none.
        guidance_scale: None where the pipeline takes none.
        shift: name and value of the scheduler's flow shift; None where it has none.
        rate: name of the argument that takes fps; None where the pipeline is not told.
        text_length: tokens the pipeline reads before it cuts; None where only the tokenizer knows.
        from_image: whether the call takes a start image.
        warnings: what the caller should know.
        cost: estimate, where the family's arithmetic is known.
        reading: what a query reads; None for diffusers' own attention.
    """

    request: VideoRequest
    model: str
    pipeline: str
    seed: int
    size: tuple[int, int]
    fps: float
    num_frames: int
    steps: int | None
    guidance_scale: float | None
    shift: tuple[str, float] | None
    rate: str | None
    text_length: int | None
    from_image: bool
    warnings: tuple[str, ...]
    cost: Cost | None = None
    reading: ClipReading | None = None

    mode = "clip"

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.num_frames / self.fps

    @property
    def prompts(self) -> tuple[str, ...]:
        """The one prompt."""
        return (self.request.prompt,)

    @property
    def negative_prompt(self) -> str:
        """What guidance steers away from; the pipeline's own where empty."""
        return self.request.negative_prompt or ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the call; generator, callback and image come with the run."""
        width, height = self.size
        optional = {
            "negative_prompt": self.request.negative_prompt,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance_scale,
        }
        return {
            "prompt": self.request.prompt,
            "width": width,
            "height": height,
            "num_frames": self.num_frames,
            **{name: value for name, value in optional.items() if value is not None},
            **({self.rate: self.fps} if self.rate else {}),
            "output_type": "np",
        }

    def as_dict(self) -> dict[str, Any]:
        """JSON form; what ``Plan.as_dict`` has too stands under the same key."""
        return {
            "request": request_to_mapping(self.request),
            "model": self.model,
            "mode": self.mode,
            "pipeline": self.pipeline,
            "seed": self.seed,
            "size": format_size(self.size),
            "fps": self.fps,
            "num_frames": self.num_frames,
            "seconds": self.seconds,
            "input": {
                "kind": "image" if self.from_image else "text",
                "frames": int(self.from_image),
            },
            "chunks": {"count": 1},
            "attention": self.reading.text if self.reading else None,
            "attention_plan": reading_as_dict(self.reading),
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance_scale,
            "negative_prompt": self.negative_prompt,
            "flow_shift": self.shift[1] if self.shift else None,
            "prompts": [],
            "arguments": self.arguments,
            "cost": self.cost.as_dict() if self.cost else None,
            "warnings": list(self.warnings),
        }


def make_clip_plan(
    request: VideoRequest,
    source: ModelSource,
    *,
    image_given: bool = False,
    warnings: Iterable[str] = (),
) -> ClipPlan:
    """Resolve a request against a pipeline of diffusers.

    Args:
        request: what the caller asks for.
        source: where the pipeline is.
        image_given: a start image comes with the run though the request names no file.
        warnings: what is known already.

    Raises:
        RequestError: a field is not legal for this pipeline, or unknown to it.
        ModelError: the pipeline cannot run in clip mode.
    """
    if source.pipeline is None or request.mode == "hybrid":
        legal = " or ".join(source.modes)
        raise RequestError("mode", request.mode or "clip", f"{source.name} is not run so", legal)
    pipeline = read_pipeline(source)
    image_given = image_given or request.image is not None
    _refuse_unknown(request, pipeline, image_given=image_given)
    geometry = geometry_of(pipeline)
    rate = next((name for name in RATES if name in pipeline.parameters), None)
    fps, notes = _fps(request, pipeline, geometry, rate)
    if geometry.rule is None:
        notes = f"{pipeline.name}: frame rule not known; the count is checked after the run", *notes
    guidance, num_frames = request.guidance_scale, _num_frames(request, pipeline, geometry, fps)
    text_length = pipeline.parameters.get("max_sequence_length")
    return ClipPlan(
        request=request,
        model=source.manifest.name if source.manifest else source.name,
        pipeline=pipeline.name,
        seed=secrets.randbelow(DRAWN_SEED_LIMIT) if request.seed is None else request.seed,
        size=_size(request, pipeline, geometry),
        fps=fps,
        num_frames=num_frames,
        steps=request.num_inference_steps or _default(pipeline, "num_inference_steps"),
        guidance_scale=_default(pipeline, "guidance_scale") if guidance is None else guidance,
        shift=_shift(request, pipeline),
        rate=rate,
        text_length=text_length if isinstance(text_length, int) else None,
        from_image=image_given,
        warnings=(*warnings, *notes),
        reading=resolve_clip_reading(request, pipeline, num_frames),
    )


def _default(pipeline: Pipeline, name: str) -> Any:
    """The signature's number for a parameter; None for none or one that is worked out inside."""
    value = pipeline.parameters.get(name)
    return value if isinstance(value, int | float) else None


def _refuse_unknown(request: VideoRequest, pipeline: Pipeline, *, image_given: bool) -> None:
    """Refuse by name what this pipeline does not know, and an image too many or missing."""
    for field in OTHER_MODE:
        value = getattr(request, field)
        if value is not None and value != ():
            shown = [timed.prompt for timed in value] if field == "prompts" else value
            raise RequestError(field, shown, "clip mode has no such field", "leave it out")
    for field in OPTIONAL:
        value = getattr(request, field)
        if value is not None and field not in pipeline.parameters:
            raise RequestError(field, value, f"{pipeline.name} takes none", "leave it out")
    _check_negative_prompt(request, pipeline)
    if "image" not in pipeline.parameters:
        if image_given:
            reason = f"{pipeline.name} starts from text alone"
            raise RequestError("image", request.image, reason, "leave it out")
    elif not image_given:
        required = pipeline.parameters["image"] == REQUIRED
        if required or FROM_IMAGE.search(pipeline.name):
            raise RequestError("image", None, f"{pipeline.name} starts from an image", "give one")


def _check_negative_prompt(request: VideoRequest, pipeline: Pipeline) -> None:
    """Refuse one that the pipeline would take and not use."""
    if not request.negative_prompt:
        return
    guidance = request.guidance_scale
    if guidance is None:
        guidance = _default(pipeline, "guidance_scale")
    if "true_cfg_scale" in pipeline.parameters:
        # guidance_scale is an input of the distilled model there, not a second forward
        reason, legal = f"has no effect on {pipeline.name}, which is distilled", "leave it out"
    elif guidance is not None and guidance <= 1.0:
        reason, legal = f"has no effect at guidance_scale={guidance:g}", "guidance_scale above 1"
    else:
        return
    raise RequestError("negative_prompt", request.negative_prompt, reason, legal)


def _fps(
    request: VideoRequest, pipeline: Pipeline, geometry: Geometry, rate: str | None
) -> tuple[float, tuple[str, ...]]:
    """The rate, and a note where it is not the one the model was trained at."""
    manifest = pipeline.source.manifest
    known = manifest.fps if manifest else geometry.fps
    if known is None and rate is not None:
        known = _default(pipeline, rate)
    if request.fps is None:
        if known is None:
            raise RequestError("fps", None, f"the rate of {pipeline.name} is not known", "give it")
        return float(known), ()
    if known is None or rate is not None or request.fps == known:
        return float(request.fps), ()
    if manifest is not None:
        raise RequestError(
            "fps", f"{request.fps:g}", f"{manifest.name} was trained at one rate", f"{known:g}"
        )
    note = f"fps={request.fps:g}: {pipeline.name} is trained at {known:g} and not told the rate"
    return float(request.fps), (f"{note}, so motion runs {request.fps / known:.2g} x as fast",)


def _num_frames(request: VideoRequest, pipeline: Pipeline, geometry: Geometry, fps: float) -> int:
    manifest, rule = pipeline.source.manifest, geometry.rule
    if request.seconds is not None:
        wanted = max(1, math.ceil(Fraction(repr(request.seconds)) * Fraction(repr(fps))))
        return rule.at_least(wanted) if rule else wanted
    frames = request.num_frames or (manifest.num_frames if manifest else geometry.num_frames)
    if frames is None:
        frames = _default(pipeline, "num_frames")
    if frames is None:
        reason = f"{pipeline.name} has no length of its own"
        raise RequestError("num_frames", None, reason, "give it, or seconds")
    if rule is not None and not rule.allows(frames):
        nearest = f"nearest {rule.nearest(frames)}"
        raise RequestError("num_frames", frames, f"this model makes {rule} frames", nearest)
    return int(frames)


def _size(request: VideoRequest, pipeline: Pipeline, geometry: Geometry) -> tuple[int, int]:
    manifest = pipeline.source.manifest
    size = request.size or (manifest.size if manifest else geometry.size)
    if size is None:
        wide, high = _default(pipeline, "width"), _default(pipeline, "height")
        if wide is None or high is None:
            reason = f"{pipeline.name} has no size of its own"
            raise RequestError("size", None, reason, "give it as WIDTHxHEIGHT")
        size = wide, high
    if manifest and manifest.sizes is not None and size not in manifest.sizes:
        legal = " or ".join(format_size(s) for s in manifest.sizes)
        raise RequestError("size", format_size(size), f"{manifest.name} makes no such size", legal)
    for side, multiple in zip(size, geometry.multiple, strict=True):
        if side % multiple:
            wide, high = geometry.multiple
            raise RequestError(
                "size",
                format_size(size),
                f"width must be a multiple of {wide} and height of {high}",
                f"nearest to {side}: {nearest_multiple(side, multiple)}",
            )
    return size


def _shift(request: VideoRequest, pipeline: Pipeline) -> tuple[str, float] | None:
    """The scheduler's own name for the flow shift, and its value for this run."""
    config: Mapping[str, Any] = {}
    if pipeline.has("scheduler"):
        config = pipeline.config("scheduler", "scheduler_config.json")
    name = "flow_shift" if "flow_shift" in config else "shift"
    unused = name not in config or (name == "flow_shift" and not config.get("use_flow_sigmas"))
    reason = f"the scheduler {config.get('_class_name')} has none"
    if config.get("use_dynamic_shifting"):
        unused, reason = True, "the scheduler shifts by size, on its own"
    if unused:
        if request.flow_shift is not None:
            raise RequestError("flow_shift", request.flow_shift, reason, "leave it out")
        return None
    value = config[name] if request.flow_shift is None else request.flow_shift
    return name, float(value)
