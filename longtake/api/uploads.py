"""Files that come with a request: bounded on the way in, checked in a limited process, stored.

``accept_upload`` and ``accept_reference`` block (disk, database, a child process), so handlers call
them in a thread.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import unquote_to_bytes

from longtake.api.service import Service
from longtake.errors import RequestError, ServiceError, TooLargeError
from longtake.queue.net import fetch, guarded_client
from longtake.queue.records import Artifact
from longtake.queue.upload_check import Kind, UploadLimits, check_upload

BLOCK_BYTES = 1 << 20
MAX_NAME_CHARACTERS = 120
FETCH_S = 60.0
FULL_RETRY_S = 60
# Decoders at a time in this process; each may use settings.upload_memory_bytes.
MAX_CHECKS = 2
_CHECKS = threading.BoundedSemaphore(MAX_CHECKS)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_DATA_URL = re.compile(r"^data:[\w.+/-]*(;[\w.+=/-]*)*,", re.ASCII)


def accept_upload(
    service: Service,
    owner: str,
    file: IO[bytes],
    field: str,
    kind: Kind | None = None,
    name: str | None = None,
) -> Artifact:
    """Store an uploaded file as an input artifact of ``owner`` (``Principal.id``).

    Args:
        service: the application's.
        owner: whose it is.
        file: what to read (``UploadFile.file``), from where it stands.
        field: name of the request field, for messages.
        kind: what it must be; None takes either. The artifact's ``details`` say what it was:
            kind, content_type, width, height, frames, fps, seconds, name.
        name: the client's file name, for people only.

    Raises:
        TooLargeError: more bytes than ``settings.max_upload_bytes`` (HTTP 413).
        RequestError: not an image or video that can be decoded within the limits.
        ServiceError: no room for it just now.
    """
    shown = clean_name(name) or "upload"
    limit = service.settings.max_upload_bytes

    def copy(target: IO[bytes]) -> str:
        _copy(file, target, field, shown, limit)
        return shown

    return _accept(service, owner, field, kind, copy)


def accept_reference(
    service: Service, owner: str, url: str, field: str, kind: Kind | None = None
) -> Artifact:
    """The same for an ``http``, ``https`` or ``data`` URL.

    Raises:
        RequestError: also where remote references are off (``allow_remote_references``), the
            address is private or the host does not answer as it should.
    """
    settings = service.settings

    def decode(target: IO[bytes]) -> str:
        target.write(_decode_data_url(url, field, settings.max_upload_bytes))
        return "data"

    def download(target: IO[bytes]) -> str:
        return asyncio.run(_download(service, url, target, field))

    if url[:5].lower() == "data:":
        return _accept(service, owner, field, kind, decode)
    if not settings.allow_remote_references:
        reason = "remote references are not fetched by this server"
        raise RequestError(field, url, reason, "upload the file, or give a data: URL")
    return _accept(service, owner, field, kind, download)


def clean_name(name: str | None) -> str:
    """A client's file name for people to read: no folders, no control characters, not long."""
    last = PurePosixPath((name or "").replace("\\", "/")).name
    return _CONTROL.sub("", last).strip(" .")[:MAX_NAME_CHARACTERS]


def _accept(
    service: Service,
    owner: str,
    field: str,
    kind: Kind | None,
    write: Callable[[IO[bytes]], str],
) -> Artifact:
    """Have ``write`` fill a file of ours and say its name, check what it is, store it."""
    if not service.has_room():
        raise ServiceError("The disk is full; nothing new is taken.", FULL_RETRY_S)
    folder = service.settings.scratch / "uploads"
    with _full_disk_said(), _scratch_file(folder) as path:
        with path.open("wb") as target:
            name = write(target)
        limits = UploadLimits.of(service.settings)
        with _one_of_few(limits.decode_s):
            checked = check_upload(path, field, name, limits, kind)
        details: dict[str, Any] = {key: v for key, v in asdict(checked).items() if v is not None}
        artifact = service.artifacts.put_input(
            path, owner, {**details, "name": name}, checked.content_type
        )
    try:
        service.store.files.add(artifact)
    except BaseException:
        service.artifacts.remove(artifact.key)
        raise
    return artifact


@contextmanager
def _scratch_file(folder: Path) -> Iterator[Path]:
    """A path for one file, gone afterwards unless it was moved away."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        yield Path(own) / "file"


@contextmanager
def _full_disk_said() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ServiceError("The disk is full; nothing new is taken.", FULL_RETRY_S) from None


@contextmanager
def _one_of_few(limit_s: float) -> Iterator[None]:
    """Wait for a decoder's place, so that many uploads do not use all memory at once."""
    if not _CHECKS.acquire(timeout=limit_s):
        raise ServiceError("Too many uploads are being checked; ask again soon.")
    try:
        yield
    finally:
        _CHECKS.release()


def _copy(source: IO[bytes], target: IO[bytes], field: str, name: str, limit: int) -> None:
    size = 0
    while block := source.read(BLOCK_BYTES):
        size += len(block)
        if size > limit:
            raise TooLargeError(field, name, f"is larger than {limit} bytes")
        target.write(block)


def _decode_data_url(url: str, field: str, limit: int) -> bytes:
    head = _DATA_URL.match(url[:256])
    if head is None:
        raise RequestError(field, url, "is not a data URL", "data:image/png;base64,...")
    rest = url[head.end() :]
    try:
        if head.group().lower().endswith(";base64,"):
            data = base64.b64decode(rest.encode("ascii"), validate=True)
        else:
            data = unquote_to_bytes(rest)
    except (binascii.Error, UnicodeEncodeError):
        raise RequestError(field, url, "is not base64 as its head says") from None
    if len(data) > limit:
        raise TooLargeError(field, url, f"is larger than {limit} bytes")
    return data


async def _download(service: Service, url: str, target: IO[bytes], field: str) -> str:
    settings = service.settings
    private = settings.allow_private_addresses
    async with guarded_client(FETCH_S, allow_private=private) as client:
        fetched = await fetch(
            client,
            url,
            target,
            field=field,
            max_bytes=settings.max_upload_bytes,
            timeout_s=FETCH_S,
            allow_private=private,
        )
    return clean_name(fetched.name) or "download"
