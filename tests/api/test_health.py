"""Whether the process lives, and whether a video that is asked for now would be made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text, update

from longtake.queue.records import WorkerRecord
from longtake.queue.tables import workers

if TYPE_CHECKING:
    from tests.api.conftest import MakeSite, Site

WORKER = WorkerRecord("worker_1", "here", 1, "1@0", "default", "idle")


def ready(site: Site) -> tuple[int, dict[str, Any]]:
    answer = site.http.get("/readyz")
    body: dict[str, Any] = answer.json()
    assert body["status"] == ("ready" if answer.status_code == 200 else "not_ready")
    assert ("retry-after" in answer.headers) == (answer.status_code == 503)
    return answer.status_code, body["checks"]


def test_a_process_without_anything_else_is_alive(site: Site) -> None:
    site.service.draining = True
    answer = site.http.get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_ready_once_a_worker_is_up_and_until_its_heartbeat_is_old(api: Site) -> None:
    assert ready(api) == (503, {**GOOD, "workers": "none is up"})
    store = api.service.store
    store.workers.beat(WORKER)
    assert ready(api) == (200, GOOD)
    with store.db.write() as conn:
        conn.execute(update(workers).values(seen_at=workers.c.seen_at - 60))
    assert ready(api) == (503, {**GOOD, "workers": "none is up"})


GOOD = {"service": "ok", "disk": "ok", "database": "ok", "workers": "ok"}


@pytest.mark.parametrize("state", ["starting", "disk_full", "broken", "stopping"])
def test_a_worker_that_takes_no_jobs_does_not_count(api: Site, state: str) -> None:
    api.service.store.workers.beat(replace(WORKER, state=state))
    assert ready(api) == (503, {**GOOD, "workers": f"none is up: {state}"})
    api.service.store.workers.beat(replace(WORKER, id="worker_2", state="busy"))
    assert ready(api) == (200, GOOD)


def test_a_service_that_stops_is_not_ready(site: Site) -> None:
    site.service.store.workers.beat(WORKER)
    site.service.draining = True
    assert ready(site) == (503, {**GOOD, "service": "stopping"})


def test_a_full_disk_is_not_ready(make_site: MakeSite) -> None:
    site = make_site(min_free_bytes=2**62)
    site.service.store.workers.beat(WORKER)
    assert ready(site) == (503, {**GOOD, "disk": "full"})


def test_a_schema_of_another_version_is_not_ready(site: Site) -> None:
    with site.service.store.db.write() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = 'other'"))
    status, checks = ready(site)
    assert (status, checks["database"]) == (503, "schema is not this version's")


def test_a_database_that_is_gone_is_not_ready_and_its_address_not_told(site: Site) -> None:
    with site.service.store.db.write() as conn:
        conn.execute(text("DROP TABLE workers"))
    status, checks = ready(site)
    assert (status, checks["database"]) == (503, "no answer")
    assert site.http.get("/healthz").status_code == 200


def test_neither_needs_a_key(make_site: MakeSite) -> None:
    site = make_site(require_keys=True)
    assert site.http.get("/healthz").status_code == 200
    assert ready(site)[0] == 503
    for path in ("/v1/workers", "/metrics", "/v1/events", "/v1/webhooks", "/v1/batches"):
        assert site.http.get(path).status_code == 401
