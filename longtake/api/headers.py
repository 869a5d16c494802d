"""Header values that are the same for many answers, and values of requests made safe."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from urllib.parse import quote

Raw = list[tuple[bytes, bytes]]

# an answer of the API is data: nothing in it may run, load or be framed
API_HEADERS: Mapping[bytes, bytes] = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    b"cross-origin-resource-policy": b"same-origin",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'; "
    b"form-action 'none'",
    b"cache-control": b"no-store",
}
_REQUEST_ID = re.compile(rb"^[A-Za-z0-9._-]{1,64}$")
_FILE_NAME = re.compile(r"[^A-Za-z0-9._-]+")
MAX_FILE_NAME = 80


def request_id(given: bytes | None) -> str:
    """The client's ``x-request-id`` where it is harmless, else a new one."""
    if given is not None and _REQUEST_ID.match(given):
        return given.decode("ascii")
    return f"req_{secrets.token_hex(12)}"


def find(raw: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first header of that (lower case) name."""
    return next((value for key, value in raw if key == name), None)


def with_defaults(raw: Raw, extra: Mapping[bytes, bytes]) -> Raw:
    """``raw`` with what ``API_HEADERS`` and ``extra`` hold; a route's own values win."""
    have = {key.lower() for key, _ in raw}
    added = {**API_HEADERS, **extra}
    return [*raw, *((key, value) for key, value in added.items() if key not in have)]


def disposition(kind: str, name: str) -> str:
    """``Content-Disposition`` with a file name that no system misreads."""
    safe = _FILE_NAME.sub("-", name).strip("-.")[:MAX_FILE_NAME] or "video"
    return f'{kind}; filename="{quote(safe)}"'
