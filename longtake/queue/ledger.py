"""Which files exist, whose they are, and which of them are to be removed.

A file's row and what names it change in one transaction; the row that forgets a file puts its key
into ``garbage``, which is emptied later. A garbage key that ends in "/" is a whole folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    and_,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    true,
    update,
)

from longtake.errors import NotFoundError
from longtake.queue.database import Database, again
from longtake.queue.records import TERMINAL, Artifact, ArtifactKind, ChunkRecord
from longtake.queue.rows import artifact_of, columns_of
from longtake.queue.tables import artifacts, attempts, chunks, garbage, jobs

# of these a job has one; a newer one takes the older one's place
SINGLE = frozenset(
    {
        ArtifactKind.VIDEO,
        ArtifactKind.THUMBNAIL,
        ArtifactKind.SPRITESHEET,
        ArtifactKind.RECEIPT,
        ArtifactKind.PREVIEW,
        ArtifactKind.INIT,
        ArtifactKind.ROLLOUT,
    }
)


# made once: what every chunk runs
_OF_JOB: BindParameter[str] = bindparam("of_job")
_WEIGHT = select(func.coalesce(func.sum(artifacts.c.size), 0)).where(artifacts.c.job_id == _OF_JOB)
_WEIGH = (
    update(jobs)
    .where(jobs.c.id == _OF_JOB)
    .values(bytes_stored=_WEIGHT.scalar_subquery())
    .returning(jobs.c.bytes_stored)
)
_DECODED = select(func.count()).where(chunks.c.job_id == _OF_JOB, chunks.c.segment_key.is_not(None))
_COUNT_CHUNKS = (
    update(jobs).where(jobs.c.id == _OF_JOB).values(chunks_done=_DECODED.scalar_subquery())
)
_KEYS_BEFORE = select(chunks.c.latents_key, chunks.c.segment_key).where(
    chunks.c.job_id == _OF_JOB, chunks.c.index == bindparam("at")
)
_REPLACE = (
    delete(artifacts)
    .where(
        artifacts.c.job_id == _OF_JOB,
        or_(
            artifacts.c.kind.in_(bindparam("kinds", expanding=True)),
            artifacts.c.key.in_(bindparam("keys", expanding=True)),
        ),
    )
    .returning(artifacts.c.key)
)


class Ledger:
    """The artifacts' rows and the garbage list."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._insert_garbage = insert(garbage).values(created_at=db.now)
        put = db.insert(chunks)
        told = ("fence", "frames", "latents_key", "segment_key", "timings")
        self._put_chunk = put.on_conflict_do_update(
            index_elements=["job_id", "index"], set_={name: put.excluded[name] for name in told}
        )

    @again
    def add(self, artifact: Artifact) -> None:
        """Record a file that belongs to no job yet: an upload."""
        with self._db.write() as conn:
            self._insert(conn, [artifact])

    def get(self, artifact_id: str, owner: str | None = None) -> Artifact:
        """One file; of ``owner`` where one is named.

        Raises:
            NotFoundError: there is none.
        """
        whose = artifacts.c.owner == owner if owner is not None else true()
        statement = select(*columns_of(Artifact)).where(artifacts.c.id == artifact_id, whose)
        with self._db.read() as conn:
            row = conn.execute(statement).one_or_none()
        if row is None:
            raise NotFoundError("file", artifact_id)
        return artifact_of(row)

    def of_job(self, job_id: str, kind: ArtifactKind | None = None) -> list[Artifact]:
        """The files of a job, oldest first."""
        which = artifacts.c.kind == kind if kind is not None else true()
        statement = (
            select(*columns_of(Artifact))
            .where(artifacts.c.job_id == job_id, which)
            .order_by(artifacts.c.created_at, artifacts.c.key)
        )
        with self._db.read() as conn:
            return [artifact_of(row) for row in conn.execute(statement)]

    def garbage(self, limit: int = 500) -> list[tuple[int, str]]:
        """Files to remove now: (id, key), oldest first."""
        statement = select(garbage.c.id, garbage.c.key).order_by(garbage.c.id).limit(limit)
        with self._db.read() as conn:
            return [(row.id, row.key) for row in conn.execute(statement)]

    @again
    def forget_garbage(self, ids: Sequence[int]) -> None:
        """These files are gone."""
        if ids:
            with self._db.write() as conn:
                conn.execute(delete(garbage).where(garbage.c.id.in_(ids)))

    @again
    def remove(self, ids: Sequence[str]) -> None:
        """Forget files that belong to no job, and have them removed."""
        with self._db.write() as conn:
            self.discard(conn, and_(artifacts.c.id.in_(ids), artifacts.c.job_id.is_(None)))

    def orphaned_inputs(self, older_than_s: float, limit: int = 500) -> list[Artifact]:
        """Uploads that no job took within ``older_than_s`` seconds."""
        statement = (
            select(*columns_of(Artifact))
            .where(
                artifacts.c.job_id.is_(None),
                artifacts.c.created_at < self._db.now - older_than_s,
            )
            .order_by(artifacts.c.created_at)
            .limit(limit)
        )
        with self._db.read() as conn:
            return [artifact_of(row) for row in conn.execute(statement)]

    def stored_bytes(self, owner: str | None = None) -> int:
        """Bytes of all files, or of one owner's."""
        with self._db.read() as conn:
            return self.bytes_in(conn, owner)

    def retention(self, *, trash_s: float, max_bytes: int = 0, limit: int = 100) -> list[str]:
        """Jobs to delete now: past their age, long in the trash, or the oldest over ``max_bytes``.

        Starred ones stay, unless they are in the trash.
        """
        now = self._db.now
        old = and_(jobs.c.expires_at <= now, ~jobs.c.starred)
        finished = jobs.c.state.in_(sorted(TERMINAL))
        trashed = and_(jobs.c.trashed_at <= now - trash_s, finished)
        statement = select(jobs.c.id).where(or_(old, trashed)).limit(limit)
        with self._db.read() as conn:
            due = list(conn.execute(statement).scalars())
            over = self.bytes_in(conn, None) - max_bytes if max_bytes else 0
            if over <= 0:
                return due
            oldest = (
                select(jobs.c.id, jobs.c.bytes_stored)
                .where(finished, ~jobs.c.starred, jobs.c.bytes_stored > 0)
                .order_by(jobs.c.completed_at)
                .limit(limit)
            )
            for row in conn.execute(oldest):
                if over <= 0:
                    break
                over -= row.bytes_stored
                if row.id not in due:
                    due.append(row.id)
        return due

    def bytes_in(self, conn: Connection, owner: str | None) -> int:
        """Bytes of jobs and of files without one, of ``owner`` or of everybody."""
        of_job = jobs.c.owner == owner if owner is not None else true()
        weighs = jobs.c.bytes_stored > literal_column("0")  # as ix_jobs_bytes has it
        of_file = artifacts.c.owner == owner if owner is not None else true()
        held = select(func.coalesce(func.sum(jobs.c.bytes_stored), 0)).where(of_job, weighs)
        loose = select(func.coalesce(func.sum(artifacts.c.size), 0)).where(
            artifacts.c.job_id.is_(None), of_file
        )
        return int(
            conn.execute(select(held.scalar_subquery() + loose.scalar_subquery())).scalar_one()
        )

    def check_free(
        self, conn: Connection, ids: Collection[str], owner: str, job_id: str | None = None
    ) -> None:
        """Lock uploads that are to be a job's.

        Raises:
            NotFoundError: one is not there, is another owner's or belongs to another job.
        """
        free = or_(artifacts.c.job_id.is_(None), artifacts.c.job_id == job_id)
        found = conn.execute(
            select(artifacts.c.id)
            .where(artifacts.c.id.in_(ids), artifacts.c.owner == owner, free)
            .with_for_update()
        ).scalars()
        for missing in sorted(set(ids) - set(found)):
            raise NotFoundError("file", missing)

    def adopt(self, conn: Connection, ids: Collection[str], job_id: str) -> int:
        """Give uploads that are free to a job; returns its bytes with them."""
        conn.execute(update(artifacts).where(artifacts.c.id.in_(ids)).values(job_id=job_id))
        return self.weigh(conn, job_id)

    def attach(
        self,
        conn: Connection,
        job_id: str,
        new: Sequence[Artifact],
        superseded_keys: Iterable[str] = (),
    ) -> None:
        """Add a job's files; what they take the place of becomes garbage."""
        keys = [one.key for one in new]
        which = {
            "of_job": job_id,
            "kinds": sorted({one.kind for one in new} & SINGLE),
            "keys": [*keys, *superseded_keys],
        }
        gone = conn.execute(_REPLACE, which).scalars()
        self._throw_away(conn, [key for key in gone if key not in keys])
        self._insert(conn, new)
        self.weigh(conn, job_id)

    def put_chunk(
        self, conn: Connection, job_id: str, chunk: ChunkRecord, new: Sequence[Artifact]
    ) -> None:
        """Store what is new of a chunk: its latents, its segment or both."""
        place = {"of_job": job_id, "at": chunk.index}
        before = conn.execute(_KEYS_BEFORE, place).one_or_none()
        latents, segment = chunk.latents_key, chunk.segment_key
        superseded: list[str] = []
        if before is not None:
            latents, segment = latents or before.latents_key, segment or before.segment_key
            superseded = [key for key in before if key and key not in (latents, segment)]
        values = {
            "job_id": job_id,
            "index": chunk.index,
            "fence": chunk.fence,
            "frames": chunk.frames,
            "latents_key": latents,
            "segment_key": segment,
            "timings": dict(chunk.timings),
        }
        conn.execute(self._put_chunk, values)
        self.attach(conn, job_id, new, superseded)
        conn.execute(_COUNT_CHUNKS, {"of_job": job_id})

    def discard(self, conn: Connection, which: ColumnElement[bool]) -> None:
        """Forget files; their keys become garbage."""
        gone = conn.execute(delete(artifacts).where(which).returning(artifacts.c.key)).scalars()
        self._throw_away(conn, list(gone))

    def weigh(self, conn: Connection, job_id: str) -> int:
        """Bring ``bytes_stored`` of a job up to date, and return it."""
        return int(conn.execute(_WEIGH, {"of_job": job_id}).scalar_one())

    def drop_chunks(self, conn: Connection, job_id: str) -> None:
        """Forget everything that attempts made; inputs stay."""
        conn.execute(delete(chunks).where(chunks.c.job_id == job_id))
        made = and_(artifacts.c.job_id == job_id, artifacts.c.kind != ArtifactKind.INPUT)
        self.discard(conn, made)
        conn.execute(update(jobs).where(jobs.c.id == job_id).values(chunks_done=0, strikes=0))
        self.weigh(conn, job_id)
        self.sweep(conn, job_id)

    def sweep(self, conn: Connection, job_id: str) -> None:
        """Have the folders of attempts removed that hold nothing of use."""
        used = select(artifacts.c.fence).where(
            artifacts.c.job_id == job_id, artifacts.c.kind != ArtifactKind.INPUT
        )
        empty = conn.execute(
            select(attempts.c.fence).where(
                attempts.c.job_id == job_id, attempts.c.fence.not_in(used)
            )
        ).scalars()
        self._throw_away(conn, [f"jobs/{job_id}/{fence}/" for fence in empty])

    def drop_job(self, conn: Connection, job_id: str) -> None:
        """Forget all files of a job that goes."""
        self.discard(conn, artifacts.c.job_id == job_id)
        self._throw_away(conn, [f"jobs/{job_id}/"])

    def _insert(self, conn: Connection, new: Sequence[Artifact]) -> None:
        if new:
            conn.execute(insert(artifacts), [asdict(one) for one in new])

    def _throw_away(self, conn: Connection, keys: Sequence[str]) -> None:
        if keys:
            conn.execute(self._insert_garbage, [{"key": key} for key in keys])
