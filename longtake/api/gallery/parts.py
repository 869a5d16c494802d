"""Parts of pages: the same templates as of the first load, for scrolling and for events."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from longtake.api.auth import Owner
from longtake.api.gallery.find import Found, by_id, find, query_of
from longtake.api.gallery.render import base_of, render
from longtake.api.gallery.summary import summary_of
from longtake.api.objects import JsonResponse
from longtake.api.references import find_video
from longtake.api.service import ServiceDep
from longtake.errors import NotFoundError
from longtake.queue.records import ArtifactKind

router = APIRouter(prefix="/gallery", include_in_schema=False)


@router.get("/cards")
def cards(request: Request, service: ServiceDep, who: Owner) -> Response:
    """The cards of ``ids``, as far as they are there and the query shows them."""
    ids = [part for part in request.query_params.get("ids", "").split(",") if part]
    query = query_of(request)
    shown = [card for card in by_id(service.store, who.id, ids) if query.shows(card.job)]
    return render(request, "cards.html", cards=shown, query=query)


@router.get("/more")
def more(request: Request, service: ServiceDep, who: Owner) -> Response:
    """The next page of cards after the one in ``after``."""
    query = query_of(request)
    try:
        found = find(service.store, who.id, query, request.query_params.get("after"))
    except NotFoundError:
        found = Found([], None)
    return render(request, "more.html", found=found, query=query)


@router.get("/summary")
def summary(request: Request, service: ServiceDep, who: Owner) -> Response:
    """The line that says how much waits and is stored."""
    return render(request, "summary.html", summary=summary_of(service, who.id))


@router.get("/sheets/{video_id}")
def sheet(video_id: str, request: Request, service: ServiceDep, who: Owner) -> Response:
    """Where a video's sprite sheet is, and which moment is where on it."""
    job = find_video(service, who, video_id)
    files = service.store.files.of_job(job.id, ArtifactKind.SPRITESHEET)
    if not files:
        raise NotFoundError("sprite sheet", job.id)
    version = f"{job.fence}-{job.chunks_done}"
    url = f"{base_of(request)}/v1/videos/{job.id}/content?variant=spritesheet&v={version}"
    return JsonResponse({"url": url, **files[-1].details})
