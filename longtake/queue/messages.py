"""What worker and engine process say to each other over their pipe. No torch.

The worker sends one ``Work`` and reads until ``Finished``, ``Stopped`` or ``Failed``. Paths lie in
``Work.folder``, which the worker owns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longtake.queue.records import ArtifactKind, ErrorCode


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt at a job.

    Attributes:
        job_id, fence: whose it is.
        request: JSON form of a ``VideoRequest``; ``image`` and ``video`` are local paths here.
        folder: an existing folder of this attempt alone. Chunks of earlier attempts are there
            already: ``latents/`` as a ``LatentFolder`` (with its ``rollout.json``) and
            ``segments/segment-000000.m4s`` with their ``segments/init.mp4``.
        metadata: written into the mp4 beside what the engine writes itself.
    """

    job_id: str
    fence: int
    request: dict[str, Any]
    folder: Path
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has imported everything and waits for work."""

    pid: int
    device: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan is made; ``plan`` is ``Plan.as_dict()``."""

    plan: dict[str, Any]
    chunks: int
    steps: int


@dataclass(frozen=True, slots=True)
class Stage:
    """``loading``, ``encoding`` (the input), ``generating``, ``decoding`` or ``finishing``."""

    name: str
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A denoising step is about to run, counted from 0."""

    chunk: int
    step: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """``step`` of ``steps`` denoising steps of chunk ``chunk`` of ``chunks`` is done."""

    chunk: int
    chunks: int
    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class File:
    """A file that is whole, in the work's folder; whoever publishes it puts it on the disk."""

    kind: ArtifactKind
    path: Path
    content_type: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LatentsStored:
    """A chunk is denoised and its latents are written; it is not decoded yet.

    ``files`` holds its LATENTS, and with the first chunk the ROLLOUT.
    """

    chunk: int
    files: tuple[File, ...]


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """A chunk is decoded and its segment is written.

    ``files`` holds SEGMENT and PREVIEW, with the first chunk INIT, and nothing that an earlier
    attempt had stored. ``reused`` is true where the latents came from an earlier attempt.
    """

    chunk: int
    frames: int
    frames_done: int
    reused: bool
    timings: dict[str, float]
    files: tuple[File, ...]


@dataclass(frozen=True, slots=True)
class Pictured:
    """A PREVIEW of a chunk that is not finished: all that a clip can show while it is made."""

    file: File


@dataclass(frozen=True, slots=True)
class Finished:
    """Everything is made: VIDEO, THUMBNAIL, SPRITESHEET and RECEIPT."""

    frames: int
    files: tuple[File, ...]
    timings: dict[str, float]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The stop flag was seen; chunks reported so far are whole.

    With ``Work`` told to keep, ``files`` holds what ``Finished`` would, of the finished chunks.
    """

    frames: int
    files: tuple[File, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt raised. ``stage`` is where, ``chunk`` which, ``field`` what of the request."""

    code: ErrorCode
    message: str
    stage: str
    chunk: int | None
    memory_bytes: int
    field: str | None = None
    # true where the process itself cannot be trusted any more and should be replaced
    broken: bool = False


EngineMessage = (
    Ready
    | Planned
    | Stage
    | StepStarted
    | StepDone
    | LatentsStored
    | ChunkDone
    | Pictured
    | Finished
    | Stopped
    | Failed
)
