"""Before a job exists: the request is planned, or refused with the nearest legal value. No torch.

Inputs are named by reference, ``input:<artifact id>`` (an upload, checked already) or ``job:<video
id>`` (the stored latents of an earlier job), and only counted here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from longtake.errors import NotFoundError, RequestError
from longtake.queue.catalogue import Catalogue, KnownModel
from longtake.queue.engine_group import group_size
from longtake.queue.records import Artifact, ArtifactKind, Job
from longtake.queue.store import Store
from longtake.schedulers.chunks import ChunkLayout, latent_frames, pixel_frames
from longtake.settings import Settings
from longtake.video.clip_plan import ClipPlan, make_clip_plan
from longtake.video.parallel_layout import facts_of, resolve_layout
from longtake.video.plan import Inputs, Plan, make_plan, resolve_fps
from longtake.video.request import (
    VideoRequest,
    format_size,
    request_from_mapping,
    request_to_mapping,
)
from longtake.video.vocabulary import check_lengths, vocabulary_warnings

INPUT, JOB = "input:", "job:"
MAX_CLIP_FRAMES = 4096  # frames of a clip that the engine reads


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that can be run.

    Attributes:
        request: JSON form of the ``VideoRequest`` to run: seed drawn, model as the engine finds it.
        summary: what the plan resolved, for the job's row.
        plan: the plan itself.
        model, mode: public name, and how it is run.
        inputs: ids of the input artifacts that the request names.
    """

    request: dict[str, Any]
    summary: dict[str, Any]
    plan: Plan | ClipPlan
    model: str
    mode: str
    inputs: tuple[str, ...]


class Admission:
    """Plans requests of one service."""

    def __init__(self, store: Store, catalogue: Catalogue, settings: Settings) -> None:
        self._store = store
        self._catalogue = catalogue
        self._settings = settings

    def admit(self, data: Mapping[str, Any], owner: str) -> Admitted:
        """Plan a request in the JSON form of ``VideoRequest``; its model is a public name.

        Raises:
            RequestError: a field holds a value that is not legal; names the nearest legal one.
            ModelError: the model cannot be read on this machine.
        """
        known = self._catalogue.find(data.get("model"))
        request = request_from_mapping({**data, "model": known.spec})
        plan: Plan | ClipPlan
        if choose_mode(request, known) == "clip":
            plan, inputs = self._clip(request, known, owner)
        else:
            plan, inputs = self._hybrid(request, known, owner)
        check_ranks(plan, self._settings)
        stored = request_to_mapping(plan.request) | {"seed": plan.seed}
        return Admitted(stored, summary(plan), plan, known.name, plan.mode, inputs)

    def _hybrid(
        self, request: VideoRequest, known: KnownModel, owner: str
    ) -> tuple[Plan, tuple[str, ...]]:
        manifest, shape = known.source.manifest, known.shape
        if manifest is None or shape is None:
            raise RequestError("mode", "hybrid", f"{known.name} is not run so", "clip")
        inputs, used = self._inputs(request, known.name, resolve_fps(request, manifest), owner)
        if inputs.kind == "redraw" and request.seconds is None and request.num_frames is None:
            # the length is settled here, so that the engine's exact count cannot change it
            stride = shape.vae.stride_time
            usable = pixel_frames(latent_frames(inputs.frames, stride), stride)
            request = replace(request, num_frames=usable)
        texts = [request.prompt, *(t.prompt for t in request.prompts)]
        if request.negative_prompt:
            texts.append(request.negative_prompt)
        check_lengths(manifest, request)
        warnings = vocabulary_warnings(manifest, texts)
        plan = make_plan(request, manifest, shape, inputs=inputs, warnings=warnings)
        return replace(plan, kv_cache=self._settings.kv_cache), used

    def _clip(
        self, request: VideoRequest, known: KnownModel, owner: str
    ) -> tuple[ClipPlan, tuple[str, ...]]:
        manifest = known.source.manifest
        texts = [request.prompt, request.negative_prompt or ""]
        warnings = vocabulary_warnings(manifest, texts) if manifest is not None else ()
        used: tuple[str, ...] = ()
        if request.image is not None:
            used = (self.artifact(request.image, "image", owner).id,)
        return make_clip_plan(request, known.source, warnings=warnings), used

    def _inputs(
        self, request: VideoRequest, name: str, fps: float, owner: str
    ) -> tuple[Inputs, tuple[str, ...]]:
        """What a request starts from, counted, and the artifacts it names."""
        if request.image is not None:
            return Inputs("image", 1), (self.artifact(request.image, "image", owner).id,)
        if request.video is None:
            return Inputs(), ()
        kind = "continue" if request.strength is None else "redraw"
        if request.video.startswith(JOB):
            job = self._store.listings.get(request.video.removeprefix(JOB), owner)
            chunks = stored_chunks(job)
            frames = stored_frames(job, fps)
            # another model reads its pixels, as a redraw does
            same = kind == "continue" and job.model == name
            return Inputs(kind, frames, chunks if same else ()), ()
        artifact = self.artifact(request.video, "video", owner)
        return Inputs(kind, _frames_of(artifact, fps)), (artifact.id,)

    def artifact(self, reference: str, field: str, owner: str) -> Artifact:
        """The input that ``input:<id>`` names, if it is the owner's and of the right kind.

        Raises:
            NotFoundError: there is none, or it is another's.
            RequestError: it is a video where an image is needed, or the other way round.
        """
        artifact = self._store.files.get(reference.removeprefix(INPUT), owner)
        if artifact.kind is not ArtifactKind.INPUT:
            raise NotFoundError("file", artifact.id)
        kind = artifact.details.get("kind", field)
        if kind != field:
            raise RequestError(field, artifact.id, f"is a {kind}", f"a file of kind {field}")
        return artifact


def choose_mode(request: VideoRequest, known: KnownModel) -> str:
    """The request's mode, or the model's first.

    Raises:
        RequestError: the model does not run that way.
    """
    mode = request.mode or known.modes[0]
    if mode not in known.modes:
        reason = f"model {known.name!r} does not run that way"
        raise RequestError("mode", mode, reason, " or ".join(known.modes))
    return mode


def check_ranks(plan: Plan | ClipPlan, settings: Settings) -> None:
    """Refuse what the ranks of this service's engines could not share, as they would.

    Raises:
        RequestError: of the field ``parallel``, which whoever runs the service has set.
    """
    size = group_size(settings)
    if size == 1:
        return
    text = settings.parallel or "auto"
    if isinstance(plan, Plan):
        resolve_layout(text, facts_of(plan), size)
    elif not settings.gpus:
        reason = "diffusers divides a clip over CUDA devices only, and this service has CPU ranks"
        raise RequestError("parallel", text, reason, "mode=hybrid")


def summary(plan: Plan | ClipPlan) -> dict[str, Any]:
    """What the job's row keeps of a plan: flat, small, and nothing that takes time to add up."""
    data: dict[str, Any] = {
        "num_frames": plan.num_frames,
        "fps": plan.fps,
        "size": format_size(plan.size),
        "seconds": plan.seconds,
        "steps": plan.steps or 0,
        "guidance_scale": plan.guidance_scale,
        "warnings": list(plan.warnings),
    }
    if isinstance(plan, ClipPlan):
        kind = "image" if plan.from_image else "text"
        return data | {"chunks": 1, "input": {"kind": kind, "frames": int(plan.from_image)}}
    layout = plan.layout
    return data | {
        "chunks": layout.count,
        "latent_frames": layout.latent_frames,
        "input": {"kind": plan.input_kind, "frames": plan.input_frames},
        "layout": {
            "chunk": layout.chunk,
            "first_chunk": layout.first_chunk,
            "given": list(layout.given),
            "stride": plan.stride,
        },
        "attention": plan.attention,
        "window": layout.window,
        "sink": layout.sink,
        "sampler": plan.sampler,
        "prompts": [
            {"at": s.at, "starts": s.starts, "chunk": s.chunk, "prompt": s.prompt}
            for s in plan.switches
        ],
    }


def stored_chunks(job: Job) -> tuple[int, ...]:
    """Latent frames of each chunk a job has stored, without what lies past its end.

    Empty for a video made in clip mode, which keeps no latents.
    """
    layout = job.plan.get("layout")
    if layout is None:
        return ()
    made = ChunkLayout(
        latent_frames=int(job.plan["latent_frames"]),
        chunk=int(layout["chunk"]),
        first_chunk=layout["first_chunk"],
        given=tuple(layout["given"]),
        window=1,  # what a chunk sees does not matter here
    )
    return tuple(spec.keep for spec in itertools.islice(made, job.chunks_done))


def stored_frames(job: Job, fps: float) -> int:
    """Pixel frames that a job has made, at ``fps``."""
    layout = job.plan.get("layout")
    if layout is None:
        frames = int(job.plan["num_frames"])
    else:
        frames = pixel_frames(sum(stored_chunks(job)), int(layout["stride"]))
    return _at_rate(frames, float(job.plan["fps"]), fps)


def _frames_of(artifact: Artifact, fps: float) -> int:
    """Frames of an uploaded clip once it runs at ``fps``; no more than the engine will find."""
    details = artifact.details
    frames, rate = int(details.get("frames", 1)), float(details.get("fps") or fps)
    return max(1, min(_at_rate(frames, rate, fps), MAX_CLIP_FRAMES))


def _at_rate(frames: int, rate: float, fps: float) -> int:
    """``frames`` of ``rate`` as frames of ``fps``, rounded down."""
    if abs(fps / rate - 1) * frames < 0.5:
        return frames
    return math.floor(Fraction(frames) * Fraction(fps) / Fraction(rate))
