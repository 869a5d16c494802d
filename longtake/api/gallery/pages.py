"""The pages: gallery, one video, comparison, queue, workers, batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from longtake.api.auth import Owner, Principal
from longtake.api.gallery import detail
from longtake.api.gallery.cards import make_cards
from longtake.api.gallery.choices import Choices
from longtake.api.gallery.find import Found, by_id, cards_of, find, query_of
from longtake.api.gallery.render import is_part, render
from longtake.api.gallery.summary import summary_of
from longtake.api.objects import STATES, public_request
from longtake.api.references import find_video
from longtake.api.service import Service, ServiceDep
from longtake.errors import NotFoundError
from longtake.queue.listings import Filters
from longtake.queue.records import LOCAL_OWNER, Job, JobState

MAX_QUEUE, MAX_BATCHES = 200, 30
MAX_COMPARED = 4
PACED = 12  # videos whose making says how long the next one takes
ACTIONS = {"again", "new-seed", "remix", "extend", "edit"}

router = APIRouter(include_in_schema=False)


@router.get("/")
def gallery(request: Request, service: ServiceDep, who: Owner) -> Response:
    """Make and find: the form, and the wall of videos. htmx gets the wall alone."""
    query = query_of(request)
    since = service.store.events.latest(owner=who.id)
    try:
        found = find(service.store, who.id, query, request.query_params.get("after"))
    except NotFoundError:
        found = Found([], None)
    if is_part(request):
        return render(request, "results.html", found=found, query=query)
    choices = _choices(request, service).all()
    return render(
        request,
        "gallery.html",
        nav="gallery",
        since=since,
        found=found,
        query=query,
        choices=choices,
        models=[
            asdict(choice) | {"pace_s": _pace(service, who, choice.name)} for choice in choices
        ],
        source=_source(request, service, who),
        summary=summary_of(service, who.id),
    )


@router.get("/videos/{video_id}")
def video(video_id: str, request: Request, service: ServiceDep, who: Owner) -> Response:
    """One video: player, parameters, receipt, timings, drift and lineage."""
    since = service.store.events.latest(owner=who.id)
    try:
        job = find_video(service, who, video_id)
    except NotFoundError:
        text = "There is no video of that name; it may have been deleted."
        return render(request, "error.html", 404, title="Not here", text=text)
    store = service.store
    receipt = detail.receipt_of(service, job)
    parent, children = detail.lineage(service, job)
    family = [job, *([parent] if parent else []), *children]
    cards = cards_of(store, family, since)
    origin = str(request.base_url).rstrip("/")
    return render(
        request,
        "video_part.html" if is_part(request) else "video.html",
        nav="gallery",
        since=since,
        card=cards[0],
        parent=cards[1] if parent else None,
        children=cards[2:] if parent else cards[1:],
        parameters=detail.parameters(job),
        copies=detail.copies(job, origin, keyed=who.id != LOCAL_OWNER),
        request_body=public_request(job),
        receipt=receipt,
        stages=detail.stages(receipt, store.listings.chunks(job.id)),
        drift=detail.drift(receipt),
        attempts=store.listings.attempts(job.id),
        summary=summary_of(service, who.id),
    )


@router.get("/compare")
def compare(request: Request, service: ServiceDep, who: Owner) -> Response:
    """Two to four videos side by side, and what is different about them."""
    ids = [part for part in request.query_params.get("ids", "").split(",") if part]
    cards = by_id(service.store, who.id, ids[:MAX_COMPARED])
    return render(
        request,
        "compare.html",
        nav="gallery",
        since=service.store.events.latest(owner=who.id),
        cards=cards,
        rows=_differences([card.job for card in cards]),
        missing=len(ids[:MAX_COMPARED]) - len(cards),
        summary=summary_of(service, who.id),
    )


@router.get("/queue")
def queue(request: Request, service: ServiceDep, who: Owner) -> Response:
    """What is being made and what waits, in the order in which it will be made."""
    listings = service.store.listings
    since = service.store.events.latest(owner=who.id)

    def of(state: JobState, order: Any = "asc", limit: int = MAX_QUEUE) -> list[Job]:
        return listings.page(who.id, None, limit, order, Filters(state=state, trashed=None)).jobs

    queued = of(JobState.QUEUED)
    positions = listings.positions(queued)
    queued.sort(key=lambda job: (positions.get(job.id, len(queued)), job.priority, job.position))
    ended = sorted(
        (*of(JobState.FAILED, "desc", 10), *of(JobState.CANCELLED, "desc", 10)),
        key=lambda job: -(job.completed_at or 0),
    )
    return render(
        request,
        "queue_part.html" if is_part(request) else "queue.html",
        nav="queue",
        since=since,
        running=make_cards(of(JobState.RUNNING), since, {}),
        queued=make_cards(queued, since, positions),
        ended=make_cards([job for job in ended if job.trashed_at is None][:10], since, {}),
        more=len(queued) == MAX_QUEUE,
        summary=summary_of(service, who.id),
    )


@router.get("/workers")
def workers(request: Request, service: ServiceDep, who: Owner) -> Response:
    """The workers by their own word."""
    fresh_s = 4 * service.settings.heartbeat_s
    return render(
        request,
        "workers_part.html" if is_part(request) else "workers.html",
        nav="workers",
        since=service.store.events.latest(owner=who.id),
        workers=service.store.workers.list(),
        alive={worker.id for worker in service.store.workers.list(fresh_s)},
        summary=summary_of(service, who.id),
    )


@router.get("/batches")
def batches(request: Request, service: ServiceDep, who: Owner) -> Response:
    """Batches and how far each is."""
    store = service.store
    since = store.events.latest(owner=who.id)
    found = store.batches.page(who.id, None, MAX_BATCHES).batches
    counts = store.batches.counts([batch.id for batch in found])
    rows = [(batch, _by_status(counts[batch.id])) for batch in found]
    return render(
        request,
        "batches_part.html" if is_part(request) else "batches.html",
        nav="batches",
        since=since,
        rows=rows,
        summary=summary_of(service, who.id),
    )


def _choices(request: Request, service: Service) -> Choices:
    state = request.app.state
    if not hasattr(state, "gallery_choices"):
        state.gallery_choices = Choices(service.catalogue)
    return cast(Choices, state.gallery_choices)


def _pace(service: Service, who: Principal, model: str) -> float | None:
    """Seconds that a frame of the model took lately, for lack of a better guess."""
    done = Filters(state=JobState.COMPLETED, model=model, trashed=None)
    cards = make_cards(service.store.listings.page(who.id, None, PACED, "desc", done).jobs, 0, {})
    paces = [c.made_in_s / c.job.plan["num_frames"] for c in cards if c.made_in_s is not None]
    return median(paces) if paces else None


def _by_status(counts: Mapping[JobState, int]) -> dict[str, int]:
    return {status: counts.get(state, 0) for status, state in STATES.items()}


def _source(request: Request, service: Service, who: Principal) -> dict[str, Any] | None:
    """The video that the form starts from, as ``/?from=ID&as=remix`` asks."""
    action = request.query_params.get("as", "remix")
    try:
        job = find_video(service, who, request.query_params.get("from", ""))
    except NotFoundError:
        return None
    start = detail.start_of(job)
    return {
        "id": job.id,
        "action": action if action in ACTIONS else "remix",
        "request": public_request(job),
        "seconds": job.plan.get("seconds"),
        "start": asdict(start) if start is not None else None,
        "title": " ".join(job.prompt.split())[:80],
    }


def _differences(compared: list[Job]) -> list[tuple[str, list[str], bool]]:
    """Parameters of several videos: name, each one's value, and whether they differ."""
    tables = [
        {"prompt": job.prompt} | {name: value for name, value, _ in detail.parameters(job)}
        for job in compared
    ]
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows = [(name, [table.get(name, "") for table in tables]) for name in names]
    return [(name, values, len(set(values)) > 1) for name, values in rows]
