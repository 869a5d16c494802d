"""Events of the log as server-sent events."""

from __future__ import annotations

import json

from fastapi.sse import format_sse_event

from longtake.queue.records import Event

RETRY_MS = 2000
READY = "stream.ready"
COMMENT = b": \n\n"
# what a video's status is once an event of that type has happened
STATUS = {
    "video.queued": "queued",
    "video.requeued": "queued",
    "video.started": "in_progress",
    "video.progress": "in_progress",
    "video.chunk": "in_progress",
    "video.preview": "in_progress",
    "video.cancelling": "in_progress",
    "video.cancelled": "cancelled",
    "video.failed": "failed",
    "video.completed": "completed",
}
EVENT_TYPES = frozenset({*STATUS, "video.updated", "video.deleted"})
# after one of these a video has no further event, unless it is tried again
END_TYPES = frozenset({"video.completed", "video.failed", "video.cancelled", "video.deleted"})


def frame(event: Event) -> bytes:
    """One event on the wire: its number as id, its type, and what a card shows as JSON."""
    data = {**event.data, "id": event.job_id, "type": event.type, "seq": event.seq}
    data["created_at"] = round(event.created_at, 3)
    if event.type in STATUS:
        data["status"] = STATUS[event.type]
    text = json.dumps(data, separators=(",", ":"))
    return format_sse_event(data_str=text, event=event.type, id=str(event.seq))


def opening(seq: int | None) -> bytes:
    """The first bytes: when to come back; with ``seq`` an event that says where the stream is."""
    if seq is None:
        return format_sse_event(retry=RETRY_MS)
    data = json.dumps({"type": READY, "seq": seq}, separators=(",", ":"))
    return format_sse_event(data_str=data, event=READY, id=str(seq), retry=RETRY_MS)
