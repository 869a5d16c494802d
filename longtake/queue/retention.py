"""What is removed by itself: old videos, trash, files that nothing names, old records."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from longtake.errors import ConflictError, NotFoundError
from longtake.queue.artifacts import Artifacts
from longtake.queue.attempt import remove_unknown
from longtake.queue.records import JobState
from longtake.queue.store import Store
from longtake.settings import DAY_S, Settings

BATCH = 200
SWEEP_S = 3600.0
# an upload that no job took
ORPHANED_INPUT_S = DAY_S
EVENTS_S = 7 * DAY_S
DELIVERIES_S = 30 * DAY_S
logger = logging.getLogger(__name__)


class Retention:
    """Removes what may go; everything here can be done twice, or by several at once."""

    def __init__(self, store: Store, artifacts: Artifacts, settings: Settings) -> None:
        self._store = store
        self._artifacts = artifacts
        self._settings = settings
        self._swept_at: float | None = None

    def run(self) -> None:
        """Everything that is due."""
        self.remove_old()
        self.empty_garbage()
        now = time.monotonic()
        if self._swept_at is None or now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            self.prune_records()
            self.sweep_attempts()

    def remove_old(self) -> None:
        """Videos past their age, beyond the bytes allowed, or long enough in the trash."""
        settings = self._settings
        due = self._store.files.retention(
            trash_s=settings.trash_s, max_bytes=settings.retention_bytes, limit=BATCH
        )
        for job_id in due:
            try:
                job = self._store.listings.get(job_id, None)
                self._store.submissions.delete(job_id, job.owner)
                logger.info("%s: removed, its time was over", job_id)
            except (NotFoundError, ConflictError):
                continue  # somebody else was faster, or an extension of it is still to be made

    def empty_garbage(self) -> None:
        """Remove files that the store has forgotten; what cannot be removed is tried again."""
        while entries := self._store.files.garbage(BATCH):
            gone = []
            for entry, key in entries:
                try:
                    self._remove(key)
                    gone.append(entry)
                except OSError as error:
                    logger.warning("%s cannot be removed just now: %s", key, error)
            self._store.files.forget_garbage(gone)
            if len(gone) < len(entries):
                return

    def prune_records(self) -> None:
        """Old idempotency keys, events and deliveries, and uploads that no job took."""
        orphans = self._store.files.orphaned_inputs(ORPHANED_INPUT_S, BATCH)
        self._store.files.remove([artifact.id for artifact in orphans])
        self._store.submissions.forget_idempotency()
        self._store.webhooks.prune(DELIVERIES_S)
        self._store.events.prune(EVENTS_S)

    def sweep_attempts(self) -> None:
        """Remove files of attempts that are over and that nothing names: a killed worker's."""
        for folder in self._attempt_folders():
            # listed before the job is read: what is committed later belongs to a running attempt
            self._sweep(folder)

    def _attempt_folders(self) -> list[Path]:
        roots = {self._settings.scratch / "jobs"}
        local = self._artifacts.local_path("jobs")
        if local is not None:
            roots.add(local)
        return sorted(
            folder
            for root in roots
            if root.is_dir()
            for folder in root.glob("*/*")
            if folder.is_dir() and folder.name.isdecimal()
        )

    def _sweep(self, folder: Path) -> None:
        job_id, fence = folder.parent.name, int(folder.name)
        kept: set[str] = set()
        try:
            job = self._store.listings.get(job_id, None)
            if job.state is JobState.RUNNING and job.fence == fence:
                return
            kept = {artifact.key for artifact in self._store.files.of_job(job_id)}
        except NotFoundError:
            pass
        try:
            gone = remove_unknown(self._artifacts, folder, job_id, fence, kept)
        except OSError as error:
            logger.warning("%s cannot be swept just now: %s", folder, error)
            return
        if gone:
            logger.info("%s: %d files of an attempt that is over are gone", folder, gone)

    def _remove(self, key: str) -> None:
        """A file, or with a closing slash a folder."""
        if not key.endswith("/"):
            self._artifacts.remove(key)
            return
        parts = key.strip("/").split("/")
        if len(parts) == 3:
            self._artifacts.remove_attempt(parts[1], int(parts[2]))
        else:
            self._artifacts.remove_job(parts[1])
