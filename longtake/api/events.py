"""Server-sent events: what happens to one video, or to all of an owner's on one connection.

The database's event log is the only source. One poller a process reads it for all streams and puts
events into each stream's bounded buffer; a stream whose client is too slow for that drops the
buffer and reads the log itself from where its client is. So nothing is lost or told twice, and a
slow client holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Annotated, Any, cast

from fastapi import APIRouter, FastAPI, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse
from sqlalchemy.exc import SQLAlchemyError

from longtake.api.auth import Owner
from longtake.api.errors import problems
from longtake.api.service import ServiceDep
from longtake.api.sse import COMMENT, END_TYPES, EVENT_TYPES, frame, opening
from longtake.errors import LimitError, LongtakeError, NotFoundError, RequestError, ServiceError
from longtake.queue.records import Event
from longtake.queue.store import Store

LOG = logging.getLogger("longtake.api")
POLL_S = 0.15
HEARTBEAT_S = 15.0
ERROR_PAUSE_S = 1.0
PAGE = 200
BUFFER = 256
MAX_STREAMS, MAX_OWNER_STREAMS = 1000, 64
MAX_IDS = 500
MAX_SEQ = 2**63 - 1

router = APIRouter(tags=["events"])


@dataclass(eq=False, slots=True)
class Stream:
    """One client. ``sent`` is the last event it was given; ``behind`` that it reads the log.

    ``refused`` ends it: its key was revoked.
    """

    owner: str
    sent: int
    job_id: str | None = None
    types: frozenset[str] = frozenset()
    ids: frozenset[str] = frozenset()
    behind: bool = True
    refused: bool = False
    buffer: deque[Event] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def wants(self, event: Event) -> bool:
        """Whether the client asked for events such as this one."""
        if event.owner != self.owner or (self.types and event.type not in self.types):
            return False
        if self.job_id is not None:
            return event.job_id == self.job_id
        return not self.ids or event.job_id in self.ids

    def offer(self, event: Event) -> None:
        """Buffer an event, or fall behind."""
        if self.behind:
            return
        if len(self.buffer) >= BUFFER:
            self.behind = True
            self.buffer.clear()
        else:
            self.buffer.append(event)
        self.wake.set()

    def take(self) -> list[Event]:
        """The buffered events that were not sent yet."""
        fresh = [event for event in self.buffer if event.seq > self.sent]
        self.buffer.clear()
        return fresh


class Hub:
    """All streams of one process and the one poller that feeds them; lives in one event loop."""

    def __init__(self, store: Store, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.streams: set[Stream] = set()
        self.closing = False
        self._store = store
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._starting = asyncio.Lock()
        self._nudge = asyncio.Event()
        self._cursor = 0
        self._keys_at = 0.0
        self._poller: asyncio.Task[None] | None = None

    def open(self, stream: Stream) -> AsyncGenerator[bytes]:
        """The frames of ``stream``, until it ends or the process does.

        Raises:
            LimitError, ServiceError: too many streams are open.
        """
        if self.closing or len(self.streams) >= MAX_STREAMS:
            raise ServiceError("No further stream can be opened just now.", 5)
        if sum(one.owner == stream.owner for one in self.streams) >= MAX_OWNER_STREAMS:
            message = f"{MAX_OWNER_STREAMS} streams are open; one of /v1/events serves all videos."
            raise LimitError(message, "too_many_streams", 5)
        return self._frames(stream)

    def serves(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this hub lives in ``loop``."""
        return self._loop is loop

    def nudge(self) -> None:
        """Something was written: look at once. Callable from any thread."""
        self._later(self._nudge.set)

    def close(self) -> None:
        """End all streams soon. Callable from any thread and from signal handlers."""
        self._later(self._close)

    def _later(self, call: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all streams with it
            self._loop.call_soon_threadsafe(call)

    def _close(self) -> None:
        self.closing = True
        self._nudge.set()
        for stream in self.streams:
            stream.wake.set()

    async def _poll(self) -> None:
        """Read the log while anybody listens."""
        while self.streams and not self.closing:
            try:
                page = await run_in_threadpool(self._store.events.read, self._cursor, limit=PAGE)
                if self._loop.time() - self._keys_at >= self._heartbeat_s:
                    await self._refuse_revoked()
            except (SQLAlchemyError, LongtakeError) as error:
                LOG.warning("the event log cannot be read just now: %s", type(error).__name__)
                await asyncio.sleep(ERROR_PAUSE_S)
                continue
            for event in page:
                self._cursor = event.seq
                for stream in self.streams:
                    if stream.wants(event):
                        stream.offer(event)
            if len(page) < PAGE:
                self._nudge.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._nudge.wait(), POLL_S)

    async def _refuse_revoked(self) -> None:
        """End the streams of keys that were revoked since they were opened."""
        self._keys_at = self._loop.time()
        keys = await run_in_threadpool(self._store.keys.list)
        revoked = {key.id for key in keys if key.revoked_at is not None}
        for stream in self.streams:
            if stream.owner in revoked:
                stream.refused = True
                stream.wake.set()

    async def _start(self) -> None:
        """See that the log is read from now on, for streams that are registered by now."""
        async with self._starting:
            if self._poller is None or self._poller.done():
                self._cursor = await run_in_threadpool(self._store.events.latest)
                self._poller = asyncio.create_task(self._poll(), name="events")

    async def _frames(self, stream: Stream) -> AsyncGenerator[bytes]:
        # Registered here and not before: a response that never starts ends no generator.
        self.streams.add(stream)
        try:
            await self._start()
            yield opening(None if stream.job_id else stream.sent)
            while not self.closing and not stream.refused:
                if stream.behind:
                    ended = await self._ended(stream)
                    async for data in self._catch_up(stream):
                        yield data
                    if ended:
                        return
                elif stream.buffer:
                    events = stream.take()
                    if events:
                        yield self._send(stream, events)
                    if stream.job_id and any(event.type in END_TYPES for event in events):
                        # the log and the job's row say whether that was the end or it goes on
                        stream.behind = True
                else:
                    stream.wake.clear()
                    try:
                        await asyncio.wait_for(stream.wake.wait(), self._heartbeat_s)
                    except TimeoutError:
                        yield COMMENT
        finally:
            self.streams.discard(stream)

    async def _catch_up(self, stream: Stream) -> AsyncGenerator[bytes]:
        """What the log has and the client has not; from here on the buffer is filled."""
        stream.behind = False
        stream.take()
        while True:
            page = await run_in_threadpool(
                self._store.events.read,
                stream.sent,
                job_id=stream.job_id,
                owner=stream.owner,
                limit=PAGE,
            )
            wanted = [event for event in page if stream.wants(event)]
            if wanted:
                yield self._send(stream, wanted)
            if page:
                stream.sent = page[-1].seq
            if len(page) < PAGE:
                return

    async def _ended(self, stream: Stream) -> bool:
        """Whether the job will have no further events; asked before the log is read."""
        if stream.job_id is None:
            return False
        try:
            get = self._store.listings.get
            return (await run_in_threadpool(get, stream.job_id, stream.owner)).finished
        except NotFoundError:
            return True

    def _send(self, stream: Stream, events: Iterable[Event]) -> bytes:
        data = b"".join(frame(event) for event in events)
        stream.sent = max(event.seq for event in events)
        return data


def hub_of(app: FastAPI) -> Hub:
    """The application's hub, made with its first stream; call it in the event loop."""
    hub = getattr(app.state, "events", None)
    if hub is None or not hub.serves(asyncio.get_running_loop()):
        hub = app.state.events = Hub(app.state.service.store)
        _close_on_signals(hub)
    return cast(Hub, hub)


def close_streams(app: FastAPI) -> None:
    """End all streams of ``app``, so that a server which waits for them can stop."""
    hub = getattr(app.state, "events", None)
    if hub is not None:
        hub.close()


def _close_on_signals(hub: Hub) -> None:
    """End the streams when the server is told to stop: it would wait for them first."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)
        if not callable(before):
            continue

        def handle(got: int, where: FrameType | None, before: Any = before) -> None:
            hub.close()
            before(got, where)

        signal.signal(number, handle)


_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "events; each has an id, a type and JSON data with the video's id",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    **problems(400, 401, 404, 429, 503),
}
LastEventId = Annotated[
    str | None, Header(alias="last-event-id", description="go on after this event")
]
LastEventParam = Annotated[
    str | None, Query(alias="last_event_id", description="the same, for a first request")
]


@router.get(
    "/v1/videos/{video_id}/events",
    summary="Follow one video",
    response_class=Response,  # declared as what it is, FastAPI would want a generator here
    responses={**_STREAM, 204: {"description": "the video is finished and all was told"}},
)
async def follow_video(
    video_id: str,
    request: Request,
    service: ServiceDep,
    owner: Owner,
    last_event_id: LastEventId = None,
    last_event_param: LastEventParam = None,
) -> Response:
    """What happened and happens to a video, from its beginning; ends after its last event.

    204 answers a client that comes back after the end, so that it stops.
    """
    store = service.store
    job = await run_in_threadpool(store.listings.get, video_id, owner.id)
    given = _seq(last_event_id, last_event_param)
    sent = given or 0
    if given is not None and given > await run_in_threadpool(store.events.latest):
        sent = 0  # of another database
    elif given is not None and job.finished:
        rest = await run_in_threadpool(store.events.read, sent, job_id=video_id, limit=1)
        if not rest:
            return Response(status_code=204)
    return await _stream(request, Stream(owner.id, sent, job_id=video_id))


@router.get(
    "/v1/events",
    summary="Follow all videos",
    response_class=Response,
    responses=_STREAM,
)
async def follow_all(
    request: Request,
    service: ServiceDep,
    owner: Owner,
    types: Annotated[str | None, Query(description="event types, with commas between")] = None,
    ids: Annotated[str | None, Query(description="video ids, with commas between")] = None,
    last_event_id: LastEventId = None,
    last_event_param: LastEventParam = None,
) -> Response:
    """What happens to all videos of the caller from now on, or from after ``Last-Event-ID``.

    The first event is ``stream.ready``: what is read after it is at least as new as the stream.
    """
    chosen = _listed(types, "types", len(EVENT_TYPES))
    for name in chosen - EVENT_TYPES:
        raise RequestError("types", name, "no such event type", ", ".join(sorted(EVENT_TYPES)))
    given = _seq(last_event_id, last_event_param)
    latest = await run_in_threadpool(service.store.events.latest)
    sent = latest if given is None or given > latest else given
    wanted = _listed(ids, "ids", MAX_IDS)
    return await _stream(request, Stream(owner.id, sent, types=chosen, ids=wanted))


async def _stream(request: Request, stream: Stream) -> Response:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return EventSourceResponse(hub_of(request.app).open(stream), headers=headers)


def _seq(*given: str | None) -> int | None:
    """The first id that is given; an empty one, which browsers may send, counts as none."""
    for text in given:
        if text:
            if not (text.isascii() and text.isdecimal()) or int(text) > MAX_SEQ:
                raise RequestError("last_event_id", text, "is not the id of an event")
            return int(text)
    return None


def _listed(text: str | None, name: str, most: int) -> frozenset[str]:
    found = frozenset(part.strip() for part in (text or "").split(",") if part.strip())
    if len(found) > most:
        raise RequestError(name, len(found), "are too many", f"at most {most}")
    return found
