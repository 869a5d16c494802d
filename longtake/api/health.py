"""/healthz: the process lives. /readyz: jobs are accepted, and somebody makes them."""

from __future__ import annotations

import logging
from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from longtake.api.objects import JsonResponse
from longtake.api.service import Service, ServiceDep
from longtake.api.workers import fresh_workers
from longtake.errors import LongtakeError
from longtake.queue.database import check_revision

LOG = logging.getLogger("longtake.api")
# states of a worker that takes jobs, now or after the one it has
UP = frozenset({"loading", "idle", "busy"})
RETRY_S = 5

router = APIRouter(tags=["service"])


class Health(BaseModel):
    """The process answers."""

    status: Literal["ok"]


class Readiness(BaseModel):
    """``checks`` by name: ok, or why not."""

    status: Literal["ready", "not_ready"]
    checks: dict[str, str]


@router.get("/healthz", response_model=Health, summary="Whether the process lives")
async def healthz() -> Response:
    """Answers as long as the process can; asks nobody else."""
    return JsonResponse({"status": "ok"})


@router.get(
    "/readyz",
    response_model=Readiness,
    summary="Whether jobs are accepted and a worker is up",
    responses={503: {"model": Readiness, "description": "not now; ``checks`` says why"}},
)
def readyz(service: ServiceDep) -> Response:
    """200 once a video that is asked for now would be made."""
    checks = _checks(service)
    if all(found == "ok" for found in checks.values()):
        return JsonResponse({"status": "ready", "checks": checks})
    headers = {"retry-after": str(RETRY_S)}
    body = {"status": "not_ready", "checks": checks}
    return JsonResponse(body, status_code=503, headers=headers)


def _checks(service: Service) -> dict[str, str]:
    checks = {"service": "stopping" if service.draining else "ok"}
    try:
        checks["disk"] = "ok" if service.has_room() else "full"
    except (OSError, LongtakeError) as error:
        LOG.warning("not ready: the artifacts cannot be reached: %s", error)
        checks["disk"] = "not reachable"
    try:
        check_revision(service.store.db)
        checks["database"] = "ok"
        checks["workers"] = _worker_check(service)
    except (SQLAlchemyError, LongtakeError) as error:
        # a message of the driver may name hosts and users, and this route needs no key
        LOG.warning("not ready: %s", error)
        wrong = "schema is not this version's" if isinstance(error, LongtakeError) else "no answer"
        checks["database"] = wrong
    return checks


def _worker_check(service: Service) -> str:
    states = [worker.state for worker in fresh_workers(service)]
    if any(state in UP for state in states):
        return "ok"
    return f"none is up: {', '.join(sorted(states))}" if states else "none is up"
