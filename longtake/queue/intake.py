"""Taking jobs in: quotas, idempotency keys, and everything a new job needs in one transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from sqlalchemy import Connection, Float, Row, and_, bindparam, insert, select

from longtake.errors import ConflictError, LongtakeError, NotFoundError
from longtake.queue.batches import Batches
from longtake.queue.database import Database, Turn, again
from longtake.queue.events import Events, NewEvent
from longtake.queue.gathering import Call, Gatherer
from longtake.queue.ids import new_id
from longtake.queue.ledger import Ledger
from longtake.queue.lookups import DELETED
from longtake.queue.outbox import Outbox
from longtake.queue.policy import Policy
from longtake.queue.quotas import Quotas
from longtake.queue.records import Batch, Job, JobState, NewJob, Relation
from longtake.queue.rows import columns_of, job_of
from longtake.queue.tables import idempotency, jobs, owners

# places jobs of one transaction one after the other; far above what a float loses
APART_S = 1e-6
# what a job has from its NewJob as it is, and what else there is at first
_GIVEN = tuple(one.name for one in fields(NewJob) if one.name not in ("inputs", "not_before"))
_AT_FIRST: Mapping[str, Any] = {
    **dict.fromkeys(("paused", "cancel_requested", "keep_chunks", "starred"), False),
    **dict.fromkeys(("fence", "attempt", "strikes", "chunks_done", "bytes_stored"), 0),
    **dict.fromkeys(("started_at", "completed_at", "expires_at", "trashed_at"), None),
    **dict.fromkeys(("lease_owner", "lease_until", "strike_chunk", "error"), None),
    "progress": {},
}


@dataclass(frozen=True, slots=True)
class Submission:
    """Jobs of one owner that are stored all or none, see ``Submissions.submit``."""

    owner: str
    new: Sequence[NewJob]
    limits: Mapping[str, int]
    idempotency: tuple[str, str] | None
    batch: Batch | None

    @property
    def needs_turn(self) -> bool:
        """True where another submission of the owner at the same time could break a rule."""
        return self.idempotency is not None or any(self.limits.values())


class Intake:
    """Stores submissions; those that come at the same moment share a transaction."""

    def __init__(
        self,
        db: Database,
        events: Events,
        files: Ledger,
        outbox: Outbox,
        batches: Batches,
        policy: Policy,
    ) -> None:
        self._db = db
        self._events = events
        self._files = files
        self._outbox = outbox
        self._batches = batches
        self._policy = policy
        self._known_owners: set[str] = set()
        self.take = Gatherer(self.take_group)
        # made once: what every submission runs
        made_at = db.now + bindparam("offset", type_=Float(53))
        self._insert = (
            insert(jobs)
            .values(created_at=made_at, updated_at=made_at, position=made_at)
            .returning(jobs.c.id, jobs.c.created_at, jobs.c.updated_at, jobs.c.position)
        )
        self._recall = select(
            idempotency.c.key,
            idempotency.c.fingerprint,
            idempotency.c.target,
            (idempotency.c.created_at < db.now - policy.idempotency_s).label("over"),
        ).where(
            idempotency.c.owner == bindparam("owner"),
            idempotency.c.key.in_(bindparam("keys", expanding=True)),
        )
        remember = db.insert(idempotency).values(created_at=db.now)
        self._remember = remember.on_conflict_do_update(
            index_elements=["owner", "key"],
            set_={
                name: remember.excluded[name] for name in ("fingerprint", "target", "created_at")
            },
        )

    @again
    def take_group(self, group: Sequence[Call[Submission, list[Job]]]) -> None:
        """Store what came together; each submission succeeds or is refused by itself."""
        names = {call.wanted.owner for call in group}
        with self._db.write() as conn:
            for owner in sorted({call.wanted.owner for call in group if call.wanted.needs_turn}):
                self._db.take_turn(conn, Turn.OWNER, owner)
            self._introduce(conn, names)
            accepted = self._accept(conn, group)
            made = self._insert_all(conn, [call.wanted for call in accepted])
            self._outbox.add(conn, [job.queue for jobs_of_one in made for job in jobs_of_one])
            self._events.extend(
                conn,
                [
                    NewEvent(job.id, job.owner, "video.queued")
                    for jobs_of_one in made
                    for job in jobs_of_one
                ],
            )
        for call, jobs_of_one in zip(accepted, made, strict=True):
            call.answer(jobs_of_one)
        self._known_owners |= names

    def _accept(
        self, conn: Connection, group: Sequence[Call[Submission, list[Job]]]
    ) -> list[Call[Submission, list[Job]]]:
        """The calls that are to be stored; others are answered, refused or left for the next."""
        accepted: list[Call[Submission, list[Job]]] = []
        known = self._known_keys(conn, group)
        quotas = Quotas(self._db, conn, self._files)
        taken: set[tuple[str, str]] = set()  # keys and inputs that this group has used up
        for call in group:
            wanted = call.wanted
            uses = {(wanted.owner, one) for job in wanted.new for one in job.inputs}
            uses |= (
                {(wanted.owner, f"key {wanted.idempotency[0]}")} if wanted.idempotency else set()
            )
            if uses & taken:
                continue
            try:
                stored = self._replay(conn, wanted, known)
                if stored is not None:
                    call.answer(stored)
                    continue
                for job in wanted.new:
                    _check_source(conn, job)
                    if job.inputs:
                        self._files.check_free(conn, job.inputs, job.owner)
                quotas.admit(wanted.owner, wanted.limits, len(wanted.new))
            except LongtakeError as error:
                call.refuse(error)
                continue
            taken |= uses
            accepted.append(call)
        return accepted

    def _insert_all(self, conn: Connection, accepted: Sequence[Submission]) -> list[list[Job]]:
        """Store submissions in as few statements as there are tables; the jobs of each."""
        for wanted in accepted:
            if wanted.batch is not None:
                self._batches.add(conn, wanted.batch)
        new = [job for wanted in accepted for job in wanted.new]
        made = iter(self._insert_jobs(conn, new) if new else [])
        made_of = [[next(made) for _ in wanted.new] for wanted in accepted]
        marks = [
            {
                "owner": wanted.owner,
                "key": wanted.idempotency[0],
                "fingerprint": wanted.idempotency[1],
                "target": wanted.batch.id if wanted.batch is not None else jobs_of_one[0].id,
            }
            for wanted, jobs_of_one in zip(accepted, made_of, strict=True)
            if wanted.idempotency is not None
        ]
        if marks:
            conn.execute(self._remember, marks)
        return made_of

    def _introduce(self, conn: Connection, names: set[str]) -> None:
        """Make sure that owners have a row, which claims go by; asked once a process."""
        for owner in sorted(names - self._known_owners):
            conn.execute(self._db.insert(owners).values(owner=owner).on_conflict_do_nothing())

    def _insert_jobs(self, conn: Connection, new: Sequence[NewJob]) -> list[Job]:
        rows = [self._row(job, index) for index, job in enumerate(new)]
        stored = {row.id: row for row in conn.execute(self._insert, rows)}
        made = []
        for wanted, row in zip(new, rows, strict=True):
            made.append(_new_job(wanted, row, stored[row["id"]]))
            if wanted.inputs:
                weight = self._files.adopt(conn, wanted.inputs, row["id"])
                made[-1] = replace(made[-1], bytes_stored=weight)
        return made

    def _row(self, job: NewJob, index: int) -> dict[str, Any]:
        values = {name: getattr(job, name) for name in _GIVEN}
        return {
            **values,
            "id": new_id("video"),
            "state": JobState.QUEUED.value,
            "not_before": float(job.not_before),
            "max_attempts": self._policy.max_attempts,
            "relation": job.relation.value if job.relation is not None else None,
            "tags": list(job.tags),
            "offset": index * APART_S,
        }

    def _known_keys(
        self, conn: Connection, group: Sequence[Call[Submission, list[Job]]]
    ) -> dict[tuple[str, str], Row[Any]]:
        """What is remembered of the keys in ``group``, by owner and key."""
        keys: dict[str, list[str]] = defaultdict(list)
        for call in group:
            if call.wanted.idempotency is not None:
                keys[call.wanted.owner].append(call.wanted.idempotency[0])
        return {
            (owner, row.key): row
            for owner, some in keys.items()
            for row in conn.execute(self._recall, {"owner": owner, "keys": some})
        }

    def _replay(
        self, conn: Connection, wanted: Submission, remembered: Mapping[tuple[str, str], Row[Any]]
    ) -> list[Job] | None:
        """What the key of ``wanted`` made before, None for a new key or none."""
        if wanted.idempotency is None:
            return None
        key, fingerprint = wanted.idempotency
        known = remembered.get((wanted.owner, key))
        if known is None or known.over:
            return None
        if known.fingerprint != fingerprint:
            raise ConflictError(
                "the idempotency key was used with another request", "idempotency_mismatch"
            )
        is_batch = known.target.startswith("batch_")
        made = (jobs.c.batch_id if is_batch else jobs.c.id) == known.target
        mine = jobs.c.owner == wanted.owner
        rows = conn.execute(select(*columns_of(Job)).where(made, mine).order_by(jobs.c.batch_index))
        stored = [job_of(row) for row in rows]
        if not stored and not is_batch:
            raise NotFoundError("video", known.target, DELETED)
        return stored


def _check_source(conn: Connection, job: NewJob) -> None:
    """Refuse to extend or redraw a video that was deleted meanwhile; from here on it is in use."""
    if job.parent_id is None or job.relation not in (Relation.EXTEND, Relation.EDIT):
        return
    mine = and_(jobs.c.id == job.parent_id, jobs.c.owner == job.owner)
    source = select(jobs.c.id).where(mine).with_for_update(read=True)
    if conn.execute(source).first() is None:
        raise NotFoundError("video", job.parent_id)


def _new_job(wanted: NewJob, row: Mapping[str, Any], times: Row[Any]) -> Job:
    """A new job as it is stored, without reading it back."""
    return Job(
        id=row["id"],
        state=JobState.QUEUED,
        max_attempts=row["max_attempts"],
        not_before=row["not_before"],
        created_at=times.created_at,
        updated_at=times.updated_at,
        position=times.position,
        **{name: getattr(wanted, name) for name in _GIVEN},
        **_AT_FIRST,
    )
