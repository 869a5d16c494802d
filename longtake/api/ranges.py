"""A stored file as an answer: ranges, conditions and HEAD, wherever the file lies.

RFC 9110: an unreadable Range is ignored, an unsatisfiable one is a 416, If-Range needs the very
same ETag (or date), If-None-Match makes a 304, and without it If-Modified-Since. If-Match, and
without it If-Unmodified-Since, make a 412.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from email.utils import formatdate, parsedate_to_datetime
from typing import IO

from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longtake.api.errors import ApiError, ProblemResponse

BLOCK_BYTES = 256 * 1024
MAX_RANGES = 16
_RANGE = re.compile(r"^(\d{1,40})-(\d{0,40})$|^-(\d{1,40})$", re.ASCII)
Span = tuple[int, int]  # first byte, and the one after the last


class FileAnswer(Response):
    """Answers a GET or HEAD with a file of ``size`` bytes that ``opened`` gives.

    The file is open already, so that one that is gone is known before the status is sent.
    """

    def __init__(
        self,
        opened: IO[bytes],
        size: int,
        *,
        etag: str,
        modified_at: float,
        content_type: str,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._file = opened
        self._size = size
        self._type = content_type
        self._etag = f'"{etag}"'
        self._modified_at = int(modified_at)  # headers tell whole seconds
        self._modified = formatdate(self._modified_at, usegmt=True)
        self._common = {
            "etag": self._etag,
            "last-modified": self._modified,
            "accept-ranges": "bytes",
            **headers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what the request's headers ask for."""
        asked = Headers(scope=scope)
        try:
            if self._another(asked.get("if-match"), asked.get("if-unmodified-since")):
                error = ApiError(412, "The file is another one by now.")
                await ProblemResponse(error)(scope, receive, send)
                return
            if self._unchanged(asked.get("if-none-match"), asked.get("if-modified-since")):
                await Response(status_code=304, headers=self._common)(scope, receive, send)
                return
            spans = self._spans(asked.get("range"), asked.get("if-range"))
            if spans == []:
                headers = {"content-range": f"bytes */{self._size}"}
                error = ApiError(416, "The file has no such range.", headers=headers)
                await ProblemResponse(error)(scope, receive, send)
                return
            await self._send_spans(spans, scope["method"] == "HEAD", send)
        except OSError as error:
            raise ClientDisconnect from error
        finally:
            await run_in_threadpool(self._file.close)

    def _another(self, header: str | None, since: str | None) -> bool:
        if header is None:
            known = _time_of(since)
            return known is not None and self._modified_at > known
        # weak tags never match here, as of RFC 9110, 13.1.1
        tags = [tag.strip() for tag in header.split(",")]
        return not ("*" in tags or self._etag in tags)

    def _unchanged(self, header: str | None, since: str | None) -> bool:
        if header is None:
            known = _time_of(since)
            return known is not None and self._modified_at <= known
        tags = [tag.strip().removeprefix("W/") for tag in header.split(",")]
        return "*" in tags or self._etag in tags

    def _spans(self, header: str | None, condition: str | None) -> list[Span] | None:
        """Ranges to send: None for the whole file, empty where none can be satisfied."""
        if header is None or (condition is not None and not self._same(condition)):
            return None
        unit, _, text = header.partition("=")
        if unit.strip().lower() != "bytes":
            return None
        return read_ranges(text, self._size)

    def _same(self, condition: str) -> bool:
        return condition.strip() in (self._etag, self._modified)

    async def _send_spans(self, spans: list[Span] | None, head: bool, send: Send) -> None:
        headers = dict(self._common)
        parts: list[tuple[bytes, Span]]
        tail = b""
        if spans is None:
            parts = [(b"", (0, self._size))]
        elif len(spans) == 1:
            start, end = spans[0]
            headers["content-range"] = f"bytes {start}-{end - 1}/{self._size}"
            parts = [(b"", spans[0])]
        else:
            boundary = secrets.token_hex(16)
            parts = [(self._part_head(boundary, span), span) for span in spans]
            tail = f"\r\n--{boundary}--\r\n".encode()
            headers["content-type"] = f"multipart/byteranges; boundary={boundary}"
        headers.setdefault("content-type", self._type)
        length = sum(len(h) + end - start for h, (start, end) in parts) + len(tail)
        headers["content-length"] = str(length)
        raw = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers.items()]
        status = 200 if spans is None else 206
        await send({"type": "http.response.start", "status": status, "headers": raw})
        if not head:
            async for block in self._blocks(parts):
                await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b"" if head else tail})

    def _part_head(self, boundary: str, span: Span) -> bytes:
        place = f"bytes {span[0]}-{span[1] - 1}/{self._size}"
        text = f"\r\n--{boundary}\r\nContent-Type: {self._type}\r\nContent-Range: {place}\r\n\r\n"
        return text.encode("latin-1")

    async def _blocks(self, parts: Sequence[tuple[bytes, Span]]) -> AsyncIterator[bytes]:
        for head, (start, end) in parts:
            if head:
                yield head
            place = start
            while place < end:
                block = await run_in_threadpool(
                    _read_at, self._file, place, min(BLOCK_BYTES, end - place)
                )
                if not block:
                    # shorter than it was said to be: a length that is missed ends the connection
                    raise RuntimeError("a stored file is shorter than its record says")
                place += len(block)
                yield block


def read_ranges(text: str, size: int) -> list[Span] | None:
    """``"0-9, 20-, -5"`` as spans of a file of ``size``; None to ignore it, [] for none to be had.

    So many ranges, or so much overlap, that sending the file once is less are ignored too.
    """
    spans: list[Span] = []
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    if not wanted or len(wanted) > MAX_RANGES:
        return None
    for part in wanted:
        match = _RANGE.match(part)
        if match is None:
            return None
        if match[3] is not None:
            start, end = max(0, size - int(match[3])), size
        else:
            start = int(match[1])
            end = min(size, int(match[2]) + 1) if match[2] else size
            if match[2] and int(match[2]) < start:
                return None
        if start < end:
            spans.append((start, end))
    if len(spans) > 1 and sum(end - start for start, end in spans) > size:
        return None
    return spans


def _time_of(date: str | None) -> float | None:
    """Seconds since 1970 of an HTTP date; None for none, and for one that is to be ignored."""
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None


def _read_at(file: IO[bytes], place: int, count: int) -> bytes:
    file.seek(place)
    return file.read(count)
