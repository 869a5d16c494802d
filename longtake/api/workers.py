"""/v1/workers: who makes the videos, by the workers' own heartbeats."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from longtake.api.auth import Owner
from longtake.api.errors import problems
from longtake.api.objects import JsonResponse
from longtake.api.service import Service, ServiceDep
from longtake.errors import NotFoundError
from longtake.queue.records import WorkerRecord

MISSED_BEATS = 3  # a worker that missed more counts as gone

router = APIRouter(tags=["service"])


class WorkerObject(BaseModel):
    """One worker; ``video_id`` is told to its owner only, ages are in seconds."""

    id: str
    object: Literal["worker"]
    host: str
    queue: str
    state: Literal["starting", "loading", "idle", "busy", "disk_full", "broken", "stopping"]
    reason: str | None
    model: str | None
    video_id: str | None
    device: str | None
    pid: int
    engine_pid: int | None
    memory_bytes: int
    engine_memory_bytes: int | None
    jobs_done: int | None
    started_at: int
    seen_at: float
    step_at: float | None
    step_age_seconds: float | None


class WorkerList(BaseModel):
    """All workers whose heartbeat is fresh."""

    object: Literal["list"]
    data: list[WorkerObject]


@router.get("/v1/workers", response_model=WorkerList, responses=problems(401, 403, 429, 503))
def list_workers(service: ServiceDep, who: Owner) -> Response:
    """The workers that are up."""
    data = [_object(service, worker, who.id) for worker in fresh_workers(service)]
    return JsonResponse({"object": "list", "data": data})


def fresh_workers(service: Service) -> list[WorkerRecord]:
    """Workers that were heard of lately."""
    return service.store.workers.list(MISSED_BEATS * service.settings.heartbeat_s)


def _object(service: Service, worker: WorkerRecord, owner: str) -> dict[str, object]:
    details = worker.details
    return {
        "id": worker.id,
        "object": "worker",
        "host": worker.host,
        "queue": worker.queue,
        "state": worker.state,
        "reason": details.get("reason"),
        "model": worker.model,
        "video_id": _own(service, worker.job_id, owner),
        "device": details.get("device"),
        "pid": worker.pid,
        "engine_pid": worker.engine_pid,
        "memory_bytes": worker.memory_bytes,
        "engine_memory_bytes": details.get("engine_memory_bytes"),
        "jobs_done": details.get("jobs_done"),
        "started_at": int(worker.started_at),
        "seen_at": round(worker.seen_at, 3),
        "step_at": worker.step_at,
        "step_age_seconds": _age(worker),
    }


def _age(worker: WorkerRecord) -> float | None:
    """How long ago the last step was when the worker last spoke."""
    if worker.step_at is None:
        return None
    return round(max(worker.seen_at - worker.step_at, 0.0), 3)


def _own(service: Service, job_id: str | None, owner: str) -> str | None:
    if job_id is None:
        return None
    try:
        return service.store.listings.get(job_id, owner).id
    except NotFoundError:
        return None
