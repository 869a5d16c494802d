"""The files of one attempt: what earlier attempts left is brought in, what is made goes out.

Keys are ``jobs/<job>/<fence>/<path in the attempt's folder>``, so a file keeps its name from one
attempt to the next.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from longtake.errors import NotFoundError, RequestError
from longtake.queue.artifacts import Artifacts
from longtake.queue.messages import File, LatentsStored, Work
from longtake.queue.records import Artifact, ArtifactKind, ChunkRecord, Job
from longtake.queue.store import Store

INPUT, JOB = "input:", "job:"
INPUTS_FOLDER = "inputs"
KEY_PARTS = 3


class Attempt:
    """Prepares the folder of one attempt, publishes its files and clears up behind it.

    Attributes:
        job: as claimed.
        latents_made: of the chunk that is being decoded: stored with its segment, or by themselves
            if that does not come.
        latents: keys of stored latents by chunk.
    """

    def __init__(self, store: Store, artifacts: Artifacts, job: Job) -> None:
        self.job = job
        self.latents_made: LatentsStored | None = None
        self.latents: dict[int, str] = {}
        self._store = store
        self._artifacts = artifacts
        self._published: set[str] = set()
        self._folder = artifacts.attempt_folder(job.id, job.fence)

    def prepare(self) -> Work:
        """Bring in stored chunks and inputs.

        Raises:
            RequestError: what the request starts from is gone.
            OSError: no space, or the store of artifacts is away.
        """
        if self.job.fence > 1:
            self._fetch_checkpoints()
        request = dict(self.job.request)
        for field in ("image", "video"):
            if request.get(field) is not None:
                request[field] = str(self._local(field, str(request[field])))
        return Work(
            self.job.id,
            self.job.fence,
            request,
            self._folder,
            metadata={"job": self.job.id},
        )

    def publish(self, files: Sequence[File]) -> list[Artifact]:
        """Put files where results live; they are public only once the store commits them."""
        published = self._artifacts.publish(self._folder, files, self.job.owner)
        self._published |= {artifact.key for artifact in published}
        return published

    def record(
        self,
        chunk: int,
        artifacts: Sequence[Artifact],
        frames: int = 0,
        timings: Mapping[str, float] | None = None,
    ) -> ChunkRecord:
        """The record of a chunk with what is new of it; without ``frames``, it is not decoded."""
        keys = {artifact.kind: artifact.key for artifact in artifacts}
        if ArtifactKind.LATENTS in keys:
            self.latents[chunk] = keys[ArtifactKind.LATENTS]
        return ChunkRecord(
            self.job.id,
            chunk,
            self.job.fence,
            frames,
            self.latents.get(chunk),
            keys.get(ArtifactKind.SEGMENT),
            dict(timings or {}),
        )

    def close(self) -> None:
        """Remove every file of this attempt that the store does not know of.

        Chunks that were committed stay: the next attempt goes on from them. Errors of the disk are
        left to the sweep, which does the same later.
        """
        kept = {artifact.key for artifact in self._store.files.of_job(self.job.id)}
        with contextlib.suppress(OSError):
            remove_unknown(self._artifacts, self._folder, self.job.id, self.job.fence, kept)
        for key in self._published - kept:
            with contextlib.suppress(OSError):
                self._artifacts.remove(key)

    def _fetch_checkpoints(self) -> None:
        """Latents, segments and their headers of earlier attempts, up to the first that is lost."""
        heads = (ArtifactKind.ROLLOUT, ArtifactKind.INIT)
        keys = [a.key for kind in heads for a in self._store.files.of_job(self.job.id, kind)]
        for chunk in self._store.listings.chunks(self.job.id):
            if chunk.latents_key is not None:
                self.latents[chunk.index] = chunk.latents_key
                keys.append(chunk.latents_key)
            if chunk.segment_key is not None:
                keys.append(chunk.segment_key)
        for key in keys:
            try:
                self._fetch(key, self._folder / _path_in_attempt(key))
            except FileNotFoundError:
                return

    def _local(self, field: str, reference: str) -> Path:
        """A local path of ``input:<artifact>`` or ``job:<video>``; nothing else is a reference."""
        kind, _, name = reference.partition(":")
        try:
            if f"{kind}:" == INPUT:
                artifact = self._store.files.get(name)
                return self._input(artifact.key, artifact.id)
            if f"{kind}:" == JOB:
                return self._source(name)
        except (NotFoundError, FileNotFoundError):
            raise RequestError(field, name, "is gone") from None
        raise RequestError(field, reference, "is no reference", "input:... or job:...")

    def _source(self, job_id: str) -> Path:
        """Another job's video: its latents to go on from, or its pixels to redraw."""
        source = self._store.listings.get(job_id, self.job.owner)
        if self.job.request.get("strength") is None and source.model == self.job.model:
            keys = [
                artifact.key
                for kind in (ArtifactKind.ROLLOUT, ArtifactKind.LATENTS)
                for artifact in self._store.files.of_job(job_id, kind)
            ]
            if len(keys) > 1:
                for key in keys:
                    self._input(key, f"{job_id}/{PurePosixPath(key).name}")
                return self._folder / INPUTS_FOLDER / job_id
        for artifact in self._store.files.of_job(job_id, ArtifactKind.VIDEO):
            return self._input(artifact.key, f"{job_id}.mp4")
        raise NotFoundError("video", job_id)

    def _input(self, key: str, name: str) -> Path:
        target = self._folder / INPUTS_FOLDER / name
        self._fetch(key, target)
        return target

    def _fetch(self, key: str, target: Path) -> None:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            self._artifacts.fetch(key, target)


def remove_unknown(
    artifacts: Artifacts, folder: Path, job_id: str, fence: int, kept: set[str]
) -> int:
    """Remove files of an attempt's folder whose keys are not ``kept``; how many went.

    Where results live elsewhere the folder is scratch, and goes as a whole.
    """
    if not folder.is_dir():
        return 0
    prefix = f"jobs/{job_id}/{fence}"
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    gone = 0
    for path in files:
        key = f"{prefix}/{path.relative_to(folder).as_posix()}"
        if key in kept and artifacts.local_path(key) == path:
            continue
        path.unlink(missing_ok=True)
        gone += 1
    if gone == len(files):
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()
    return gone


def _path_in_attempt(key: str) -> Path:
    """``jobs/<job>/<fence>/latents/x`` is ``latents/x`` in the folder of any attempt."""
    return Path(*PurePosixPath(key).parts[KEY_PARTS:])
