"""A job as a card shows it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longtake.api.objects import STATUS, num_frames, percent, progress_object
from longtake.queue.records import Job, JobState

WORDS = {
    "queued": "Queued",
    "in_progress": "Making",
    "completed": "Done",
    "failed": "Failed",
    "cancelled": "Stopped",
}
PHASES = {
    "starting": "starting",
    "loading": "loading the model",
    "encoding": "reading the input",
    "generating": "making pictures",
    "decoding": "decoding",
    "finishing": "finishing",
    "cancelling": "stopping",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a running job is; ``chunk`` is the one in work, from 1."""

    phase: str
    chunk: int
    chunks: int
    step: int
    steps: int
    percent: int
    fps: float | None
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Card:
    """What the card's template shows.

    Attributes:
        status: the API's word for the state; ``word`` the one for people.
        position: how many are made before it, for a queued one.
        seq: number of the last event that the card is sure to know.
        media: true if there is a finished file to show, and ``poster`` a picture of it.
        live: true if segments may be played while it is made.
        pictured: true if there is a picture of it while it is made.
    """

    job: Job
    status: str
    word: str
    seq: int
    position: int | None
    progress: Progress | None
    media: bool
    live: bool
    pictured: bool

    @property
    def id(self) -> str:
        """The video's id."""
        return self.job.id

    @property
    def title(self) -> str:
        """The prompt in one line, cut where it is long."""
        line = " ".join(self.job.prompt.split())
        return line if len(line) <= 160 else f"{line[:157]}..."

    @property
    def stopping(self) -> bool:
        """True once its owner has asked it to stop."""
        return self.job.cancel_requested and not self.job.finished

    @property
    def version(self) -> str:
        """Changes whenever the job's files do."""
        return f"{self.job.fence}-{self.job.chunks_done}"

    @property
    def frames(self) -> int:
        """How many frames the video has, or is to have."""
        return num_frames(self.job)

    @property
    def seconds(self) -> float:
        """How long the video is, or is to be."""
        return self.frames / float(self.job.plan["fps"])

    @property
    def made_in_s(self) -> float | None:
        """From the first start to the end, of a completed one."""
        job = self.job
        if job.state is not JobState.COMPLETED or job.started_at is None:
            return None
        return (job.completed_at or job.updated_at) - job.started_at

    @property
    def seed(self) -> Any:
        """The seed, as it was drawn or given."""
        return self.job.request.get("seed")

    @property
    def width(self) -> int:
        """Pixels."""
        return _size(self.job.plan)[0]

    @property
    def height(self) -> int:
        """Pixels."""
        return _size(self.job.plan)[1]


def make_card(job: Job, seq: int, position: int | None = None, *, pictured: bool = False) -> Card:
    """The card of a job that was read after event ``seq``."""
    status = STATUS[job.state]
    kept = job.state is JobState.CANCELLED and job.keep_chunks and job.chunks_done > 0
    running = job.state is JobState.RUNNING
    return Card(
        job=job,
        status=status,
        word=WORDS[status],
        seq=seq,
        position=position if job.state is JobState.QUEUED else None,
        progress=_progress(job) if running else None,
        media=job.state is JobState.COMPLETED or kept,
        live=running and job.mode == "hybrid" and job.chunks_done > 0,
        pictured=running and (pictured or job.chunks_done > 0),
    )


def make_cards(
    jobs: Sequence[Job],
    seq: int,
    positions: Mapping[str, int],
    pictured: Collection[str] = (),
) -> list[Card]:
    """Cards of a page; ``pictured`` are those that have a picture before their first chunk."""
    return [make_card(job, seq, positions.get(job.id), pictured=job.id in pictured) for job in jobs]


def _progress(job: Job) -> Progress:
    known = progress_object(job)
    return Progress(
        phase=PHASES.get(known["phase"], known["phase"]),
        chunk=min(known["chunk"] + 1, known["chunks"]),
        chunks=known["chunks"],
        step=known["step"],
        steps=known["steps"],
        percent=percent(job),
        fps=known["fps"],
        eta_s=known["eta_seconds"],
    )


def _size(plan: Mapping[str, Any]) -> tuple[int, int]:
    width, _, height = str(plan.get("size", "")).partition("x")
    return (int(width), int(height)) if width.isdigit() and height.isdigit() else (16, 10)
