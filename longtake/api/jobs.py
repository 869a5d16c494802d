"""What this service adds to a video: cancel, retry, trash, change, and the plan alone."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from starlette.responses import Response

from longtake.api import submit
from longtake.api.auth import Owner
from longtake.api.errors import problems
from longtake.api.forms import Body, read_body
from longtake.api.objects import JsonResponse, Video, video_response
from longtake.api.references import find_video
from longtake.api.schemas import CancelVideo, ChangeVideo, CreateVideo, body_schema, read_fields
from longtake.api.service import ServiceDep
from longtake.api.videos import MADE, READ, VideoId
from longtake.queue.admission import Admitted
from longtake.queue.records import Job, JobState
from longtake.video.clip_plan import ClipPlan

router = APIRouter(prefix="/v1/videos", tags=["jobs"])
CHANGED = READ | problems(409)
# adding up a day of video takes seconds, and the figure is of use for a shorter one
MAX_COSTED_CHUNKS = 10_000


class VideoPlan(BaseModel):
    """What would run. ``cost`` is null for a very long video, and where a model's is not known."""

    object: Literal["video.plan"]
    model: str
    mode: str
    num_frames: int
    fps: float
    size: str
    seconds: float
    seed: int
    chunks: int
    steps: int
    warnings: list[str]
    plan: dict[str, Any]
    cost: dict[str, Any] | None


@router.post(
    "/plan", response_model=VideoPlan, responses=MADE, openapi_extra=body_schema(CreateVideo)
)
async def plan_video(request: Request, service: ServiceDep, who: Owner) -> Response:
    """What a video would be: everything checked and resolved, nothing queued."""

    def plan(body: Body) -> dict[str, Any]:
        caller = submit.Caller(service, who, request.headers, "plan", body)
        return _plan_object(service.client.plan(submit.plan_only(caller), who.id))

    async with read_body(request) as body:
        return JsonResponse(await run_in_threadpool(plan, body))


@router.post(
    "/{video_id}/cancel",
    response_model=Video,
    responses=MADE,
    openapi_extra=body_schema(CancelVideo, required=False),
)
async def cancel_video(
    video_id: VideoId, request: Request, service: ServiceDep, who: Owner
) -> Response:
    """Stop a video: at once where it is queued, after the step in flight where it runs.

    With ``keep`` the finished chunks of a running one become its video. A finished video is
    answered as it is.
    """

    def cancel(body: Body) -> Job:
        find_video(service, who, video_id)
        fields = read_fields(CancelVideo, body.fields)
        job = service.store.submissions.cancel(video_id, who.id, keep_chunks=fields.keep)
        if job.state is JobState.RUNNING:
            service.ticker.nudge(job.id)
        return job

    async with read_body(request) as body:
        return video_response(await run_in_threadpool(cancel, body))


@router.post("/{video_id}/retry", response_model=Video, responses=CHANGED)
def retry_video(video_id: VideoId, service: ServiceDep, who: Owner) -> Response:
    """Queue a failed or cancelled video again; it goes on from the chunks it has."""
    service.check_accepting()
    find_video(service, who, video_id)
    job = service.store.submissions.retry(video_id, who.id, who.limits)
    service.submitted()
    return video_response(job)


@router.post("/{video_id}/trash", response_model=Video, responses=CHANGED)
def trash_video(video_id: VideoId, service: ServiceDep, who: Owner) -> Response:
    """Put a video into the trash, which is emptied after a while; one being made is cancelled."""
    before = find_video(service, who, video_id)
    job = service.store.submissions.trash(video_id, who.id)
    if before.state is JobState.RUNNING:
        service.ticker.nudge(job.id)
    return video_response(job)


@router.post("/{video_id}/restore", response_model=Video, responses=CHANGED)
def restore_video(video_id: VideoId, service: ServiceDep, who: Owner) -> Response:
    """Take a video out of the trash; one that was cancelled by it is queued again."""
    find_video(service, who, video_id)
    job = service.store.submissions.restore(video_id, who.id, who.limits)
    service.submitted()
    return video_response(job)


@router.patch(
    "/{video_id}", response_model=Video, responses=MADE, openapi_extra=body_schema(ChangeVideo)
)
async def change_video(
    video_id: VideoId, request: Request, service: ServiceDep, who: Owner
) -> Response:
    """Change priority, place, pause, tags or star, and the request itself while it is queued."""
    async with read_body(request) as body:
        changed = await run_in_threadpool(submit.change, service, who, video_id, body)
    return video_response(changed)


def _plan_object(admitted: Admitted) -> dict[str, Any]:
    summary, plan = admitted.summary, admitted.plan
    costed = isinstance(plan, ClipPlan) or summary["chunks"] <= MAX_COSTED_CHUNKS
    cost = plan.cost if costed else None
    return {
        "object": "video.plan",
        "model": admitted.model,
        "mode": admitted.mode,
        **{name: summary[name] for name in ("num_frames", "fps", "size", "seconds")},
        "seed": plan.seed,
        "chunks": summary["chunks"],
        "steps": summary["steps"],
        "warnings": summary["warnings"],
        "plan": {name: value for name, value in summary.items() if name != "layout"},
        "cost": cost.as_dict() if cost is not None else None,
    }
