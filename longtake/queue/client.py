"""Submit jobs, and make new ones from old ones. No torch: used by the API, batches and scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longtake.errors import ConflictError, RequestError
from longtake.queue.admission import JOB, Admission, Admitted
from longtake.queue.catalogue import Catalogue
from longtake.queue.records import LOCAL_OWNER, Job, JobState, NewJob, Relation
from longtake.queue.store import Store
from longtake.settings import Settings

DEFAULT_PRIORITY = 5
DEFAULT_STRENGTH = 0.6  # of an edit that names none
MAX_PRIORITY = 9
INPUT_FIELDS = ("image", "video", "strength")
LENGTH_FIELDS = ("seconds", "num_frames")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What belongs to a job and not to its video.

    ``queue`` None is the settings' own.
    """

    priority: int = DEFAULT_PRIORITY
    tags: tuple[str, ...] = ()
    queue: str | None = None
    parent_id: str | None = None
    relation: Relation | None = None
    batch_id: str | None = None
    batch_index: int | None = None


class Client:
    """The queue as a caller sees it: requests in, jobs out."""

    def __init__(
        self, store: Store, settings: Settings, catalogue: Catalogue | None = None
    ) -> None:
        self.store = store
        self.settings = settings
        self.admission = Admission(store, catalogue or Catalogue(settings), settings)

    def plan(self, request: Mapping[str, Any], owner: str = LOCAL_OWNER) -> Admitted:
        """What would run; nothing is queued. Errors as of ``Admission.admit``."""
        return self.admission.admit(request, owner)

    def new_job(
        self,
        request: Mapping[str, Any],
        owner: str = LOCAL_OWNER,
        options: JobOptions | None = None,
    ) -> NewJob:
        """A request in the JSON form of ``VideoRequest`` as a job that ``submit_jobs`` takes."""
        options = options or JobOptions()
        if not 0 <= options.priority <= MAX_PRIORITY:
            legal = f"from 0 (first) to {MAX_PRIORITY}"
            raise RequestError("priority", options.priority, "is out of range", legal)
        admitted = self.admission.admit(request, owner)
        return NewJob(
            owner=owner,
            request=admitted.request,
            plan=admitted.summary,
            model=admitted.model,
            mode=admitted.mode,
            prompt=admitted.plan.request.prompt,
            queue=options.queue or self.settings.queue,
            priority=options.priority,
            parent_id=options.parent_id,
            relation=options.relation,
            batch_id=options.batch_id,
            batch_index=options.batch_index,
            tags=options.tags,
            inputs=admitted.inputs,
        )

    def submit(
        self,
        request: Mapping[str, Any],
        owner: str = LOCAL_OWNER,
        options: JobOptions | None = None,
        *,
        limits: Mapping[str, int] | None = None,
        idempotency: tuple[str, str] | None = None,
    ) -> Job:
        """Plan and store one job; it is safe once this returns.

        Raises:
            RequestError, ModelError: as of ``plan``.
            LimitError: a quota in ``limits`` is used up.
            ConflictError: ``idempotency`` names a key that came with another fingerprint.
        """
        job = self.new_job(request, owner, options)
        return self.submit_jobs([job], limits=limits, idempotency=idempotency)[0]

    def submit_jobs(
        self,
        jobs: Sequence[NewJob],
        *,
        limits: Mapping[str, int] | None = None,
        idempotency: tuple[str, str] | None = None,
    ) -> list[Job]:
        """Store jobs of one owner in one transaction."""
        limits = {"max_queued": self.settings.max_queued} if limits is None else limits
        return self.store.submissions.submit(jobs, limits, idempotency=idempotency)

    def change(self, job: Job, changes: Mapping[str, Any], request: Mapping[str, Any]) -> Job:
        """Edit a job; fields in ``request`` replace those of its own request, planned anew.

        Raises:
            ConflictError: ``request`` is not empty and the job is not queued any more.
            RequestError: the changed request is not legal.
        """
        merged: dict[str, Any] = dict(changes)
        if request:
            if job.state is not JobState.QUEUED:
                raise ConflictError("Only a queued video's request can be changed.", "not_queued")
            admitted = self.plan(overlaid(own_request(job), request), job.owner)
            merged |= {
                "request": admitted.request,
                "plan": admitted.summary,
                "prompt": admitted.plan.request.prompt,
                "model": admitted.model,
                "mode": admitted.mode,
                "inputs": admitted.inputs,
            }
        return self.store.submissions.edit(job.id, job.owner, merged)


def own_request(job: Job) -> dict[str, Any]:
    """A job's request under the public name of its model."""
    return {**job.request, "model": job.model}


def overlaid(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``; a length replaces a length, an input an input, null removes."""
    kept = dict(base)
    for group in (LENGTH_FIELDS, ("image", "video")):
        if any(changes.get(name) is not None for name in group):
            for name in group:
                kept.pop(name, None)
    if changes.get("image") is not None:
        kept.pop("strength", None)
    merged = {**kept, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def remix_request(source: Job, changes: Mapping[str, Any]) -> dict[str, Any]:
    """``source`` again with another prompt: same seed, length and inputs, no prompt timeline."""
    base = {k: v for k, v in own_request(source).items() if k != "prompts"}
    return overlaid(base, changes)


def extend_request(source: Job, changes: Mapping[str, Any]) -> dict[str, Any]:
    """``source`` continued from its stored latents to a longer whole.

    Raises:
        ConflictError: it has no stored chunk yet.
        RequestError: a field that decides the latents' shape is another one now.
    """
    check_stored(source)
    for field in ("model", "size", "fps"):
        now = changes.get(field)
        before = source.model if field == "model" else source.plan[field]
        if now is not None and now != before:
            reason = "an extension keeps that of the video it continues"
            raise RequestError(field, now, reason, str(before))
    return overlaid(
        _base(source), {**changes, "size": source.plan["size"], "video": f"{JOB}{source.id}"}
    )


def edit_request(source: Job | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A video redrawn after a prompt: from ``source``, or from the video in ``changes``."""
    strength = {"strength": DEFAULT_STRENGTH}
    if source is None:
        return {name: v for name, v in {**strength, **changes}.items() if v is not None}
    check_stored(source)
    return overlaid(strength | _base(source), {**changes, "video": f"{JOB}{source.id}"})


def check_stored(source: Job) -> None:
    """Refuse a video that nothing can go on from.

    Raises:
        ConflictError: it is not finished, or ended with no chunk stored.
    """
    if not source.finished:
        raise ConflictError(f"{source.id} is not finished yet.", "video_not_ready")
    if not source.chunks_done:
        raise ConflictError(f"{source.id} {source.state} with no chunk stored.", "no_content")


def _base(source: Job) -> dict[str, Any]:
    """What a video made from the frames of ``source`` takes over from its request."""
    dropped = {"prompts", *INPUT_FIELDS, *LENGTH_FIELDS}
    if source.mode == "clip":
        dropped.add("mode")  # clip mode starts from no video
    return {k: v for k, v in own_request(source).items() if k not in dropped}
