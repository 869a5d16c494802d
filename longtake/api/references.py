"""Inputs of a request: uploads, data URLs, earlier inputs and videos made here, as references.

Everything here blocks (disk, database, a decoder's process): call it in a thread.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from starlette.datastructures import UploadFile

from longtake.api.auth import Principal
from longtake.api.errors import ApiError
from longtake.api.schemas import Reference
from longtake.api.service import Service
from longtake.api.uploads import accept_reference, accept_upload
from longtake.errors import NotFoundError
from longtake.queue.admission import INPUT
from longtake.queue.records import Artifact, ArtifactKind, Job

VIDEO_ID = re.compile(r"^video_[a-z0-9]{24}$")
FILE_ID = re.compile(r"^file_[a-z0-9]{24}$")
MEMBERS = ("image_url", "video_url", "file_id", "id")
Kind = Literal["image", "video"]


def find_video(service: Service, who: Principal, video_id: str) -> Job:
    """A video of the principal's own.

    Raises:
        NotFoundError: there is none of that id.
    """
    if VIDEO_ID.match(video_id) is None:
        raise NotFoundError("video", video_id)
    return service.store.listings.get(video_id, who.id)


def resolve(
    service: Service,
    who: Principal,
    field: str,
    given: Reference | str | UploadFile,
    kind: Kind | None = None,
) -> Job | Artifact:
    """The video or the input artifact that a field means; uploads are checked and stored.

    Raises:
        ApiError: not exactly one member.
        NotFoundError: no such file or video of the principal's.
        RequestError, TooLargeError, ServiceError: as of ``uploads``.
    """
    if isinstance(given, UploadFile):
        return accept_upload(service, who.id, given.file, field, kind, given.filename)
    member, value = _one_member(field, given)
    if member == "id":
        return find_video(service, who, value)
    if member == "file_id":
        return own_copy(service, who.id, value)
    wanted: Kind | None = "video" if member == "video_url" else kind
    return accept_reference(service, who.id, value, field, wanted)


def input_fields(artifact: Artifact) -> dict[str, Any]:
    """The request's field that an input artifact fills."""
    kind = artifact.details.get("kind", "image")
    return {str(kind): f"{INPUT}{artifact.id}"}


def own_copy(service: Service, owner: str, file_id: str) -> Artifact:
    """An input that may go with a new job: itself, or a copy where another job has it.

    Raises:
        NotFoundError: there is none of that id.
    """
    if FILE_ID.match(file_id) is None:
        raise NotFoundError("file", file_id)
    artifact = service.store.files.get(file_id, owner)
    if artifact.kind is not ArtifactKind.INPUT:
        raise NotFoundError("file", file_id)
    if artifact.job_id is None:
        return artifact
    service.settings.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=service.settings.scratch) as folder:
        path = Path(folder) / "file"
        try:
            service.artifacts.fetch(artifact.key, path)
        except FileNotFoundError:
            raise NotFoundError("file", file_id) from None
        copy = service.artifacts.put_input(path, owner, dict(artifact.details))
    service.store.files.add(copy)
    return copy


def inherited(service: Service, owner: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """A request made from an older one, its inputs copied so that each job has its own."""
    copied = dict(request)
    for field in ("image", "video"):
        reference = str(request.get(field) or "")
        if reference.startswith(INPUT):
            artifact = own_copy(service, owner, reference.removeprefix(INPUT))
            copied[field] = f"{INPUT}{artifact.id}"
    return copied


def _one_member(field: str, given: Reference | str) -> tuple[str, str]:
    """Which member of a reference is set, or which one a plain text is."""
    if isinstance(given, str):
        if given.startswith("video_"):
            return "id", given
        return ("file_id" if given.startswith("file_") else "image_url"), given
    members = [(name, getattr(given, name)) for name in MEMBERS]
    found = [(name, value) for name, value in members if value is not None]
    if len(found) != 1:
        message = f"{field}: give exactly one of {', '.join(MEMBERS)}, or a file"
        raise ApiError(400, message, param=field, code="invalid_value")
    return found[0]
