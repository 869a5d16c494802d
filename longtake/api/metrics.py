"""``/metrics`` for Prometheus: the service's state from the database, requests from this process.

What the database knows is the same from every API process; the figures of HTTP and of streams are
this process's own. The database is asked at most once in ``FRESH_S``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import TypeAlias, cast

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0

from longtake import __version__
from longtake.api.auth import Owner
from longtake.api.errors import problems
from longtake.api.observe import Observed, Seen
from longtake.api.service import ServiceDep
from longtake.queue.figures import Figures, read_figures
from longtake.queue.records import JobState, WorkerRecord
from longtake.queue.store import Store
from longtake.settings import Settings

Values: TypeAlias = Mapping[tuple[str, ...], float]

FRESH_S = 5.0
LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
WORKER_STATES = ("starting", "loading", "idle", "busy", "disk_full", "broken", "stopping")

router = APIRouter(tags=["service"])


class Metrics:
    """One registry; an application has its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = ("method", "route", "status")
        self._requests = Counter(
            "longtake_http_requests", "Requests by route.", names, registry=self.registry
        )
        self._seconds = Histogram(
            "longtake_http_request_seconds",
            "From a request to the beginning of its answer.",
            ("method", "route"),
            registry=self.registry,
            buckets=LATENCIES_S,
        )

    def seen(self, seen: Seen) -> None:
        """Count one answered request."""
        self._requests.labels(seen.method, seen.route, str(seen.status)).inc()
        self._seconds.labels(seen.method, seen.route).observe(seen.seconds)


class ServiceState:
    """What the database and this process know, as a collector of Prometheus's client."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.streams = 0
        self._store = store
        self._fresh_s = 3 * settings.heartbeat_s
        self._lock = threading.Lock()
        self._until = 0.0
        self._figures: Figures | None = None
        self._workers: list[WorkerRecord] = []

    def collect(self) -> Iterator[Metric]:
        """The families; looks into the database when its figures are old."""
        with self._lock:
            now = time.monotonic()
            if self._figures is None or now >= self._until:
                self._figures = read_figures(self._store.db)
                self._workers = self._store.workers.list(self._fresh_s)
                self._until = now + FRESH_S
            figures, workers = self._figures, self._workers
        yield InfoMetricFamily("longtake", "The program.", {"version": __version__})
        yield from _jobs(figures)
        yield from _work(figures)
        yield from _workers(workers)
        yield _family("longtake_event_streams", "Streams open in this process.", {(): self.streams})


def _jobs(figures: Figures) -> Iterator[Metric]:
    queues = {queue for queue, _ in figures.jobs} | {"default"}
    counts: Values = {
        (queue, state.value): figures.jobs.get((queue, state.value), 0)
        for queue in sorted(queues)
        for state in JobState
    }
    yield _family("longtake_jobs", "Jobs that are stored.", counts, "queue", "state")
    ages: Values = {(queue,): figures.oldest_s.get(queue, 0.0) for queue in sorted(queues)}
    text = "Age of the oldest queued job."
    yield _family("longtake_queue_oldest_seconds", text, ages, "queue")
    finished = {state.value: 0 for state in JobState if state.value in _ENDED} | figures.finished
    text = "Jobs that ended in the last hour."
    yield _family("longtake_jobs_ended_last_hour", text, _single(finished), "state")
    text = "Ticks that wait for the broker."
    yield _family("longtake_outbox_ticks", text, {(): figures.ticks})


def _work(figures: Figures) -> Iterator[Metric]:
    outcomes = {"completed": 0, "lost": 0} | figures.attempts
    text = "Attempts that ended in the last hour; lost ones lost their lease."
    yield _family("longtake_attempts_ended_last_hour", text, _single(outcomes), "outcome")
    text = "Seconds by stage of videos completed in the last hour."
    yield _family("longtake_stage_seconds_last_hour", text, _single(figures.stage_s), "stage")
    text = "Pixel frames of videos completed in the last hour."
    yield _family("longtake_frames_last_hour", text, {(): figures.frames})
    spent_s = sum(figures.stage_s.values())
    rate = figures.frames / spent_s if spent_s else 0.0
    text = "Pixel frames a second of work, of videos completed in the last hour."
    yield _family("longtake_frames_per_second", text, {(): rate})
    owed = {"pending": 0, "delivered": 0, "failed": 0} | figures.deliveries
    text = "Webhook deliveries in the log."
    yield _family("longtake_webhook_deliveries", text, _single(owed), "state")


def _workers(workers: list[WorkerRecord]) -> Iterator[Metric]:
    counts = dict.fromkeys(WORKER_STATES, 0)
    for worker in workers:
        counts[worker.state] = counts.get(worker.state, 0) + 1
    yield _family("longtake_workers", "Workers with a fresh heartbeat.", _single(counts), "state")
    memory: Values = {(worker.id,): worker.memory_bytes for worker in workers}
    text = "Memory of a worker and its engine."
    yield _family("longtake_worker_memory_bytes", text, memory, "worker")


_ENDED = frozenset({"completed", "failed", "cancelled"})


def _family(name: str, text: str, values: Values, *labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _single(values: Mapping[str, float]) -> Values:
    return {(name,): value for name, value in sorted(values.items())}


def install(app: FastAPI) -> None:
    """Count every request of ``app``; call it last, so that it sees refusals too."""
    metrics = app.state.metrics = Metrics()
    app.add_middleware(Observed, record=metrics.seen)


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        **problems(401, 403, 429, 503),
    },
)
def read_metrics(request: Request, service: ServiceDep, who: Owner) -> Response:
    """The state of queues, jobs, workers and webhooks, and the requests of this process."""
    del who  # with keys it needs one
    state = request.app.state
    metrics: Metrics | None = getattr(state, "metrics", None)
    if metrics is None:
        metrics = state.metrics = Metrics()
    collector = getattr(state, "service_state", None)
    if collector is None:
        collector = state.service_state = ServiceState(service.store, service.settings)
        metrics.registry.register(collector)
    hub = getattr(state, "events", None)
    cast(ServiceState, collector).streams = len(hub.streams) if hub is not None else 0
    return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_PLAIN_1_0_0)
