"""Figures for Prometheus: the same from every process, and cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from longtake import __version__
from longtake.api import metrics
from longtake.queue.figures import read_figures
from longtake.queue.records import ChunkRecord, Job, WorkerRecord

if TYPE_CHECKING:
    from tests.api.conftest import MakeSite, Site

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FRESH_S", 0.0)


def scrape(site: Site) -> Samples:
    answer = site.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=1.0.0")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((f"longtake_{name}", frozenset(labels.items())))


def claim(site: Site, worker: str = "worker-1", **changes: Any) -> Job:
    job = site.service.store.leases.claim(
        worker, "default", **{"loaded_model": None, "affinity_s": 0, "lease_s": 60, **changes}
    )
    assert job is not None
    return job


def make(site: Site) -> None:
    """One queued, one running, one completed with a chunk, one cancelled; one lease lost."""
    store = site.service.store
    for _ in range(4):
        site.submit()
    done = claim(site)
    timings = {"denoise": 1.5, "decode": 0.5}
    chunk = ChunkRecord(done.id, 0, done.fence, 9, None, None, timings)
    store.held.record_chunk(done.id, done.fence, chunk, [], {})
    store.leases.complete(done.id, done.fence, [], {})
    lost = claim(site, lease_s=-1)
    assert claim(site, "worker-2").id == lost.id
    store.submissions.cancel(store.listings.page(None).jobs[0].id, None)


def test_the_state_of_the_service_is_told(site: Site) -> None:
    make(site)
    samples = scrape(site)
    states = {"queued": 1, "running": 1, "completed": 1, "failed": 0, "cancelled": 1}
    for state, count in states.items():
        assert value(samples, "jobs", queue="default", state=state) == count
    age = value(samples, "queue_oldest_seconds", queue="default")
    assert age is not None
    assert 0 < age < 600
    assert value(samples, "jobs_ended_last_hour", state="completed") == 1
    assert value(samples, "jobs_ended_last_hour", state="failed") == 0
    assert value(samples, "attempts_ended_last_hour", outcome="completed") == 1
    assert value(samples, "attempts_ended_last_hour", outcome="lost") == 1
    assert value(samples, "stage_seconds_last_hour", stage="denoise") == 1.5
    assert value(samples, "stage_seconds_last_hour", stage="decode") == 0.5
    assert value(samples, "frames_last_hour") == 9
    assert value(samples, "frames_per_second") == 4.5
    assert value(samples, "info", version=__version__) == 1
    assert value(samples, "outbox_ticks") is not None


def test_webhooks_workers_and_streams_are_told(site: Site) -> None:
    store = site.service.store
    hook = store.webhooks.create("local", "mine", "https://hooks.example/", ["video.failed"])
    sample = store.webhooks.send_test(hook.id, None, "video.failed")
    store.webhooks.finish(sample.id, "failed", 500, "")
    worker = WorkerRecord("worker_1", "here", 1, "1@0", "default", "busy", memory_bytes=7_000)
    store.workers.beat(worker)
    with site.http.stream("GET", "/v1/events") as stream:
        parts = stream.iter_raw()
        next(parts)
        samples = scrape(site)
    assert value(samples, "webhook_deliveries", state="failed") == 1
    assert value(samples, "workers", state="busy") == 1
    assert value(samples, "workers", state="idle") == 0
    assert value(samples, "worker_memory_bytes", worker="worker_1") == 7_000
    assert value(samples, "event_streams") == 1


def test_every_process_says_the_same_about_the_service(make_site: MakeSite) -> None:
    one, other = make_site(), make_site()
    make(one)
    own = ("longtake_http", "longtake_event_streams", "longtake_queue_oldest")
    shown = [
        {key: v for key, v in scrape(site).items() if not key[0].startswith(own)}
        for site in (one, other)
    ]
    assert shown[0] == shown[1]


def test_requests_are_counted_by_route_and_never_by_what_clients_make_up(site: Site) -> None:
    for k in range(5):
        site.http.get(f"/v1/videos/video_{k}?secret={k}")
        site.http.get(f"/nowhere/{k}")
    site.http.request("BREW", "/v1/videos")
    samples = scrape(site)
    route = {"method": "GET", "route": "/v1/videos/{video_id}"}
    assert value(samples, "http_requests_total", **route, status="404") == 5
    assert value(samples, "http_request_seconds_count", **route) == 5
    nowhere = {"method": "GET", "route": "unknown"}
    assert value(samples, "http_requests_total", **nowhere, status="404") == 5
    assert not any("BREW" in dict(labels).values() for _, labels in samples)


def test_refusals_at_the_door_are_counted(make_site: MakeSite) -> None:
    site = make_site(require_keys=True)
    _, secret = site.service.store.keys.create("mine")
    site.http.get("/v1/videos")
    site.http.headers["authorization"] = f"Bearer {secret}"
    labels = {"method": "GET", "route": "unknown", "status": "401"}
    assert value(scrape(site), "http_requests_total", **labels) == 1


def test_many_scrapes_are_one_look_at_the_database(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []

    def counted(db: Any) -> Any:
        looks.append(db)
        return read_figures(db)

    monkeypatch.setattr(metrics, "read_figures", counted)
    monkeypatch.setattr(metrics, "FRESH_S", 3600.0)
    for _ in range(5):
        scrape(site)
    assert len(looks) == 1
