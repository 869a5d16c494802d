"""/v1/batches: a manifest of many requests in, what became of each of them out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import FormData, UploadFile

from longtake.api import submit
from longtake.api.auth import Owner, Principal
from longtake.api.errors import ApiError, api_error, problems
from longtake.api.forms import Body
from longtake.api.idempotency import read_key
from longtake.api.limits import quotas
from longtake.api.objects import STATUS, JsonResponse, Progress, VideoError, video_object
from longtake.api.service import Service, ServiceDep
from longtake.errors import LongtakeError, TooLargeError
from longtake.queue.batch import MAX_ITEMS, Item, Manifest, read_manifest
from longtake.queue.records import Batch, Job, JobState, NewJob

LINES = frozenset(
    {"application/jsonl", "application/x-ndjson", "application/ndjson", "application/x-jsonlines"}
)
FORM = "multipart/form-data"
READ = problems(400, 401, 403, 404, 429, 503)
MADE = READ | problems(409, 413, 415, 422)

router = APIRouter(prefix="/v1/batches", tags=["batches"])
BatchId = Annotated[str, Path(max_length=64, description="id of a batch")]


class BatchCounts(BaseModel):
    """Items by what became of them; ``deleted`` were videos once."""

    total: int
    queued: int
    in_progress: int
    completed: int
    failed: int
    cancelled: int
    invalid: int
    deleted: int


class ItemUrls(BaseModel):
    """Where an item's video and its files are; files are there once it is completed."""

    video: str
    content: str
    thumbnail: str
    cancel: str


class BatchItem(BaseModel):
    """One item, by its place in the manifest; ``line`` of a file of lines where one is refused."""

    index: int
    line: int | None
    id: str | None
    status: Literal[
        "queued", "in_progress", "completed", "failed", "cancelled", "invalid", "deleted"
    ]
    progress: int | None
    x_progress: Progress | None
    error: VideoError | None
    param: str | None
    urls: ItemUrls | None


class BatchObject(BaseModel):
    """A batch; ``status`` is completed once nothing of it is left to do."""

    id: str
    object: Literal["batch"]
    name: str | None
    status: Literal["in_progress", "completed"]
    created_at: int
    request_counts: BatchCounts


class BatchWithItems(BatchObject):
    """A batch and a part of its items; the next part is ``after=last_index``."""

    items: list[BatchItem]
    last_index: int | None
    has_more: bool


class BatchList(BaseModel):
    """A page; the next one is ``after=last_id``."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchManifest(BaseModel):
    """A manifest as JSON; an item has the fields of ``POST /v1/videos``."""

    name: str | None = Field(None, max_length=255)
    items: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_ITEMS)


class ItemsQuery(BaseModel):
    """Which items."""

    model_config = ConfigDict(extra="forbid")

    after: int = Field(-1, ge=-1, description="last_index of the part before")
    limit: int = Field(100, ge=1, le=MAX_ITEMS)


class BatchesQuery(BaseModel):
    """Which batches."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = Field(None, max_length=64, description="last_id of the page before")
    limit: int = Field(20, ge=1, le=100)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A manifest as it came: ``mark`` is of its bytes."""

    manifest: Manifest
    mark: str


_TEXT = {"schema": {"type": "string", "description": "one request a line"}}
_UPLOAD = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "name": {"type": "string"}},
    "required": ["file"],
}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": BatchManifest.model_json_schema()},
            **dict.fromkeys(sorted(LINES), _TEXT),
            FORM: {"schema": _UPLOAD},
        },
    }
}


@router.post("", response_model=BatchWithItems, responses=MADE, openapi_extra=_BODY)
async def create_batch(request: Request, service: ServiceDep, who: Owner) -> Response:
    """Queue every legal request of a manifest; those that are not are listed with the reason."""
    sent = await _read(request)
    batch, jobs = await run_in_threadpool(_submit, service, who, sent, request.headers)
    return _with_items(service, batch, jobs, ItemsQuery(after=-1, limit=MAX_ITEMS))


@router.get("", response_model=BatchList, responses=READ)
def list_batches(
    service: ServiceDep, who: Owner, query: Annotated[BatchesQuery, Query()]
) -> Response:
    """The caller's batches, newest first, without their items."""
    page = service.store.batches.page(who.id, query.after, query.limit)
    counts = service.store.batches.counts([one.id for one in page.batches])
    data = [_object(one, counts[one.id]) for one in page.batches]
    return JsonResponse(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": page.has_more,
        }
    )


@router.get("/{batch_id}", response_model=BatchWithItems, responses=READ)
def get_batch(
    batch_id: BatchId, service: ServiceDep, who: Owner, query: Annotated[ItemsQuery, Query()]
) -> Response:
    """A batch and what became of its items."""
    batch = service.store.batches.get(batch_id, who.id)
    return _with_items(service, batch, service.store.batches.results(batch.id), query)


@router.post("/{batch_id}/cancel", response_model=BatchObject, responses=READ | problems(409))
def cancel_batch(batch_id: BatchId, service: ServiceDep, who: Owner) -> Response:
    """Cancel every video of a batch that is not finished."""
    batch = service.store.batches.get(batch_id, who.id)
    for job in service.store.batches.results(batch.id):
        if job.finished:
            continue
        cancelled = service.store.submissions.cancel(job.id, who.id)
        if cancelled.state is JobState.RUNNING:
            service.ticker.nudge(job.id)
    return JsonResponse(_object(batch, service.store.batches.counts([batch.id])[batch.id]))


async def _read(request: Request) -> _Sent:
    """The manifest that a request brings.

    Raises:
        ApiError, RequestError: it brings none, or one that cannot be read.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    name: str | None = None
    if kind == "application/json" or kind in LINES:
        data = await request.body()
    elif kind == FORM:
        async with request.form(max_files=1, max_fields=2) as form:
            data, name = await _of_form(form, request.app.state.service.settings.max_body_bytes)
    else:
        message = "Content-Type: send application/json, application/jsonl or a multipart file."
        raise ApiError(415, message)
    lines = None if kind == FORM else kind in LINES
    mark = hashlib.sha256(b"batches\0" + kind.encode() + b"\0" + data).hexdigest()
    return _Sent(await run_in_threadpool(read_manifest, data, lines=lines, name=name), mark)


async def _of_form(form: FormData, limit: int) -> tuple[bytes, str | None]:
    """The manifest and the name that a form holds."""
    upload, name = form.get("file"), form.get("name")
    if not isinstance(upload, UploadFile):
        raise ApiError(400, "file: is missing", code="missing_field", param="file")
    data = await upload.read(limit + 1)
    if len(data) > limit:
        raise TooLargeError("file", upload.filename, f"is larger than {limit} bytes")
    return data, name if isinstance(name, str) else None


def _submit(
    service: Service, who: Principal, sent: _Sent, headers: Mapping[str, str]
) -> tuple[Batch, list[Job]]:
    """Store the batch and its legal items' jobs, all in one transaction."""
    service.check_accepting()
    header = headers.get("idempotency-key")
    key = (f"key:{read_key(header)}", sent.mark) if header is not None else None
    manifest = sent.manifest
    planned: list[NewJob] = []
    invalid: list[dict[str, Any]] = []
    batches = service.store.batches
    draft = batches.new(who.id, manifest.name, len(manifest.items))
    for item in manifest.items:
        try:
            planned.append(_plan(service, who, item, draft.id))
        except LongtakeError as error:
            invalid.append(_refusal(item, error))
    batch = replace(draft, invalid=tuple(invalid))
    jobs = service.store.submissions.submit(
        planned, quotas(who.limits), idempotency=key if planned else None, batch=batch
    )
    service.submitted()
    # an earlier try with the same key made another batch, and that one is the answer
    made = jobs[0].batch_id if jobs else batch.id
    return batches.get(made or batch.id, who.id), jobs


def _plan(service: Service, who: Principal, item: Item, batch_id: str) -> NewJob:
    if item.error is not None:
        raise item.error
    made = submit.create(submit.Caller(service, who, {}, "batches", Body(item.fields)))
    options = replace(made.options, batch_id=batch_id, batch_index=item.index)
    return service.client.new_job(made.request, who.id, options)


def _refusal(item: Item, error: LongtakeError) -> dict[str, Any]:
    """An item that made no job, as the batch's row keeps it."""
    answer = api_error(error)
    if answer.status >= 500 and answer.code != "model_unavailable":
        # the server's state and not the item's fault: nothing of the batch is stored
        raise error
    told = {"code": answer.code, "message": answer.message}
    return {"index": item.index, "line": item.line, "error": told, "param": answer.param}


def _object(batch: Batch, counts: Mapping[JobState, int]) -> dict[str, Any]:
    left = counts.get(JobState.QUEUED, 0) + counts.get(JobState.RUNNING, 0)
    invalid = len(batch.invalid)
    return {
        "id": batch.id,
        "object": "batch",
        "name": batch.name,
        "status": "in_progress" if left else "completed",
        "created_at": int(batch.created_at),
        "request_counts": {
            "total": batch.total,
            **{word: counts.get(state, 0) for state, word in STATUS.items()},
            "invalid": invalid,
            "deleted": batch.total - invalid - sum(counts.values()),
        },
    }


def _with_items(service: Service, batch: Batch, jobs: list[Job], query: ItemsQuery) -> JsonResponse:
    by_index = {job.batch_index: job for job in jobs}
    refused = {one["index"]: one for one in batch.invalid}
    first = query.after + 1
    last = min(first + query.limit, batch.total)
    items = [
        _item(service, index, by_index.get(index), refused.get(index))
        for index in range(first, last)
    ]
    page = {
        "items": items,
        "last_index": items[-1]["index"] if items else None,
        "has_more": last < batch.total,
    }
    counts = Counter(job.state for job in jobs)
    return JsonResponse({**_object(batch, counts), **page})


def _item(
    service: Service, index: int, job: Job | None, refused: dict[str, Any] | None
) -> dict[str, Any]:
    item = dict.fromkeys(BatchItem.model_fields) | {"index": index}
    if refused is not None:
        told = {name: refused[name] for name in ("line", "error", "param")}
        return {**item, **told, "status": "invalid"}
    if job is None:
        return {**item, "status": "deleted"}
    base = f"{service.settings.base_path.rstrip('/')}/v1/videos/{job.id}"
    video = video_object(job)
    return {
        **item,
        **{name: video[name] for name in ("id", "status", "progress", "x_progress", "error")},
        "urls": {
            "video": base,
            "content": f"{base}/content",
            "thumbnail": f"{base}/content?variant=thumbnail",
            "cancel": f"{base}/cancel",
        },
    }
