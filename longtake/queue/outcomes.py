"""How an attempt ended, and what its worker learns from that."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    # queued again, sooner or later
    REQUEUED = "requeued"
    # another attempt has the job, or it was deleted
    LOST = "lost"


class Stop(StrEnum):
    """Why the engine was asked to stop."""

    CANCEL = "cancel"
    SHUTDOWN = "shutdown"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Ran:
    """What a worker learns from an attempt.

    Attributes:
        outcome: of the job.
        memory_bytes: of the engine at the end, 0 if unknown.
        replace: the engine cannot be trusted any more.
        disk_full: results could not be stored for want of space.
        broken: why this worker cannot run jobs now, as far as the attempt tells.
    """

    outcome: Outcome
    memory_bytes: int = 0
    replace: bool = False
    disk_full: bool = False
    broken: str | None = None
