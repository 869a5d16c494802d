"""Which end an attempt comes to, by class of error. Pure decisions, no input or output.

| what happened | counts | strike | then |
|---|---|---|---|
| illegal request, unusable model | - | - | failed |
| out of memory, the first time at this chunk | yes | no | again, from the stored latents |
| out of memory, twice in a row at this chunk | - | - | failed, ``out_of_memory`` |
| engine dies by its own fault in a step | unless a chunk was stored | yes | again, later |
| engine dies elsewhere, or is killed from outside | unless a chunk was stored | no | again |
| silent past its stage's limit | unless a chunk was stored | no | again, later |
| storage away | yes | no | again, later |
| no space | no | no | again, and the worker waits for space |
| preempted | no | no | again, at once |
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longtake.queue.messages import Failed
from longtake.queue.processes import killed_for_memory
from longtake.queue.records import AttemptRecord, ErrorCode, Job
from longtake.queue.store import Store
from longtake.queue.tracker import Tracker
from longtake.settings import Settings

FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_TEXT = ("No space left on device", "Disk quota exceeded")
# a signal of these says that somebody ended the process, not that it went wrong by itself
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LONGEST_DELAY_S = 600.0
BROKEN_DELAY_S = 10.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to write about an attempt, and what the worker should do next.

    Attributes:
        outcome: of the attempt, as its row says.
        final: the job failed; otherwise it is queued again.
        counts: the attempt counts against ``max_attempts``.
        delay_s: wait before the next try.
        error: ``code``, ``message``, and where: ``stage`` and ``chunk``.
        strike_chunk: the chunk in a step of which the engine died by itself.
        replace, disk_full, broken: see ``runner.Ran``.
    """

    outcome: str
    final: bool = False
    counts: bool = True
    delay_s: float = 0.0
    error: Mapping[str, Any] | None = None
    strike_chunk: int | None = None
    replace: bool = False
    disk_full: bool = False
    broken: str | None = None

    @classmethod
    def fail(cls, code: ErrorCode, message: str, **more: Any) -> Verdict:
        """The job failed for good."""
        error = {"code": code.value, "message": message, **more.pop("error", {})}
        return cls(code.value, final=True, error=error, **more)

    @classmethod
    def release(cls, outcome: str, *, counts: bool, **more: Any) -> Verdict:
        """The job is queued again."""
        return cls(outcome, counts=counts, **more)

    def apply(self, store: Store, job: Job) -> Job:
        """Release the job as this verdict says; it may fail by that for want of tries."""
        return store.leases.release(
            job.id,
            job.fence,
            counts=self.counts,
            not_before_in_s=self.delay_s,
            outcome=self.outcome,
            error=self.error,
            strike_chunk=self.strike_chunk,
        )


def of_failure(
    message: Failed,
    tracker: Tracker,
    job: Job,
    settings: Settings,
    before: Sequence[AttemptRecord],
) -> Verdict:
    """The engine said that the attempt failed. ``before`` holds the attempts so far."""
    error = _error(message.code, message.message, message.stage, message.chunk)
    if message.code is ErrorCode.OUT_OF_MEMORY:
        if job.attempt > 1 and _same_before(before, job.fence, message):
            return Verdict.fail(message.code, message.message, replace=message.broken)
        return Verdict.release(message.code.value, counts=True, error=error, replace=message.broken)
    if message.code is ErrorCode.STORAGE:
        return of_storage(message.message, None, job, settings)
    if message.code is ErrorCode.MODEL_ERROR and message.broken:
        return Verdict.release(
            message.code.value,
            counts=False,
            delay_s=BROKEN_DELAY_S,
            error=error,
            replace=True,
            broken=message.message,
        )
    if message.code in (ErrorCode.INVALID_REQUEST, ErrorCode.MODEL_ERROR):
        more = {} if message.field is None else {"param": message.field}
        return Verdict.fail(message.code, message.message, error=more, replace=message.broken)
    return Verdict.release(
        message.code.value,
        counts=not tracker.stored,
        delay_s=retry_delay(job, settings),
        error=error,
        replace=message.broken,
    )


def of_death(
    exit_code: int | None, tracker: Tracker, job: Job, settings: Settings, memory_kills: int
) -> Verdict:
    """The engine process is gone, and nobody of ours ended it.

    ``memory_kills`` is the kernel's count when the attempt began: SIGKILL while it grew was the
    kernel's answer to the job's own hunger, SIGKILL otherwise came from an operator.
    """
    number = -exit_code if exit_code is not None and exit_code < 0 else None
    hungry = number == signal.SIGKILL and killed_for_memory() > memory_kills
    outside = number in FROM_OUTSIDE and not hungry
    how = f"by signal {number}" if number is not None else f"with exit code {exit_code}"
    where = f"a step of chunk {tracker.chunk}" if tracker.in_step else f"phase {tracker.phase}"
    code = ErrorCode.OUT_OF_MEMORY if hungry else ErrorCode.INTERNAL
    return Verdict.release(
        "engine_killed" if outside else "engine_died",
        counts=not tracker.stored,
        delay_s=0.0 if outside else retry_delay(job, settings),
        error=_error(code, f"the engine died {how} in {where}", tracker.phase, tracker.chunk),
        strike_chunk=tracker.chunk if tracker.in_step and not outside else None,
        replace=True,
    )


def of_silence(tracker: Tracker, job: Job, settings: Settings) -> Verdict:
    """The engine said nothing for longer than its phase may take, and was killed."""
    message = f"{tracker.phase} took longer than {tracker.limit_s:g} s at chunk {tracker.chunk}"
    return Verdict.release(
        "timeout",
        counts=not tracker.stored,
        delay_s=retry_delay(job, settings),
        error=_error(ErrorCode.TIMEOUT, message, tracker.phase, tracker.chunk),
        replace=True,
    )


def of_storage(message: str, number: int | None, job: Job, settings: Settings) -> Verdict:
    """Files could not be written or fetched: for want of space, or for another reason."""
    full = number in FULL or any(text in message for text in FULL_TEXT)
    return Verdict.release(
        "disk_full" if full else ErrorCode.STORAGE.value,
        counts=not full,
        delay_s=0.0 if full else retry_delay(job, settings),
        error={"code": ErrorCode.STORAGE.value, "message": message},
        disk_full=full,
    )


def retry_delay(job: Job, settings: Settings) -> float:
    """Seconds to wait before the next try; doubles with every one that counted."""
    doublings = min(max(job.attempt - 1, 0), 16)
    return float(min(settings.retry_delay_s * 2**doublings, LONGEST_DELAY_S))


def _same_before(before: Sequence[AttemptRecord], fence: int, message: Failed) -> bool:
    """True if the attempt before this one ran out of memory at the same chunk, too."""
    earlier = [attempt for attempt in before if attempt.fence < fence]
    if not earlier:
        return False
    last = max(earlier, key=lambda attempt: attempt.fence)
    error = last.error or {}
    return last.outcome == ErrorCode.OUT_OF_MEMORY and error.get("chunk") == message.chunk


def _error(code: ErrorCode, message: str, stage: str, chunk: int | None) -> dict[str, Any]:
    return {"code": code.value, "message": message, "stage": stage, "chunk": chunk}
