"""Request + model -> plan: everything resolved before any tensor is made.

A plan is refused, with the nearest legal value, or it is exactly what will run. No torch.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from longtake.errors import RequestError
from longtake.schedulers.chunks import ChunkLayout, ChunkSpec, latent_frames, pixel_frames
from longtake.schedulers.noise import from_strength
from longtake.schedulers.prompts import PromptSwitch, resolve_switches
from longtake.video.attention_plan import AttentionPlan
from longtake.video.cost import ITEM_SIZES, Cost, Rates, Workload, estimate
from longtake.video.manifest import Manifest
from longtake.video.plan_attention import resolve_layout, resolve_reading
from longtake.video.request import (
    VideoRequest,
    format_size,
    frames_for_seconds,
    nearest_frames,
    nearest_multiple,
    request_to_mapping,
)
from longtake.video.shapes import ModelShape

DRAWN_SEED_LIMIT = 2**31
MAX_LISTED_CHUNKS = 8
TOKENS_A_WORD = 2


@dataclass(frozen=True, slots=True)
class Inputs:
    """What lies before the rollout, counted in frames of the plan's own rate and size.

    Attributes:
        kind: ``text``, ``image`` (one start frame), ``continue`` or ``redraw`` (video-to-video).
        frames: pixel frames that the input holds.
        chunks: sizes of the stored chunks, where the input is a stored video's latents.
    """

    kind: str = "text"
    frames: int = 0
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A rollout, fully resolved. Lengths count latent frames unless named otherwise.

    ``itemsize`` and ``vae_itemsize`` are bytes of one weight; ``kv_cache`` is what the KV cache
    stores where that is not what is computed; ``backend`` names what computes each attention, None
    where no engine was asked; ``profile`` is what of a profile was used;
    ``rates``, this machine's measured speed, only add a time to the estimate.
    """

    request: VideoRequest
    model: str
    seed: int
    size: tuple[int, int]
    fps: float
    num_frames: int
    input_frames: int
    input_kind: str
    stride: int
    latent_shape: tuple[int, int, int]
    frame_tokens: int
    layout: ChunkLayout
    sampler: str
    sigmas: tuple[float, ...]
    guidance_scale: float
    negative_prompt: str
    text_length: int
    context_noise: float
    context_noise_added: bool
    recache: bool
    reading: AttentionPlan
    switches: tuple[PromptSwitch, ...]
    warnings: tuple[str, ...]
    shape: ModelShape
    itemsize: int
    vae_itemsize: int
    kv_cache: str | None = None
    backend: Mapping[str, str] | None = None
    profile: Mapping[str, Any] | None = None
    rates: Rates | None = None

    mode = "hybrid"

    @property
    def chunks(self) -> Iterable[ChunkSpec]:
        """The chunks in order, made on demand."""
        return self.layout

    @property
    def steps(self) -> int:
        """Denoising forwards a chunk."""
        return len(self.sigmas) - 1

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.num_frames / self.fps

    @property
    def guided(self) -> bool:
        """True where a second, unconditional forward runs."""
        return self.guidance_scale != 1.0

    @property
    def text_tokens(self) -> int:
        """Keys of cross-attention, about: the prompt's tokens and one for all padding."""
        return min(self.text_length, TOKENS_A_WORD * len(self.request.prompt.split()) + 2)

    @property
    def cost(self) -> Cost:
        """Tokens, flops, bytes and, with ``rates``, seconds: added up anew each time."""
        work = Workload(
            size=self.size,
            steps=self.steps,
            passes=2 if self.guided else 1,
            text_length=self.text_tokens,
            window=self.layout.capacity,
            encoded=latent_frames(self.input_frames, self.stride),
            reading=None if self.reading.plain else self.reading,
            itemsize=self.itemsize,
            vae_itemsize=self.vae_itemsize,
            kv_cache=self.kv_cache,
        )
        return estimate(self.shape, self.layout, work, self.rates)

    @property
    def attention(self) -> str:
        """The attention plan's text."""
        return self.reading.text

    @property
    def prompts(self) -> tuple[str, ...]:
        """The first prompt and those of the switches, in order."""
        return (self.request.prompt, *(switch.prompt for switch in self.switches))

    def as_dict(self) -> dict[str, Any]:
        """JSON form, as ``longtake plan --json`` prints it and receipts keep it."""
        layout = self.layout
        listed = [c for c, _ in zip(self.chunks, range(MAX_LISTED_CHUNKS), strict=False)]
        return {
            "request": request_to_mapping(self.request),
            "model": self.model,
            "mode": self.mode,
            "seed": self.seed,
            "size": format_size(self.size),
            "fps": self.fps,
            "num_frames": self.num_frames,
            "seconds": self.seconds,
            "latent_frames": layout.latent_frames,
            "input": {"kind": self.input_kind, "frames": self.input_frames},
            "chunks": {
                "count": layout.count,
                "frames": layout.chunk,
                "first": [c.frames for c in listed],
                "sees": [len(c.past) + c.frames for c in listed],
            },
            "attention": self.attention,
            "attention_plan": self.reading.as_dict(),
            "window": layout.window,
            "sink": layout.sink,
            "kv_cache": self.kv_cache,
            "backend": None if self.backend is None else dict(self.backend),
            "profile": None if self.profile is None else dict(self.profile),
            "sampler": self.sampler,
            "num_inference_steps": self.steps,
            "sigmas": list(self.sigmas),
            "guidance_scale": self.guidance_scale,
            "negative_prompt": self.negative_prompt,
            "context_noise": self.context_noise,
            "context_noise_added": self.context_noise_added,
            "recache": self.recache,
            "prompts": [
                {"at": s.at, "starts": s.starts, "chunk": s.chunk, "prompt": s.prompt}
                for s in self.switches
            ],
            "cost": self.cost.as_dict(),
            "warnings": list(self.warnings),
        }


def make_plan(
    request: VideoRequest,
    manifest: Manifest,
    shape: ModelShape,
    *,
    inputs: Inputs | None = None,
    itemsize: int = 4,
    warnings: Iterable[str] = (),
) -> Plan:
    """Resolve a request against a model.

    Args:
        request: what the caller asks for.
        manifest, shape: the model.
        inputs: frames of a start image or clip.
        itemsize: bytes of one weight, from the dtype.
        warnings: what is known already, e.g. words outside the vocabulary.

    Raises:
        RequestError: a field is not legal for this model; names the nearest legal value.
    """
    inputs = inputs or Inputs()
    size, fps = resolve_size(request, manifest, shape), resolve_fps(request, manifest)
    stride = shape.vae.stride_time
    num_frames, input_frames = _lengths(request, manifest, inputs, fps, stride)
    given = _given(inputs, manifest, stride)
    layout = resolve_layout(request, manifest, given, latent_frames(num_frames, stride), stride)
    sigmas = _sigmas(request, manifest)
    switches = resolve_switches(request.prompts, layout, fps, stride)
    if switches and request.strength == 0.0:
        raise RequestError("strength", 0.0, "redraws nothing, so a prompt timeline has no effect")
    guidance = manifest.guidance_scale if request.guidance_scale is None else request.guidance_scale
    return Plan(
        request=request,
        model=manifest.name,
        seed=secrets.randbelow(DRAWN_SEED_LIMIT) if request.seed is None else request.seed,
        size=size,
        fps=fps,
        num_frames=num_frames,
        input_frames=input_frames,
        input_kind=inputs.kind,
        stride=stride,
        latent_shape=(shape.transformer.in_channels, *shape.latent_size(size)),
        frame_tokens=shape.frame_tokens(size),
        layout=layout,
        sampler=request.sampler or manifest.schedule.sampler,
        sigmas=sigmas,
        guidance_scale=guidance,
        negative_prompt=_negative_prompt(request, manifest, guidance),
        text_length=manifest.text_length,
        context_noise=manifest.context_noise,
        context_noise_added=manifest.context_noise_added,
        recache=manifest.recache and bool(switches),
        reading=resolve_reading(request, (manifest, shape), size, layout, len(sigmas) - 1),
        switches=switches,
        warnings=(*warnings, *_length_notes(inputs, input_frames)),
        shape=shape,
        itemsize=itemsize,
        vae_itemsize=ITEM_SIZES.get(manifest.vae_dtype or "", itemsize),
    )


def resolve_size(request: VideoRequest, manifest: Manifest, shape: ModelShape) -> tuple[int, int]:
    """Width and height of the video; RequestError where the model cannot make it."""
    size = request.size or manifest.size
    if manifest.sizes is not None and size not in manifest.sizes:
        legal = " or ".join(format_size(s) for s in manifest.sizes)
        raise RequestError("size", format_size(size), f"{manifest.name} makes no such size", legal)
    for side, multiple in zip(size, shape.size_multiple, strict=True):
        if side % multiple:
            wide, high = shape.size_multiple
            raise RequestError(
                "size",
                format_size(size),
                f"width must be a multiple of {wide} and height of {high}",
                f"nearest to {side}: {nearest_multiple(side, multiple)}",
            )
    return size


def resolve_fps(request: VideoRequest, manifest: Manifest) -> float:
    """Frames per second of the video; RequestError where the model has another rate."""
    fps = manifest.fps if request.fps is None else float(request.fps)
    if fps != manifest.fps:
        reason = f"{manifest.name} was trained at one rate"
        raise RequestError("fps", f"{fps:g}", reason, f"{manifest.fps:g}")
    return fps


def _lengths(
    request: VideoRequest, manifest: Manifest, inputs: Inputs, fps: float, stride: int
) -> tuple[int, int]:
    """Pixel frames of the video, and how many of them come from the input."""
    usable = pixel_frames(latent_frames(inputs.frames, stride), stride) if inputs.frames else 0
    num_frames = manifest.num_frames
    if request.num_frames is not None:
        num_frames = request.num_frames
    elif request.seconds is not None:
        num_frames = frames_for_seconds(request.seconds, fps, stride)
    elif inputs.kind == "redraw":
        num_frames = usable
    if (num_frames - 1) % stride:
        raise RequestError(
            "num_frames",
            num_frames,
            f"this model makes 1+{stride}k frames",
            f"nearest {nearest_frames(num_frames, stride)}",
        )
    field = "seconds" if request.seconds is not None else "num_frames"
    asked = request.seconds if request.seconds is not None else num_frames
    if inputs.kind == "redraw":
        if num_frames > usable:
            reason = f"the video has only {usable} usable frames"
            raise RequestError(field, asked, reason, f"at most {usable} frames")
        return num_frames, num_frames
    if usable and num_frames <= usable:
        reason = f"the input alone fills {usable} frames"
        raise RequestError(field, asked, reason, f"at least {usable + stride} frames")
    return num_frames, usable


def _length_notes(inputs: Inputs, used: int) -> list[str]:
    unused = inputs.frames - used
    if unused <= 0:
        return []
    return [f"input: {used} of {inputs.frames} frames are used, {unused} at the end are not"]


def _given(inputs: Inputs, manifest: Manifest, stride: int) -> tuple[int, ...]:
    """Sizes of the chunks that an input fills."""
    if inputs.kind not in ("image", "continue"):
        return ()
    return inputs.chunks or _split(latent_frames(inputs.frames, stride), manifest.chunk)


def _split(latents: int, chunk: int) -> tuple[int, ...]:
    """Whole chunks, then what is left."""
    whole, rest = divmod(latents, chunk)
    return (*[chunk] * whole, *([rest] if rest else []))


def _sigmas(request: VideoRequest, manifest: Manifest) -> tuple[float, ...]:
    schedule = manifest.schedule
    steps = request.num_inference_steps
    if steps not in (None, schedule.steps) and schedule.timesteps and not schedule.warp:
        reason = f"{manifest.name} was distilled for a fixed list of timesteps"
        raise RequestError("num_inference_steps", steps, reason, str(schedule.steps))
    sigmas = schedule.sigmas(steps, request.flow_shift)
    return sigmas if request.strength is None else from_strength(sigmas, request.strength)


def _negative_prompt(request: VideoRequest, manifest: Manifest, guidance: float) -> str:
    if request.negative_prompt is None:
        return manifest.negative_prompt
    if request.negative_prompt.strip() and guidance == 1.0:
        raise RequestError(
            "negative_prompt",
            request.negative_prompt,
            "has no effect at guidance_scale=1",
            "guidance_scale above 1",
        )
    return request.negative_prompt
