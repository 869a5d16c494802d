"""What the service stores, as plain records, and which state may follow which.

Times are seconds since 1970 in UTC, as the database's clock gives them. Nothing here imports more
than the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

LOCAL_OWNER = "local"  # who owns everything while the service runs without API keys


class JobState(StrEnum):
    """Where a job stands; the API's ``status`` is its value (``running`` is ``in_progress``)."""

    # accepted and waiting; ``paused`` and ``not_before`` may hold it back
    QUEUED = "queued"
    # a worker holds its lease
    RUNNING = "running"
    # the video is there; never left again
    COMPLETED = "completed"
    # gave up, ``error`` says why; ``retry`` queues it again
    FAILED = "failed"
    # stopped by its owner; ``retry`` queues it again
    CANCELLED = "cancelled"


TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED, JobState.FAILED}),
    JobState.RUNNING: frozenset(
        {
            JobState.RUNNING,  # a lease ran out and another worker took over
            JobState.QUEUED,
            JobState.COMPLETED,
            JobState.FAILED,
            JobState.CANCELLED,
        }
    ),
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
}
TERMINAL = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})


class Relation(StrEnum):
    """How a job came from another one."""

    REMIX = "remix"
    EXTEND = "extend"
    EDIT = "edit"


class ErrorCode(StrEnum):
    """Why a job failed, as ``error.code`` tells it; ``RETRIED`` says which are tried again."""

    # the request was found illegal only when the model was loaded
    INVALID_REQUEST = "invalid_request"
    # model, device or backend is not usable on this worker
    MODEL_ERROR = "model_error"
    # the accelerator or the machine ran out of memory, also with what was stored so far
    OUT_OF_MEMORY = "out_of_memory"
    # the engine died at the same chunk again and again
    POISON = "poison"
    # workers were lost as often as the job may be tried
    WORKER_LOST = "worker_lost"
    # a step took longer than its limit
    TIMEOUT = "timeout"
    # the results could not be stored
    STORAGE = "storage_error"
    # a fault of longtake
    INTERNAL = "internal_error"


RETRIED = frozenset(
    {
        ErrorCode.OUT_OF_MEMORY,
        ErrorCode.WORKER_LOST,
        ErrorCode.TIMEOUT,
        ErrorCode.STORAGE,
        ErrorCode.INTERNAL,
    }
)


class ArtifactKind(StrEnum):
    """What a stored file is."""

    VIDEO = "video"
    THUMBNAIL = "thumbnail"
    SPRITESHEET = "spritesheet"
    RECEIPT = "receipt"
    PREVIEW = "preview"
    # fragmented mp4: one header a job, one segment a chunk
    INIT = "init"
    SEGMENT = "segment"
    # clean latents of one chunk, and the rollout.json that describes them
    LATENTS = "latents"
    ROLLOUT = "rollout"
    # a start image or clip that came with the request
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class Job:
    """One request and everything known about it.

    Attributes:
        id: opaque, ``video_`` and 24 characters.
        owner: API key id, or ``LOCAL_OWNER``.
        request: JSON form of ``VideoRequest`` with its seed; ``image``/``video`` hold input
            references (``input:<artifact id>`` or ``job:<video id>``), never paths.
        plan: what the admission plan resolved: num_frames, fps, size, seconds, chunks, steps, ...
        priority: 0 (first) to 9; position orders jobs of one priority.
        fence: grows with every claim; a write under an older one is refused.
        attempt: tries that count against ``max_attempts``.
        strikes: engine deaths in a step of chunk ``strike_chunk`` with no chunk stored between.
        progress: ``x_progress`` as the API shows it.
        error: ``{code, message}`` of a failed job.
        chunks_done: chunks stored so far.
        bytes_stored: of all its artifacts.
    """

    id: str
    owner: str
    state: JobState
    queue: str
    model: str
    mode: str
    prompt: str
    request: dict[str, Any]
    plan: dict[str, Any]
    priority: int
    position: float
    paused: bool
    cancel_requested: bool
    keep_chunks: bool
    created_at: float
    updated_at: float
    started_at: float | None
    completed_at: float | None
    expires_at: float | None
    not_before: float
    lease_owner: str | None
    lease_until: float | None
    fence: int
    attempt: int
    max_attempts: int
    strikes: int
    strike_chunk: int | None
    progress: dict[str, Any]
    error: dict[str, Any] | None
    parent_id: str | None
    relation: Relation | None
    batch_id: str | None
    batch_index: int | None
    tags: tuple[str, ...]
    starred: bool
    trashed_at: float | None
    chunks_done: int
    bytes_stored: int

    @property
    def finished(self) -> bool:
        """True in a state that only ``retry`` leaves."""
        return self.state in TERMINAL


@dataclass(frozen=True, slots=True)
class NewJob:
    """What ``submit`` needs to make a job; the request has its seed by now."""

    owner: str
    request: dict[str, Any]
    plan: dict[str, Any]
    model: str
    mode: str
    prompt: str
    queue: str = "default"
    priority: int = 5
    not_before: float = 0.0
    parent_id: str | None = None
    relation: Relation | None = None
    batch_id: str | None = None
    batch_index: int | None = None
    tags: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()  # ids of input artifacts that now belong to the job


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One stored chunk; keys name artifacts, the segment's is None until it is decoded."""

    job_id: str
    index: int
    fence: int
    frames: int
    latents_key: str | None
    segment_key: str | None
    timings: dict[str, float]


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One try at a job. ``outcome`` is None while it runs; lost, preempted, completed, ..."""

    job_id: str
    fence: int
    worker: str
    started_at: float
    ended_at: float | None
    outcome: str | None
    error: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Artifact:
    """One stored file. ``key`` is relative to the artifacts' root: ``jobs/<id>/<fence>/name``."""

    id: str
    job_id: str | None
    owner: str
    fence: int
    kind: ArtifactKind
    key: str
    size: int
    sha256: str | None
    content_type: str
    created_at: float
    # what the file turned out to be: frames, width, height, fps, name
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the event log; ``seq`` grows over all jobs and is the SSE id."""

    seq: int
    job_id: str
    owner: str
    type: str
    data: dict[str, Any]
    created_at: float


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's public side; the secret is shown once and only its hash is stored.

    ``limits`` may hold max_queued, max_running_s (a day), max_bytes and requests_per_minute; what
    it lacks is taken from the settings.
    """

    id: str
    name: str
    prefix: str
    created_at: float
    revoked_at: float | None
    limits: dict[str, int]


@dataclass(frozen=True, slots=True)
class Webhook:
    """An endpoint that wants events; ``previous_secret`` still signs for a day after a rotation."""

    id: str
    owner: str
    name: str
    url: str
    event_types: tuple[str, ...]
    secret: str
    previous_secret: str | None
    rotated_at: float | None
    enabled: bool
    created_at: float


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event for one webhook, and how sending it went.

    ``state`` is pending, delivered or failed; ``id`` is the webhook-id header and the same for
    every try.
    """

    id: str
    webhook_id: str
    type: str
    payload: dict[str, Any]
    state: str
    attempt: int
    next_at: float
    status_code: int | None
    response: str | None
    created_at: float
    finished_at: float | None


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker as ``/v1/workers`` shows it; refreshed every few seconds.

    ``state`` is starting, loading, idle, busy, disk_full, broken or stopping.
    """

    id: str
    host: str
    pid: int
    boot_id: str
    queue: str
    state: str
    model: str | None = None
    job_id: str | None = None
    engine_pid: int | None = None
    memory_bytes: int = 0
    started_at: float = 0.0
    seen_at: float = 0.0
    step_at: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """A manifest of many requests. ``invalid`` lists items that made no job: index and error."""

    id: str
    owner: str
    name: str | None
    created_at: float
    total: int
    invalid: tuple[dict[str, Any], ...]
