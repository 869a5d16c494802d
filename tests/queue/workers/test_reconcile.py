"""Mending: leases, ticks and files of what was lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from longtake.queue.processes import Process, host_name, identify
from longtake.queue.reconcile import Reconciler, reclaim_dead
from longtake.queue.records import ChunkRecord, JobState, WorkerRecord
from longtake.queue.retention import Retention

if TYPE_CHECKING:
    from tests.queue.workers.conftest import Rig


@dataclass
class Ticks:
    """A broker that takes ticks, or not."""

    up: bool = True
    published: list[str] = field(default_factory=list)

    def publish(self, queue: str, count: int = 1) -> bool:
        self.published += [queue] * count
        return self.up


def record(worker: str, process: Process, host: str | None = None) -> WorkerRecord:
    """A worker's row."""
    return WorkerRecord(
        id=worker,
        host=host or host_name(),
        pid=process.pid,
        boot_id=f"{process.pid}@{process.started_at:.2f}",
        queue="default",
        state="busy",
    )


@pytest.fixture
def dead() -> Process:
    """A process that was there and is gone."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        known = identify(child.pid)
    assert known is not None
    assert not known.alive
    return known


def reconciler(rig: Rig, ticks: Ticks) -> Reconciler:
    return Reconciler(rig.store, rig.artifacts, rig.settings, ticks)  # type: ignore[arg-type]


def test_jobs_of_a_dead_worker_are_free_at_once(rig: Rig, dead: Process) -> None:
    rig.submit()
    job = rig.claim("gone")
    rig.store.workers.beat(record("gone", dead))
    assert reclaim_dead(rig.store) == [job.id]
    assert rig.job().state is JobState.QUEUED
    assert rig.job().attempt == 1
    assert rig.store.workers.list() == []
    assert reclaim_dead(rig.store) == []


def test_a_try_that_stored_a_chunk_does_not_count(rig: Rig, dead: Process) -> None:
    rig.submit()
    job = rig.claim("gone")
    chunk = ChunkRecord(job.id, 0, job.fence, 0, None, None, {})
    rig.store.held.record_latents(job.id, job.fence, chunk, [])
    rig.store.workers.beat(record("gone", dead))
    assert reclaim_dead(rig.store) == [job.id]
    assert (rig.job().state, rig.job().attempt) == (JobState.QUEUED, 0)


def test_living_workers_keep_their_jobs(rig: Rig, dead: Process) -> None:
    myself = identify(os.getpid())
    assert myself is not None
    workers = {
        "living": record("living", myself),
        "elsewhere": record("elsewhere", dead, host="another-machine"),
    }
    for name, row in workers.items():
        rig.submit()
        rig.claim(name)
        rig.store.workers.beat(row)
    assert reclaim_dead(rig.store) == []
    assert len(rig.store.workers.list()) == 2


def test_a_reused_process_id_is_no_living_worker(rig: Rig) -> None:
    myself = identify(os.getpid())
    assert myself is not None
    rig.submit()
    job = rig.claim("gone")
    rig.store.workers.beat(record("gone", replace(myself, started_at=myself.started_at - 100)))
    assert reclaim_dead(rig.store) == [job.id]


def test_expired_leases_are_freed(rig: Rig) -> None:
    rig.submit()
    job = rig.claim("elsewhere")
    rig.store.held.renew(job.id, job.fence, -1.0)
    reconciler(rig, Ticks()).run()
    assert rig.job().state is JobState.QUEUED


def test_ticks_are_sent_again_while_there_is_work(rig: Rig) -> None:
    ticks = Ticks(up=False)
    rig.submit()
    mend = reconciler(rig, ticks)
    mend.run()
    assert len(rig.store.outbox.pending()) == 1
    ticks.up = True
    mend.run()
    assert rig.store.outbox.pending() == []
    ticks.published.clear()
    mend.run()
    assert ticks.published == ["default"]
    rig.claim()
    ticks.published.clear()
    mend.run()
    assert ticks.published == []


def test_one_part_that_fails_keeps_none_of_the_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rig.store.leases, "expire", lambda: 1 / 0)
    ticks = Ticks()
    rig.submit()
    reconciler(rig, ticks).run()
    assert ticks.published
    assert "a fault in mending" in caplog.text


def retention(rig: Rig) -> Retention:
    return Retention(rig.store, rig.artifacts, rig.settings)


def test_old_videos_go_and_starred_ones_stay(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(retention_s=1)
    jobs = [rig.submit() for _ in range(2)]
    for _ in jobs:
        rig.runner().run(rig.claim())
    rig.store.submissions.edit(jobs[1].id, "local", {"starred": True})
    time.sleep(1.0)
    retention(rig).run()
    assert [job.id for job in rig.store.listings.page(None).jobs] == [jobs[1].id]
    assert rig.files() == rig.keys(jobs[1])


def test_the_oldest_go_when_there_are_too_many_bytes(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    jobs = [rig.submit() for _ in range(3)]
    for _ in jobs:
        rig.runner().run(rig.claim())
    size = rig.job(jobs[0].id).bytes_stored
    tight = make_rig(retention_bytes=2 * size)
    retention(tight).run()
    left = {job.id for job in rig.store.listings.page(None).jobs}
    assert left == {jobs[1].id, jobs[2].id}


def test_trash_is_emptied(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(trash_s=0)
    job = rig.submit()
    rig.runner().run(rig.claim())
    rig.store.submissions.trash(job.id, "local")
    retention(rig).run()
    assert rig.store.listings.page(None).jobs == []
    assert rig.files() == []


def test_files_of_a_killed_attempt_are_swept(rig: Rig) -> None:
    job = rig.submit()
    rig.runner().run(rig.claim())
    root = Path(rig.settings.artifacts) / "jobs"
    stale = root / job.id / "7" / "segments" / "segment-9"
    unknown = root / "video_unknown" / "1" / "video.mp4"
    scratch = rig.settings.scratch / "jobs" / job.id / "1" / "latents" / "chunk-0"
    for path in (stale, unknown, scratch):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"left")
    retention(rig).run()
    assert rig.files() == rig.keys(job)
    assert not stale.parents[1].exists()
    assert not unknown.parents[1].exists()
    assert not scratch.exists()


def test_a_running_attempt_is_left_alone(rig: Rig) -> None:
    rig.submit()
    job = rig.claim()
    made = rig.artifacts.attempt_folder(job.id, job.fence) / "half.mp4"
    made.write_bytes(b"being made")
    retention(rig).run()
    assert made.exists()


def test_what_cannot_be_removed_is_tried_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    job = rig.submit()
    rig.runner().run(rig.claim())
    rig.store.submissions.delete(job.id, "local")

    def refuse(*_: object) -> None:
        raise PermissionError("not now")

    monkeypatch.setattr(rig.artifacts, "remove", refuse)
    retention(rig).empty_garbage()
    assert rig.store.files.garbage()
    monkeypatch.undo()
    retention(rig).empty_garbage()
    assert rig.store.files.garbage() == []
    assert rig.files() == []
