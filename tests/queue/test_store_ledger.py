"""Files: whose they are, what becomes garbage, what retention removes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import update
from sqlalchemy.exc import IntegrityError

from longtake.errors import NotFoundError
from longtake.queue.policy import Policy
from longtake.queue.records import Artifact, ArtifactKind, Job
from longtake.queue.store import Store
from longtake.queue.tables import artifacts, jobs

if TYPE_CHECKING:
    from tests.queue.conftest import Desk


def _upload(desk: Desk, name: str, owner: str = "local") -> Artifact:
    job = desk.submit()
    upload = desk.file(
        job,
        ArtifactKind.INPUT,
        name,
        job_id=None,
        owner=owner,
        key=f"inputs/{name}",
        details={"width": 64},
        sha256="0" * 64,
    )
    desk.store.files.add(upload)
    return upload


def _finished(desk: Desk, size: int = 10) -> Job:
    desk.submit(priority=0)
    job = desk.claim()
    video = desk.file(job, ArtifactKind.VIDEO, "video.mp4", size=size)
    return desk.store.leases.complete(job.id, job.fence, [video])


def test_a_file_is_what_was_stored(desk: Desk) -> None:
    upload = _upload(desk, "a")
    assert desk.store.files.get(upload.id) == upload == desk.store.files.get(upload.id, "local")
    for file_id, owner in ((upload.id, "other"), ("file_x", None)):
        with pytest.raises(NotFoundError):
            desk.store.files.get(file_id, owner)
    with pytest.raises(IntegrityError):
        desk.store.files.add(replace(upload, id="file_y"))


def test_uploads_nobody_takes_are_removed(desk: Desk) -> None:
    kept, orphan = _upload(desk, "kept"), _upload(desk, "orphan")
    [taker] = desk.store.submissions.submit([desk.new(inputs=(kept.id,))])
    assert desk.store.files.orphaned_inputs(3600) == []
    with desk.store.db.write() as conn:
        conn.execute(update(artifacts).values(created_at=artifacts.c.created_at - 7200))
    assert [one.id for one in desk.store.files.orphaned_inputs(3600)] == [orphan.id]
    desk.store.files.remove([orphan.id, kept.id])  # the one that is taken stays
    assert desk.garbage() == ["inputs/orphan"]
    assert [one.id for one in desk.store.files.of_job(taker.id)] == [kept.id]
    desk.store.submissions.delete(taker.id, "local")
    assert desk.garbage() == ["inputs/orphan", "inputs/kept", f"jobs/{taker.id}/"]


def test_garbage_is_forgotten_once_it_is_gone(desk: Desk) -> None:
    for name in "abc":
        desk.store.files.remove([_upload(desk, name).id])
    entries = desk.store.files.garbage(limit=2)
    assert [key for _, key in entries] == ["inputs/a", "inputs/b"]
    desk.store.files.forget_garbage([entry for entry, _ in entries])
    desk.store.files.forget_garbage([])
    assert desk.garbage() == ["inputs/c"]


def test_bytes_are_those_of_all_files(desk: Desk) -> None:
    _finished(desk, 100)
    job = _finished(desk, 30)
    _upload(desk, "loose")
    _upload(desk, "theirs", owner="other")
    assert desk.store.files.stored_bytes() == 150
    assert desk.store.files.stored_bytes("local") == 140
    desk.store.submissions.delete(job.id, None)
    assert desk.store.files.stored_bytes("local") == 110


def test_retention_by_age_spares_what_is_starred(desk: Desk) -> None:
    old, starred, new = (_finished(desk) for _ in range(3))
    waiting = desk.submit()
    desk.store.submissions.edit(starred.id, "local", {"starred": True})
    assert desk.store.files.retention(trash_s=60) == []
    with desk.store.db.write() as conn:
        conn.execute(update(jobs).where(jobs.c.id != new.id).values(expires_at=1.0))
        conn.execute(update(jobs).where(jobs.c.id == waiting.id).values(expires_at=None))
    assert desk.store.files.retention(trash_s=60) == [old.id]


def test_the_trash_is_emptied(desk: Desk) -> None:
    kept, gone = _finished(desk), _finished(desk)
    desk.store.submissions.edit(gone.id, "local", {"starred": True})
    desk.store.submissions.trash(gone.id, "local")
    running = desk.submit(priority=0)
    running = desk.claim()
    desk.store.submissions.trash(running.id, "local")
    assert desk.store.files.retention(trash_s=60) == []
    assert desk.store.files.retention(trash_s=-1) == [gone.id]
    assert desk.get(kept).trashed_at is None


def test_retention_by_bytes_takes_the_oldest(desk: Desk) -> None:
    made = [_finished(desk, 100) for _ in range(4)]
    desk.store.submissions.edit(made[0].id, "local", {"starred": True})
    retention = desk.store.files.retention
    assert retention(trash_s=60, max_bytes=0) == []
    assert retention(trash_s=60, max_bytes=400) == []
    assert retention(trash_s=60, max_bytes=399) == [made[1].id]
    assert retention(trash_s=60, max_bytes=250) == [made[1].id, made[2].id]
    assert retention(trash_s=60, max_bytes=1, limit=2) == [made[1].id, made[2].id]


def test_without_retention_nothing_expires(desk: Desk) -> None:
    keeper = type(desk)(Store(desk.store.db, Policy(retention_s=0)))
    assert _finished(keeper).expires_at is None


def test_a_job_that_is_tried_again_expires_later(desk: Desk) -> None:
    job = desk.submit()
    assert desk.store.submissions.cancel(job.id, "local").expires_at is not None
    assert desk.store.submissions.retry(job.id, "local").expires_at is None
