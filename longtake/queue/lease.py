"""Keeping a lease while an engine makes progress, and hearing that the job is to be cancelled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from longtake.errors import LeaseLostError
from longtake.queue.held import Renewal
from longtake.queue.patience import DATABASE_ERRORS
from longtake.queue.records import Job
from longtake.queue.store import Store

# a chunk that is stored tells its progress itself
PROGRESS_S = 0.5
# news of a cancellation comes as a nudge; this is for when the broker is away
LOOK_S = 0.25
logger = logging.getLogger(__name__)


class LeaseKeeper:
    """A thread beside one attempt: renews the lease, writes progress, reads ``cancel_requested``.

    It renews only up to a deadline that the attempt moves with every sign of life, so an engine
    that hangs loses its job to another worker even if this one hangs as well.

    Args:
        store: where the job is.
        job: as claimed.
        lease_s, renew_s: from the settings.
        on_cancel: called once, with ``keep_chunks``.
        on_lost: called once; the job is another's, finished or deleted.
    """

    def __init__(
        self,
        store: Store,
        job: Job,
        *,
        lease_s: float,
        renew_s: float,
        on_cancel: Callable[[bool], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._store = store
        self._job = job
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._on_cancel: Callable[[bool], None] | None = on_cancel
        self._on_lost = on_lost
        self._deadline = time.monotonic() + renew_s
        self._progress: Callable[[], dict[str, Any]] | None = None
        self._wrote = time.monotonic()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"lease {job.id}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def allow(self, seconds: float) -> None:
        """There was a sign of life: renew for so long without another one."""
        self._deadline = time.monotonic() + seconds

    def report(self, progress: Callable[[], dict[str, Any]]) -> None:
        """There is progress: write it, as it is by then, when it is time to."""
        self._progress = progress

    def told(self) -> None:
        """Progress was written by somebody else just now."""
        self._progress, self._wrote = None, time.monotonic()

    def nudge(self) -> None:
        """Look at the job's row now."""
        self._wake.set()

    def close(self) -> None:
        """End before the last commit, so that nothing is read into a row that is finished."""
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        renewed = time.monotonic()
        while not self._closed:
            self._wake.wait(LOOK_S)
            self._wake.clear()
            if self._closed:
                return
            now, progress = time.monotonic(), self._progress
            try:
                if progress is not None and now - self._wrote >= PROGRESS_S:
                    self.told()  # before: a report that comes meanwhile is a new one
                    self._renew(progress())
                    renewed = now
                elif now - renewed >= self._renew_s and now < self._deadline:
                    self._renew(None)
                    renewed = now
                else:
                    self._hear(self._store.held.look(self._job.id, self._job.fence))
            except LeaseLostError:
                if not self._closed:
                    self._on_lost()
                return
            except DATABASE_ERRORS as error:
                self._progress = self._progress or progress
                logger.warning("%s: the lease cannot be renewed just now: %s", self._job.id, error)

    def _renew(self, progress: dict[str, Any] | None) -> None:
        self._hear(self._store.held.renew(self._job.id, self._job.fence, self._lease_s, progress))

    def _hear(self, renewal: Renewal) -> None:
        if renewal.cancel_requested and self._on_cancel is not None:
            tell, self._on_cancel = self._on_cancel, None
            tell(renewal.keep_chunks)
