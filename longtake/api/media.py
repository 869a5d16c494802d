"""Files of a video: content, preview, segments while it is made, and the receipt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from longtake.api.auth import Owner
from longtake.api.errors import NO_RETRY, ApiError, problems
from longtake.api.headers import disposition
from longtake.api.objects import STATUS, JsonResponse
from longtake.api.ranges import FileAnswer
from longtake.api.references import find_video
from longtake.api.service import Service, ServiceDep
from longtake.api.videos import READ, VideoId
from longtake.queue.records import Artifact, ArtifactKind, Job, JobState

router = APIRouter(prefix="/v1/videos", tags=["media"])
VARIANTS: Mapping[str, ArtifactKind] = {
    "video": ArtifactKind.VIDEO,
    "thumbnail": ArtifactKind.THUMBNAIL,
    "spritesheet": ArtifactKind.SPRITESHEET,
}
FOREVER = "private, max-age=31536000, immutable"
CHANGING = "private, no-cache"
INIT_NAME = "init.mp4"
SUFFIXES = {
    "video/mp4": "mp4",
    "image/webp": "webp",
    "image/jpeg": "jpg",
    "image/png": "png",
    "application/json": "json",
}
_SEGMENT = re.compile(r"^segment-(\d{6,9})\.m4s$", re.ASCII)
_AVCC = b"avcC"
FILE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file", "content": {"application/octet-stream": {}}},
    206: {"description": "Parts of the file", "content": {"application/octet-stream": {}}},
    304: {"description": "Not modified"},
}
MEDIA = FILE | READ | problems(409, 412, 416)


class Segment(BaseModel):
    """One chunk's part of the video, a closed group of pictures."""

    chunk: int
    start: float
    frames: int
    url: str


class Segments(BaseModel):
    """What a player appends, in order: ``init`` first. More may come until ``done``."""

    object: Literal["list"]
    init: str | None
    codecs: str | None
    fps: float
    done: bool
    data: list[Segment]


@router.get("/{video_id}/content", response_class=Response, responses=MEDIA)
def content(
    video_id: VideoId,
    service: ServiceDep,
    who: Owner,
    variant: Literal["video", "thumbnail", "spritesheet"] = "video",
    download: Annotated[bool, Query(description="have browsers save it")] = False,
) -> Response:
    """The video, its thumbnail or its sprite sheet."""
    job = find_video(service, who, video_id)
    artifact = _only(service, job, VARIANTS[variant])
    if artifact is None:
        raise _no_content(job, variant)
    tail = "" if variant == "video" else f"-{variant}"
    name = f"{job.id}{tail}.{SUFFIXES.get(artifact.content_type, 'bin')}"
    headers = {"content-disposition": disposition("attachment" if download else "inline", name)}
    return _answer(service, job, artifact, headers)


@router.get("/{video_id}/preview", response_class=Response, responses=MEDIA)
def preview(video_id: VideoId, service: ServiceDep, who: Owner) -> Response:
    """The newest picture of a video that is being made."""
    job = find_video(service, who, video_id)
    for _ in range(2):
        artifact = _only(service, job, ArtifactKind.PREVIEW)
        if artifact is None:
            break
        try:
            # the next chunk replaces the preview, perhaps between these two lines
            return _file(service, job, artifact, {"cache-control": CHANGING})
        except FileNotFoundError:
            continue
    raise _missing(f"{job.id} has no preview yet.", "no_preview")


@router.get("/{video_id}/receipt", response_class=Response, responses=MEDIA)
def receipt(video_id: VideoId, service: ServiceDep, who: Owner) -> Response:
    """What really ran, as JSON."""
    job = find_video(service, who, video_id)
    artifact = _only(service, job, ArtifactKind.RECEIPT)
    if artifact is None:
        raise _no_content(job, "receipt")
    return _answer(service, job, artifact, {})


@router.get("/{video_id}/segments", response_model=Segments, responses=READ)
def segments(video_id: VideoId, request: Request, service: ServiceDep, who: Owner) -> Response:
    """The parts of a video that are there already, to play it while it is made."""
    job = find_video(service, who, video_id)
    base = f"{request.scope.get('root_path', '')}/v1/videos/{job.id}/segments"
    init = _only(service, job, ArtifactKind.INIT)
    fps = float(job.plan["fps"])
    data: list[dict[str, Any]] = []
    first = 0
    for chunk in service.store.listings.chunks(job.id):
        if chunk.segment_key is None or chunk.index != len(data):
            break
        url = f"{base}/segment-{chunk.index:06d}.m4s"
        start = first / fps
        data.append({"chunk": chunk.index, "start": start, "frames": chunk.frames, "url": url})
        first += chunk.frames
    answer = {
        "object": "list",
        "init": f"{base}/{INIT_NAME}" if init is not None else None,
        "codecs": _codecs(service, init) if init is not None else None,
        "fps": fps,
        "done": job.finished,
        "data": data,
    }
    return JsonResponse(answer, headers={"cache-control": CHANGING})


@router.get("/{video_id}/segments/{name}", response_class=Response, responses=MEDIA)
def segment(
    video_id: VideoId,
    name: Annotated[str, Path(max_length=64, description="init.mp4 or segment-000000.m4s")],
    service: ServiceDep,
    who: Owner,
) -> Response:
    """One part, as ``segments`` lists it."""
    job = find_video(service, who, video_id)
    artifact: Artifact | None = None
    match = _SEGMENT.match(name)
    if name == INIT_NAME:
        artifact = _only(service, job, ArtifactKind.INIT)
    elif match is not None:
        artifact = service.lookups.segment(job.id, int(match[1]))
    if artifact is None:
        raise _missing(f"{job.id} has no segment of that name.", "no_segment")
    return _answer(service, job, artifact, {})


def _only(service: Service, job: Job, kind: ArtifactKind) -> Artifact | None:
    """The newest file of a kind of which a job has one."""
    found = service.store.files.of_job(job.id, kind)
    return found[-1] if found else None


def _answer(
    service: Service, job: Job, artifact: Artifact, headers: Mapping[str, str]
) -> FileAnswer:
    try:
        return _file(service, job, artifact, headers)
    except FileNotFoundError:
        raise _missing(f"The {artifact.kind} of {job.id} is gone.", "gone") from None


def _file(service: Service, job: Job, artifact: Artifact, headers: Mapping[str, str]) -> FileAnswer:
    """The answer; FileNotFoundError where the file is gone."""
    # a completed video never changes; one that was stopped may be tried again
    keep = FOREVER if job.state is JobState.COMPLETED else CHANGING
    opened = service.artifacts.open(artifact.key)
    return FileAnswer(
        opened,
        artifact.size,
        etag=artifact.sha256 or artifact.id,
        modified_at=artifact.created_at,
        content_type=artifact.content_type,
        headers={"cache-control": keep, **headers},
    )


def _codecs(service: Service, init: Artifact) -> str | None:
    """``avc1.PPCCLL`` of an init segment, which players ask for before anything else."""
    told = init.details.get("codecs")
    if isinstance(told, str):
        return told
    with service.artifacts.open(init.key) as file:
        head: bytes = file.read(64 * 1024)
    at = head.find(_AVCC)
    if at < 0 or len(head) < at + 8:
        return None
    profile, compatibility, level = head[at + 5 : at + 8]
    return f"avc1.{profile:02x}{compatibility:02x}{level:02x}"


def _no_content(job: Job, what: str) -> ApiError:
    if job.finished:
        return _missing(f"{job.id} is {STATUS[job.state]} and has no {what}.", "no_content")
    message = f"{job.id} is {STATUS[job.state]}; its {what} is not there yet."
    return ApiError(409, message, code="video_not_ready", headers=NO_RETRY)


def _missing(message: str, code: str) -> ApiError:
    return ApiError(404, message, code=code, headers=NO_RETRY)
