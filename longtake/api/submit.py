"""From a body to a stored job: fields read, inputs resolved, planned, submitted once. It blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.datastructures import UploadFile

from longtake.api.auth import Principal
from longtake.api.errors import ApiError
from longtake.api.forms import Body
from longtake.api.limits import quotas
from longtake.api.references import Kind, find_video, inherited, input_fields, resolve
from longtake.api.schemas import (
    ChangeVideo,
    CreateVideo,
    EditVideo,
    ExtendVideo,
    JobFields,
    Reference,
    RemixVideo,
    read_fields,
)
from longtake.api.service import Service
from longtake.errors import RequestError
from longtake.queue.admission import JOB
from longtake.queue.client import (
    DEFAULT_PRIORITY,
    JobOptions,
    check_stored,
    edit_request,
    extend_request,
    remix_request,
)
from longtake.queue.records import Artifact, Job, Relation
from longtake.video.request import REQUEST_FIELDS, format_size, parse_size

JOB_CHANGES = ("priority", "paused", "tags", "starred", "position")
M = TypeVar("M", bound=BaseModel)
Given = Reference | str | UploadFile


@dataclass(frozen=True, slots=True)
class Draft:
    """A request in the JSON form of ``VideoRequest``, and what its job is to be."""

    request: dict[str, Any]
    options: JobOptions


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends which body to which route, with which headers."""

    service: Service
    who: Principal
    headers: Mapping[str, str]
    route: str
    body: Body


def submit(caller: Caller, draft: Callable[[Caller], Draft]) -> Job:
    """Store the job that ``draft`` makes of the body, unless an earlier try did.

    Raises:
        LongtakeError, ApiError: see ``api.errors`` for what each answers.
    """
    service, who = caller.service, caller.who
    service.check_accepting()

    def store(idempotency: tuple[str, str] | None) -> Job:
        made = draft(caller)
        return service.client.submit(
            made.request,
            who.id,
            made.options,
            limits=quotas(who.limits),
            idempotency=idempotency,
        )

    job = service.once.submit(
        who.id, caller.headers, lambda: caller.body.fingerprint(caller.route), store
    )
    service.submitted()
    return job


def create(caller: Caller) -> Draft:
    """POST /v1/videos."""
    model, given = _read(caller, CreateVideo, "input_reference")
    return Draft(_created(caller, model, given), _options(model))


def remix(caller: Caller, video_id: str) -> Draft:
    """POST /v1/videos/{id}/remix."""
    source = find_video(caller.service, caller.who, video_id)
    model, _ = _read(caller, RemixVideo, None)
    request = remix_request(source, request_fields(model))
    request = inherited(caller.service, caller.who.id, request)
    return Draft(request, _options(model, source, Relation.REMIX))


def extend(caller: Caller) -> Draft:
    """POST /v1/videos/extensions."""
    model, given = _read(caller, ExtendVideo, "video")
    fields = request_fields(model)
    if "strength" in fields:
        legal = "POST /v1/videos/edits redraws"
        raise RequestError("strength", fields["strength"], "an extension has none", legal)
    source = _source(caller, given)
    if isinstance(source, Job):
        return Draft(extend_request(source, fields), _options(model, source, Relation.EXTEND))
    return Draft({**fields, **input_fields(source)}, _options(model))


def edit(caller: Caller) -> Draft:
    """POST /v1/videos/edits."""
    model, given = _read(caller, EditVideo, "video")
    fields = request_fields(model)
    source = _source(caller, given)
    if isinstance(source, Job):
        return Draft(edit_request(source, fields), _options(model, source, Relation.EDIT))
    return Draft(edit_request(None, {**fields, **input_fields(source)}), _options(model))


def plan_only(caller: Caller) -> dict[str, Any]:
    """The request that POST /v1/videos/plan plans; an upload goes with others that no job took."""
    model, given = _read(caller, CreateVideo, "input_reference")
    return _created(caller, model, given)


def change(service: Service, who: Principal, video_id: str, body: Body) -> Job:
    """PATCH /v1/videos/{id}."""
    job = find_video(service, who, video_id)
    if body.files:
        raise ApiError(400, "A file cannot be changed; make a new video.", code="unknown_field")
    model = read_fields(ChangeVideo, body.fields)
    given = model.model_dump(exclude_unset=True)
    changes = {n: v for n, v in given.items() if n in JOB_CHANGES and v is not None}
    nulls = {n: None for n, v in given.items() if v is None and n in REQUEST_FIELDS}
    changed = service.client.change(job, changes, {**nulls, **request_fields(model)})
    service.submitted()
    return changed


def request_fields(model: BaseModel) -> dict[str, Any]:
    """The model's fields that are set, in the JSON form of ``VideoRequest``.

    Raises:
        RequestError: width without height, or both besides another size.
    """
    given = model.model_dump(exclude_unset=True, exclude_none=True)
    fields = {name: value for name, value in given.items() if name in REQUEST_FIELDS}
    fields.pop("video", None)  # a reference, which is resolved apart
    if "size" in fields:
        fields["size"] = format_size(parse_size(fields["size"]))
    sides = {name: given[name] for name in ("width", "height") if name in given}
    if not sides:
        return fields
    if len(sides) == 1:
        [(name, value)] = sides.items()
        raise RequestError(name, value, "comes alone", "give width and height, or size")
    size = f"{sides['width']}x{sides['height']}"
    if fields.setdefault("size", size) != size:
        raise RequestError("size", fields["size"], f"width and height say {size}", "give one")
    return fields


def _created(caller: Caller, model: CreateVideo, given: Given | None) -> dict[str, Any]:
    fields = request_fields(model)
    if given is None:
        return fields
    kind: Kind | None = "video" if "strength" in fields else None
    found = resolve(caller.service, caller.who, "input_reference", given, kind)
    if isinstance(found, Job):
        check_stored(found)
        return {**fields, "video": f"{JOB}{found.id}"}
    return {**fields, **input_fields(found)}


def _read(caller: Caller, model: type[M], field: str | None) -> tuple[M, Given | None]:
    """The body as ``model``, and the reference or file in ``field``.

    Raises:
        ApiError: 400, also for a file in any other field.
    """
    body = caller.body
    stray = next((name for name in body.files if name != field), None)
    if stray is not None:
        # said as for any unknown field, with the nearest ones
        read_fields(model, {**body.fields, stray[:80]: {}})
        raise ApiError(400, f"{stray[:80]}: takes no file", code="invalid_value", param=stray[:80])
    read = read_fields(model, body.fields)
    given: Given | None = getattr(read, field) if field is not None else None
    upload = body.files.get(field or "")
    if upload is not None and given is not None:
        message = f"{field}: a file and a reference were sent, give one"
        raise ApiError(400, message, code="invalid_value", param=field)
    return read, given if upload is None else upload


def _source(caller: Caller, given: Given | None) -> Job | Artifact:
    """The video that an extension or edit starts from."""
    if given is None:
        message = "video: is missing: give a file, or the id of a video made here"
        raise ApiError(400, message, code="missing_field", param="video")
    return resolve(caller.service, caller.who, "video", given, "video")


def _options(
    model: JobFields, source: Job | None = None, relation: Relation | None = None
) -> JobOptions:
    return JobOptions(
        priority=DEFAULT_PRIORITY if model.priority is None else model.priority,
        tags=tuple(dict.fromkeys(model.tags or ())),
        parent_id=source.id if source is not None else None,
        relation=relation,
    )
