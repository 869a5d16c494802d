"""The workers as the API shows them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import update

from longtake.queue.records import WorkerRecord
from longtake.queue.tables import workers

if TYPE_CHECKING:
    from tests.api.conftest import Site


def worker(name: str, job_id: str | None = None, step_at: float | None = None) -> WorkerRecord:
    return WorkerRecord(
        id=f"worker_{name}",
        host="here",
        pid=10,
        boot_id="10@1",
        queue="default",
        state="busy" if job_id else "idle",
        model="papercut",
        job_id=job_id,
        engine_pid=11,
        memory_bytes=3_000,
        started_at=1_000.0,
        seen_at=0.0,
        step_at=step_at,
        details={"jobs_done": 4, "reason": None, "device": "auto", "engine_memory_bytes": 2_000},
    )


def test_a_worker_is_shown_with_its_engine_and_the_age_of_its_last_step(api: Site) -> None:
    job = api.submit()
    api.service.store.workers.beat(worker("a", job.id, step_at=time.time() - 30))

    [shown] = api.http.get("/v1/workers").json()["data"]

    assert shown["step_age_seconds"] == pytest.approx(30, abs=10)
    assert shown["seen_at"] == pytest.approx(time.time(), abs=10)
    expected = {
        "id": "worker_a",
        "object": "worker",
        "host": "here",
        "queue": "default",
        "state": "busy",
        "reason": None,
        "model": "papercut",
        "video_id": job.id,
        "device": "auto",
        "pid": 10,
        "engine_pid": 11,
        "memory_bytes": 3_000,
        "engine_memory_bytes": 2_000,
        "jobs_done": 4,
        "started_at": 1_000,
    }
    assert {name: shown[name] for name in expected} == expected


def test_the_video_of_another_owner_is_not_told(api: Site) -> None:
    foreign = api.submit(owner="key_other")
    api.service.store.workers.beat(worker("a", foreign.id))
    api.service.store.workers.beat(worker("b", "video_gone"))

    data = api.http.get("/v1/workers").json()["data"]

    assert [(one["state"], one["video_id"]) for one in data] == [("busy", None)] * 2


def test_a_worker_that_was_not_heard_of_is_not_shown(api: Site) -> None:
    api.service.store.workers.beat(worker("a"))
    with api.service.store.db.write() as conn:
        conn.execute(update(workers).values(seen_at=workers.c.seen_at - 60))
    api.service.store.workers.beat(worker("b"))

    data = api.http.get("/v1/workers").json()["data"]

    assert [(one["id"], one["step_age_seconds"]) for one in data] == [("worker_b", None)]
