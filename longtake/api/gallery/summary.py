"""How much waits, is being made and is stored, in one line."""

from __future__ import annotations

from dataclasses import dataclass

from longtake.api.health import UP
from longtake.api.service import Service
from longtake.api.workers import fresh_workers
from longtake.queue.records import JobState


@dataclass(frozen=True, slots=True)
class Summary:
    """What every page shows at its top.

    Attributes:
        videos: in all states; ``bytes_stored`` is what their files take.
        free_bytes: left on the disk, None where nobody knows.
        retention_s, retention_bytes: how long and how much is kept; 0 is without end.
        full: true while the disk is too full for new work.
        stuck: why nothing that waits is made; empty where somebody makes it.
    """

    queued: int
    making: int
    videos: int
    bytes_stored: int
    free_bytes: int | None
    retention_s: int
    retention_bytes: int
    trash_s: int
    full: bool
    stuck: str


def summary_of(service: Service, owner: str) -> Summary:
    """The summary of what an owner has."""
    counts = service.store.listings.counts(owner)
    settings = service.settings
    return Summary(
        queued=counts[JobState.QUEUED],
        making=counts[JobState.RUNNING],
        videos=sum(counts.values()),
        bytes_stored=service.store.files.stored_bytes(owner),
        free_bytes=service.artifacts.free_bytes(),
        retention_s=settings.retention_s,
        retention_bytes=settings.retention_bytes,
        trash_s=settings.trash_s,
        full=not service.has_room(),
        stuck=_stuck(service) if counts[JobState.QUEUED] else "",
    )


def _stuck(service: Service) -> str:
    states = {worker.state for worker in fresh_workers(service)}
    if states & UP - {"loading"}:
        return ""
    if "loading" in states:
        return "the model is being loaded again"
    return "the worker is starting" if "starting" in states else "no worker is up"
