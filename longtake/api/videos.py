"""/v1/videos: OpenAI's surface. Multipart, urlencoded and JSON bodies are the same here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from longtake.api import submit
from longtake.api.auth import Owner, Principal
from longtake.api.errors import NO_RETRY, ApiError, problems
from longtake.api.forms import read_body
from longtake.api.objects import (
    STATES,
    Deleted,
    JsonResponse,
    Video,
    VideoList,
    video_object,
    video_response,
)
from longtake.api.references import VIDEO_ID, find_video
from longtake.api.schemas import CreateVideo, EditVideo, ExtendVideo, RemixVideo, Text, body_schema
from longtake.api.service import Service, ServiceDep
from longtake.errors import NotFoundError
from longtake.queue.listings import Filters
from longtake.queue.records import Job

router = APIRouter(prefix="/v1/videos", tags=["videos"])
VideoId = Annotated[str, Path(max_length=64, description="id of a video")]
MADE = problems(400, 401, 403, 404, 409, 413, 415, 422, 429, 503)
READ = problems(400, 401, 403, 404, 429, 503)


class ListQuery(BaseModel):
    """Which videos, in which order, from where."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = Field(None, max_length=64, description="last_id of the page before")
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled"] | None = None
    model: Text | None = None
    q: Text | None = Field(None, max_length=500, description="words of the prompt, in any order")
    batch_id: Text | None = Field(None, max_length=64)
    parent_id: Text | None = Field(None, max_length=64)
    starred: bool | None = None
    trashed: Literal["true", "false", "all"] = "false"
    tag: Text | None = Field(None, max_length=64)
    seed: int | None = Field(None, ge=0, lt=2**63)
    created_after: float | None = Field(None, ge=0, le=1e11, description="seconds since 1970")
    created_before: float | None = Field(None, ge=0, le=1e11, description="seconds since 1970")

    @property
    def filters(self) -> Filters:
        """As the store takes them."""
        return Filters(
            state=STATES[self.status] if self.status is not None else None,
            model=self.model,
            text=self.q,
            batch_id=self.batch_id,
            parent_id=self.parent_id,
            starred=self.starred,
            trashed=None if self.trashed == "all" else self.trashed == "true",
            tag=self.tag,
            seed=self.seed,
            created_after=self.created_after,
            created_before=self.created_before,
        )


@router.post("", response_model=Video, responses=MADE, openapi_extra=body_schema(CreateVideo))
async def create_video(request: Request, service: ServiceDep, who: Owner) -> Response:
    """Queue a video."""
    return await _submitted(request, service, who, "videos", submit.create)


@router.post("/edits", response_model=Video, responses=MADE, openapi_extra=body_schema(EditVideo))
async def edit_video(request: Request, service: ServiceDep, who: Owner) -> Response:
    """Redraw a video, made here or uploaded, after a prompt."""
    return await _submitted(request, service, who, "edits", submit.edit)


@router.post(
    "/extensions", response_model=Video, responses=MADE, openapi_extra=body_schema(ExtendVideo)
)
async def extend_video(request: Request, service: ServiceDep, who: Owner) -> Response:
    """Go on with a video, made here or uploaded; ``seconds`` is the length of the whole."""
    return await _submitted(request, service, who, "extensions", submit.extend)


@router.post("/characters", responses=problems(401, 403, 404, 429), response_class=Response)
async def create_character() -> Response:
    """Refused: no open model here has characters."""
    raise _no_characters()


@router.get(
    "/characters/{character_id}", responses=problems(401, 403, 404, 429), response_class=Response
)
async def get_character(character_id: str) -> Response:
    """Refused: no open model here has characters."""
    del character_id
    raise _no_characters()


@router.post(
    "/{video_id}/remix",
    response_model=Video,
    responses=MADE,
    openapi_extra=body_schema(RemixVideo),
)
async def remix_video(
    video_id: VideoId, request: Request, service: ServiceDep, who: Owner
) -> Response:
    """Make a video again with another prompt."""
    draft = partial(submit.remix, video_id=video_id)
    return await _submitted(request, service, who, f"remix {video_id}", draft)


@router.get("", response_model=VideoList, responses=READ)
def list_videos(service: ServiceDep, who: Owner, query: Annotated[ListQuery, Query()]) -> Response:
    """Videos by time of creation; those in the trash only when asked for."""
    if query.after is not None and VIDEO_ID.match(query.after) is None:
        raise NotFoundError("video", query.after)
    listings = service.store.listings
    page = listings.page(who.id, query.after, query.limit, query.order, query.filters)
    positions = listings.positions(page.jobs)
    return JsonResponse(
        {
            "object": "list",
            "data": [video_object(job, positions.get(job.id)) for job in page.jobs],
            "first_id": page.jobs[0].id if page.jobs else None,
            "last_id": page.jobs[-1].id if page.jobs else None,
            "has_more": page.has_more,
        }
    )


@router.get("/{video_id}", response_model=Video, responses=READ)
def retrieve_video(video_id: VideoId, service: ServiceDep, who: Owner) -> Response:
    """One video."""
    job = find_video(service, who, video_id)
    return video_response(job, _position(service, job))


@router.delete("/{video_id}", response_model=Deleted, responses=READ | problems(409))
def delete_video(video_id: VideoId, service: ServiceDep, who: Owner) -> Response:
    """Remove a video and its files for good; one that is being made is stopped.

    While an extension or edit of it waits or is made, it is refused (409, ``in_use``).
    """
    job = find_video(service, who, video_id)
    service.store.submissions.delete(job.id, who.id)
    if not job.finished:
        service.ticker.nudge(job.id)
    return JsonResponse({"id": job.id, "object": "video.deleted", "deleted": True})


async def _submitted(
    request: Request,
    service: Service,
    who: Principal,
    route: str,
    draft: Callable[[submit.Caller], submit.Draft],
) -> Response:
    async with read_body(request) as body:
        caller = submit.Caller(service, who, request.headers, route, body)
        return video_response(await run_in_threadpool(submit.submit, caller, draft))


def _position(service: Service, job: Job) -> int | None:
    return None if job.finished else service.store.listings.position(job)


def _no_characters() -> ApiError:
    message = "Characters are not supported: no model here has them."
    return ApiError(404, message, code="unsupported", headers=NO_RETRY)
