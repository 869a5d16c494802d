"""What a worker writes while it holds a job: its lease, progress, pictures and chunks.

Every write names the fence that the job was claimed under, see ``leases.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Float, Row, bindparam, select

from longtake.errors import LeaseLostError
from longtake.queue.database import Database, again
from longtake.queue.events import PREVIEW, PROGRESS, Events, NewEvent
from longtake.queue.ledger import Ledger
from longtake.queue.records import Artifact, ArtifactKind, ChunkRecord, JobState
from longtake.queue.tables import jobs
from longtake.queue.transitions import transition

# what an attempt is told of its job while it goes on
_TOLD = (jobs.c.owner, jobs.c.cancel_requested, jobs.c.keep_chunks)


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a worker learns when it renews: whether to stop, and what to keep then."""

    cancel_requested: bool
    keep_chunks: bool


class Held:
    """The worker's side of the store between the claim of a job and its end."""

    def __init__(self, db: Database, events: Events, files: Ledger) -> None:
        self._db = db
        self._events = events
        self._files = files
        # made once: what every attempt runs again and again
        until = db.now + bindparam("lease_s", type_=Float(53))
        self._renew = _held_write(db, {"lease_until": until})
        self._write_held = _held_write(db, {})
        self._look = select(*_TOLD).where(
            jobs.c.id == bindparam("held_id"),
            jobs.c.fence == bindparam("held_fence"),
            jobs.c.state == JobState.RUNNING,
        )

    @again
    def renew(
        self,
        job_id: str,
        fence: int,
        lease_s: float,
        progress: Mapping[str, Any] | None = None,
        picture: Sequence[Artifact] = (),
    ) -> Renewal:
        """Keep the job for ``lease_s`` seconds more; with ``progress``, a ``picture`` also tell.

        Raises:
            LeaseLostError: the job is not this attempt's any more.
        """
        values: dict[str, object] = {"lease_s": lease_s}
        told = []
        with self._db.write() as conn:
            if progress is not None:
                values["progress"] = dict(progress)
            held = self._write(conn, job_id, fence, values, self._renew)
            if progress is not None:
                told.append(_told_progress(job_id, held.owner, progress))
            if picture:
                self._files.attach(conn, job_id, picture)
                told.append(NewEvent(job_id, held.owner, PREVIEW))
            self._events.extend(conn, told)
        return Renewal(held.cancel_requested, held.keep_chunks)

    def look(self, job_id: str, fence: int) -> Renewal:
        """What ``renew`` would say, without writing.

        Raises:
            LeaseLostError: the job is not this attempt's any more.
        """
        with self._db.read() as conn:
            held = {"held_id": job_id, "held_fence": fence}
            row = conn.execute(self._look, held).one_or_none()
        if row is None:
            raise lost(job_id, fence)
        return Renewal(row.cancel_requested, row.keep_chunks)

    @again
    def record_latents(
        self, job_id: str, fence: int, chunk: ChunkRecord, artifacts: Sequence[Artifact]
    ) -> None:
        """Store that a chunk is denoised: its latents, and with the first the rollout.

        Raises:
            LeaseLostError: the job is not this attempt's any more.
        """
        with self._db.write() as conn:
            self._write(conn, job_id, fence, {})
            self._files.put_chunk(conn, job_id, chunk, artifacts)

    @again
    def record_chunk(
        self,
        job_id: str,
        fence: int,
        chunk: ChunkRecord,
        artifacts: Sequence[Artifact],
        progress: Mapping[str, Any] | None = None,
    ) -> None:
        """Store that a chunk is decoded, and tell; progress, so deaths before it count no more.

        Raises:
            LeaseLostError: the job is not this attempt's any more.
        """
        values: dict[str, object] = {"strikes": 0, "strike_chunk": None}
        if progress is not None:
            values["progress"] = dict(progress)
        with self._db.write() as conn:
            owner = self._write(conn, job_id, fence, values).owner
            self._files.put_chunk(conn, job_id, chunk, artifacts)
            segment = next((one.id for one in artifacts if one.kind == ArtifactKind.SEGMENT), None)
            data: dict[str, Any] = {"chunk": chunk.index, "chunks": (progress or {}).get("chunks")}
            data |= {"frames": chunk.frames, "segment": segment}
            entries = []
            if progress is not None:
                entries.append(_told_progress(job_id, owner, progress))
            entries.append(NewEvent(job_id, owner, "video.chunk", data))
            if any(one.kind == ArtifactKind.PREVIEW for one in artifacts):
                entries.append(NewEvent(job_id, owner, PREVIEW))
            self._events.extend(conn, entries)

    def _write(
        self,
        conn: Connection,
        job_id: str,
        fence: int,
        values: Mapping[str, object],
        statement: Any = None,
    ) -> Row[Any]:
        """The fenced UPDATE of a running job that stays running; what is ``_TOLD`` of it."""
        held = {"held_id": job_id, "held_fence": fence, **values}
        write = self._write_held if statement is None else statement
        row = conn.execute(write, held).one_or_none()
        if row is None:
            raise lost(job_id, fence)
        return row


def _held_write(db: Database, values: Mapping[str, object]) -> Any:
    """The fenced UPDATE of the running job ``held_id`` under ``held_fence``."""
    return transition(
        db,
        [JobState.RUNNING],
        JobState.RUNNING,
        jobs.c.id == bindparam("held_id"),
        jobs.c.fence == bindparam("held_fence"),
        values=values,
        returning=_TOLD,
    )


def _told_progress(job_id: str, owner: str, progress: Mapping[str, Any]) -> NewEvent:
    return NewEvent(job_id, owner, PROGRESS, {"x_progress": dict(progress)})


def lost(job_id: str, fence: int) -> LeaseLostError:
    """The job is another attempt's, queued again, finished or deleted."""
    return LeaseLostError(f"job {job_id} is not held under fence {fence} any more")
