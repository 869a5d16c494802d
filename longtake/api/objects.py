"""What the API answers: the video object, lists, and their description for the OpenAPI."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.responses import Response

from longtake.queue.admission import INPUT, JOB
from longtake.queue.records import Job, JobState, Relation

# OpenAI's SDK keeps the first value for a whole poll loop, so it fits short videos and long ones.
POLL_AFTER_MS = 1000
POLL_HEADER = {"openai-poll-after-ms": str(POLL_AFTER_MS)}
STATUS = {
    JobState.QUEUED: "queued",
    JobState.RUNNING: "in_progress",
    JobState.COMPLETED: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}
STATES: Mapping[str, JobState] = {word: state for state, word in STATUS.items()}


class VideoError(BaseModel):
    """Why a video failed."""

    code: str
    message: str


class Progress(BaseModel):
    """Where a video stands, to the step.

    ``chunk`` of ``chunks`` are done, and ``step`` of ``steps`` of the next one. ``queue_position``
    is how many go before it.
    """

    phase: str
    chunk: int
    chunks: int
    step: int
    steps: int
    fps: float | None
    eta_seconds: float | None
    queue_position: int | None


class Video(BaseModel):
    """OpenAI's video object, and more under names of its own."""

    id: str
    object: Literal["video"]
    model: str
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled"]
    progress: int = Field(ge=0, le=100)
    created_at: int
    completed_at: int | None
    expires_at: int | None
    seconds: str
    size: str
    prompt: str
    remixed_from_video_id: str | None
    error: VideoError | None
    x_progress: Progress
    extended_from_video_id: str | None
    edited_from_video_id: str | None
    mode: str
    num_frames: int
    fps: float
    width: int
    height: int
    seed: int
    priority: int
    paused: bool
    cancel_requested: bool
    tags: list[str]
    starred: bool
    trashed: bool
    trashed_at: int | None
    batch_id: str | None
    started_at: int | None
    updated_at: int
    attempt: int
    bytes_stored: int
    warnings: list[str]
    plan: dict[str, Any]
    request: dict[str, Any]


class VideoList(BaseModel):
    """A page; the next one is ``after=last_id``."""

    object: Literal["list"]
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    """A video that is gone."""

    id: str
    object: Literal["video.deleted"]
    deleted: Literal[True]


class JsonResponse(Response):
    """Compact JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of ``content``; numbers that JSON has not are a fault of ours."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()


def video_response(
    job: Job, position: int | None = None, *, headers: Mapping[str, str] | None = None
) -> JsonResponse:
    """A video object as an answer."""
    return JsonResponse(video_object(job, position), headers={**POLL_HEADER, **(headers or {})})


def video_object(job: Job, position: int | None = None) -> dict[str, Any]:
    """A job as the API shows it; ``position`` is how many queued ones go before it."""
    plan = job.plan
    width, _, height = str(plan["size"]).partition("x")
    parents = {
        relation: job.parent_id if job.relation is relation else None for relation in Relation
    }
    return {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "status": STATUS[job.state],
        "progress": percent(job),
        "created_at": int(job.created_at),
        "completed_at": _whole(job.completed_at),
        "expires_at": _whole(job.expires_at),
        "seconds": _seconds(job),
        "size": plan["size"],
        "prompt": job.prompt,
        "remixed_from_video_id": parents[Relation.REMIX],
        "error": _error(job),
        "x_progress": progress_object(job, position),
        "extended_from_video_id": parents[Relation.EXTEND],
        "edited_from_video_id": parents[Relation.EDIT],
        "mode": job.mode,
        "num_frames": num_frames(job),
        "fps": plan["fps"],
        "width": int(width),
        "height": int(height),
        "seed": job.request["seed"],
        "priority": job.priority,
        "paused": job.paused,
        "cancel_requested": job.cancel_requested,
        "tags": list(job.tags),
        "starred": job.starred,
        "trashed": job.trashed_at is not None,
        "trashed_at": _whole(job.trashed_at),
        "batch_id": job.batch_id,
        "started_at": _whole(job.started_at),
        "updated_at": int(job.updated_at),
        "attempt": job.attempt,
        "bytes_stored": job.bytes_stored,
        "warnings": plan["warnings"],
        "plan": {name: value for name, value in plan.items() if name != "layout"},
        "request": public_request(job),
    }


def num_frames(job: Job) -> int:
    """How many frames the video has, or is to have; fewer than planned where it was stopped."""
    kept = job.progress.get("frames") if job.state is JobState.CANCELLED else None
    return int(job.plan["num_frames"] if kept is None else kept)


def percent(job: Job) -> int:
    """Denoising steps done of all, in per cent, rounded down; 100 only once the video is there."""
    if job.state is JobState.COMPLETED:
        return 100
    chunks, steps, chunk, step = _counts(job)
    share = (chunk * steps + min(step, steps)) / (chunks * steps)
    return max(0, min(99, math.floor(100 * share)))


def progress_object(job: Job, position: int | None = None) -> dict[str, Any]:
    """``x_progress``."""
    chunks, steps, chunk, step = _counts(job)
    running = job.state is JobState.RUNNING
    return {
        "phase": _phase(job),
        "chunk": chunk,
        "chunks": chunks,
        "step": step,
        "steps": steps,
        "fps": job.progress.get("fps") if running else None,
        "eta_seconds": job.progress.get("eta_seconds") if running else None,
        "queue_position": position if job.state is JobState.QUEUED else None,
    }


def public_request(job: Job) -> dict[str, Any]:
    """The request in fields that POST /v1/videos takes: the same body makes the same video."""
    request = {k: v for k, v in job.request.items() if k not in ("image", "video")}
    request["model"] = job.model
    for field in ("image", "video"):
        reference = str(job.request.get(field) or "")
        if reference.startswith(INPUT):
            request["input_reference"] = {"file_id": reference.removeprefix(INPUT)}
        elif reference.startswith(JOB):
            request["input_reference"] = {"id": reference.removeprefix(JOB)}
    return request


def _counts(job: Job) -> tuple[int, int, int, int]:
    """Chunks and steps in all, chunks done, steps of the next one; the first two at least 1."""
    seen = job.progress if not job.finished or job.progress else {}
    chunks = max(1, int(seen.get("chunks") or job.plan["chunks"]))
    steps = max(1, int(seen.get("steps") or job.plan["steps"]))
    if job.state is JobState.COMPLETED:
        return chunks, steps, chunks, 0
    if job.state is JobState.RUNNING:
        chunk = max(int(seen.get("chunk") or 0), 0)
        return chunks, steps, min(chunk, chunks), int(seen.get("step") or 0)
    # nobody works on it: what is stored is what is done
    return chunks, steps, min(job.chunks_done, chunks), 0


def _phase(job: Job) -> str:
    if job.state is JobState.RUNNING:
        return "cancelling" if job.cancel_requested else str(job.progress.get("phase", "starting"))
    if job.state is JobState.QUEUED and job.paused:
        return "paused"
    return str(job.state)


def _error(job: Job) -> dict[str, str] | None:
    if job.state is not JobState.FAILED or job.error is None:
        return None
    return {
        "code": str(job.error.get("code", "internal_error")),
        "message": str(job.error.get("message", "")),
    }


def _seconds(job: Job) -> str:
    """The seconds asked for; where frames were asked for or it was stopped, how long those are."""
    frames, asked = num_frames(job), job.request.get("seconds")
    if frames != job.plan["num_frames"]:
        return f"{frames / job.plan['fps']:.10g}"
    return f"{asked if asked is not None else job.plan['seconds']:.10g}"


def _whole(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)
