"""What an owner has in use, and what is left of a quota."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypedDict

from sqlalchemy import Connection, Integer, bindparam, func, select

from longtake.errors import LimitError
from longtake.queue.database import Database
from longtake.queue.endings import HOUR_S
from longtake.queue.ledger import Ledger
from longtake.queue.records import JobState
from longtake.queue.tables import attempts, jobs, usage
from longtake.settings import DAY_S, MINUTE_S

MANY = 2**31 - 1
# made once: it is part of every submission
_COUNT_QUEUED = select(func.count()).select_from(
    select(jobs.c.owner)
    .where(jobs.c.owner == bindparam("owner"), jobs.c.state == JobState.QUEUED)
    .limit(bindparam("enough", type_=Integer))
    .subquery()
)


class Usage(TypedDict):
    """What is in use: queued jobs, engine seconds of the last day, stored bytes."""

    queued: int
    running_s: float
    bytes: int


def usage_in(db: Database, conn: Connection, files: Ledger, owner: str) -> Usage:
    """Queued jobs, engine seconds of the last day and stored bytes of ``owner``."""
    return {
        "queued": _queued(conn, owner),
        "running_s": _running_s(db, conn, owner),
        "bytes": files.bytes_in(conn, owner),
    }


class Quotas:
    """Admits jobs in one transaction; what several owners use is looked up once each."""

    def __init__(self, db: Database, conn: Connection, files: Ledger) -> None:
        self._db = db
        self._conn = conn
        self._files = files
        self._found: dict[tuple[str, str, int], float] = {}
        self._admitted: Counter[str] = Counter()

    def admit(self, owner: str, limits: Mapping[str, int], new_jobs: int) -> None:
        """Count ``new_jobs`` more, unless they pass a limit; one that is 0 or absent is none.

        Raises:
            LimitError: code ``queue_full``, ``running_quota`` or ``storage_quota``.
        """
        if most := limits.get("max_queued", 0):
            queued = int(self._used("queued", owner, most)) + self._admitted[owner]
            if queued + new_jobs > most:
                raise LimitError(
                    f"{queued} videos are queued; {new_jobs} more would pass the limit of {most}",
                    "queue_full",
                    MINUTE_S,
                )
        if most := limits.get("max_running_s", 0):
            running_s = self._used("running_s", owner, most)
            if running_s >= most:
                raise LimitError(
                    f"{running_s:.0f} of {most} engine seconds in 24 hours are used",
                    "running_quota",
                    HOUR_S,
                )
        if most := limits.get("max_bytes", 0):
            stored = int(self._used("bytes", owner, most))
            if stored >= most:
                raise LimitError(
                    f"{stored} of {most} bytes of storage are used; delete videos to go on",
                    "storage_quota",
                    HOUR_S,
                )
        self._admitted[owner] += new_jobs

    def _used(self, what: str, owner: str, most: int) -> float:
        which = (what, owner, most)
        if which not in self._found:
            if what == "queued":
                self._found[which] = _queued(self._conn, owner, most)
            elif what == "running_s":
                self._found[which] = _running_s(self._db, self._conn, owner)
            else:
                self._found[which] = self._files.bytes_in(self._conn, owner)
        return self._found[which]


def _queued(conn: Connection, owner: str, enough: int = MANY) -> int:
    """Queued jobs of an owner; counted no further than ``enough``."""
    return int(conn.execute(_COUNT_QUEUED, {"owner": owner, "enough": enough}).scalar_one())


def _running_s(db: Database, conn: Connection, owner: str) -> float:
    """Engine seconds of the last 24 hours: of attempts that have ended and of those that run."""
    now = db.now
    ended = select(func.coalesce(func.sum(usage.c.running_s), 0.0)).where(
        usage.c.owner == owner, (usage.c.hour + 1) * HOUR_S > now - DAY_S
    )
    running = (
        select(func.coalesce(func.sum(now - attempts.c.started_at), 0.0))
        .select_from(jobs.join(attempts, attempts.c.job_id == jobs.c.id))
        .where(
            jobs.c.owner == owner,
            jobs.c.state == JobState.RUNNING,
            attempts.c.fence == jobs.c.fence,
        )
    )
    both = ended.scalar_subquery() + running.scalar_subquery()
    return float(conn.execute(select(both)).scalar_one())
