"""The event log: what happened, in commit order; its ``seq`` is the id of server-sent events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, select

from longtake.queue.database import Database, Turn, again
from longtake.queue.records import Event
from longtake.queue.rows import columns_of, read_row
from longtake.queue.tables import events

PROGRESS, PREVIEW = "video.progress", "video.preview"
# of no use once the job is finished
FLEETING = (PROGRESS, PREVIEW)


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event before it has a number."""

    job_id: str
    owner: str
    type: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Events:
    """Append and read. Appending comes last in a transaction, see ``database.Turn``."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._insert = insert(events).values(created_at=db.now)
        self._read = {
            by: select(*columns_of(Event))
            .where(events.c.seq > bindparam("after"), *scope)
            .order_by(events.c.seq)
            .limit(bindparam("count"))
            for by, scope in {
                "all": (),
                "job": (events.c.job_id == bindparam("whose"),),
                "owner": (events.c.owner == bindparam("whose"),),
            }.items()
        }

    def append(
        self, conn: Connection, job_id: str, owner: str, event_type: str, data: Mapping[str, Any]
    ) -> None:
        """Add one event to the transaction; nothing but the commit may follow."""
        self.extend(conn, [NewEvent(job_id, owner, event_type, data)])

    def extend(self, conn: Connection, entries: Iterable[NewEvent]) -> None:
        """Add events in order; nothing but the commit may follow.

        On PostgreSQL numbers are given in turns that last until commit, so whoever has seen an
        event will never be shown a smaller number later.
        """
        rows = [
            {"job_id": one.job_id, "owner": one.owner, "type": one.type, "data": dict(one.data)}
            for one in entries
        ]
        if rows:
            self._db.take_turn(conn, Turn.EVENTS)
            conn.execute(self._insert, rows)

    def read(
        self,
        after_seq: int,
        *,
        job_id: str | None = None,
        owner: str | None = None,
        limit: int = 500,
    ) -> list[Event]:
        """Events after ``after_seq`` of one job, of one owner or of all, oldest first."""
        by = "job" if job_id is not None else "owner" if owner is not None else "all"
        values: dict[str, object] = {"after": after_seq, "count": limit}
        if by != "all":
            values["whose"] = job_id if job_id is not None else owner
        with self._db.read() as conn:
            rows = conn.execute(self._read[by], values).all()
        return [read_row(Event, row) for row in rows]

    def latest(self, *, job_id: str | None = None, owner: str | None = None) -> int:
        """The highest number so far; 0 for none."""
        statement = select(func.max(events.c.seq))
        if job_id is not None:
            statement = statement.where(events.c.job_id == job_id)
        elif owner is not None:
            statement = statement.where(events.c.owner == owner)
        with self._db.read() as conn:
            return conn.execute(statement).scalar() or 0

    def drop_fleeting(self, conn: Connection, job_id: str) -> None:
        """Forget the progress and preview events of a finished job."""
        conn.execute(delete(events).where(events.c.job_id == job_id, events.c.type.in_(FLEETING)))

    @again
    def prune(self, keep_s: float, limit: int = 10_000) -> int:
        """Remove up to ``limit`` events older than ``keep_s`` seconds, oldest first."""
        oldest = select(events.c.seq, events.c.created_at).order_by(events.c.seq).limit(limit)
        oldest_rows = oldest.subquery()
        with self._db.write() as conn:
            gone = conn.execute(
                delete(events).where(
                    events.c.seq.in_(
                        select(oldest_rows.c.seq).where(
                            oldest_rows.c.created_at < self._db.now - keep_s
                        )
                    )
                )
            )
        return gone.rowcount
