"""Mending what was lost: leases, ticks, files. Any number of workers may do it at once."""

from __future__ import annotations

import logging
import time

from longtake.queue.artifacts import Artifacts
from longtake.queue.patience import DATABASE_ERRORS
from longtake.queue.processes import Process, host_name, identify
from longtake.queue.records import WorkerRecord
from longtake.queue.retention import Retention
from longtake.queue.store import Store
from longtake.queue.ticks import Ticker, send_outbox
from longtake.settings import Settings

# workers that have not been heard of for so long are forgotten
FORGET_S = 3600.0
logger = logging.getLogger(__name__)


class Reconciler:
    """One round every ``reconcile_s``; each part is tried even if another one fails."""

    def __init__(
        self, store: Store, artifacts: Artifacts, settings: Settings, ticker: Ticker
    ) -> None:
        self._store = store
        self._ticker = ticker
        self._retention = Retention(store, artifacts, settings)

    def run(self) -> None:
        """Free leases, send ticks, remove what may go. Raises nothing."""
        parts = (self.free_leases, self.send_ticks, self._retention.run)
        for part in parts:
            try:
                part()
            except DATABASE_ERRORS as error:
                logger.warning("not mended just now: %s", error)
            except Exception:
                logger.exception("a fault in mending; the next round tries again")

    def free_leases(self) -> None:
        """Leases of dead workers of this machine at once, others when they have run out."""
        reclaim_dead(self._store)
        self._store.workers.prune(FORGET_S)
        for job in self._store.leases.expire():
            logger.warning("%s: its worker was lost; it is %s now", job.id, job.state.value)

    def send_ticks(self) -> None:
        """The outbox, and a tick for every queue that still has claimable work."""
        if send_outbox(self._store, self._ticker):
            for queue in self._store.outbox.queues_with_work():
                self._ticker.publish(queue)


def reclaim_dead(store: Store) -> list[str]:
    """Free the jobs of workers of this machine whose process is gone; their ids.

    Nothing has to wait for a lease to run out when it can be seen that nobody holds it.
    """
    here = host_name()
    dead = {one.id for one in store.workers.list() if one.host == here and not _runs(one)}
    if not dead:
        return []
    freed = store.leases.reclaim(dead)
    for worker_id in dead:
        store.workers.remove(worker_id)
    if freed:
        logger.warning("jobs of dead workers are free again: %s", ", ".join(freed))
    return freed


def _runs(worker: WorkerRecord) -> bool:
    """True if the very process that wrote the record still runs."""
    _, _, started = worker.boot_id.partition("@")
    try:
        return Process(worker.pid, float(started)).alive
    except ValueError:
        return identify(worker.pid) is not None or time.time() - worker.seen_at < FORGET_S
