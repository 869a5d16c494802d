"""The tick as a Celery task, and a worker process around it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.platforms import SecurityWarning
from celery.signals import worker_shutting_down
from celery.worker.state import reserved_requests

from longtake.queue.app import TICK, WORKER_OPTIONS, keep_logging, make_app
from longtake.queue.artifacts import open_artifacts
from longtake.queue.store import open_store
from longtake.queue.ticks import Nudges, Ticker
from longtake.queue.worker import Worker
from longtake.settings import Settings

FREE_S = 0.002
logger = logging.getLogger(__name__)


def add_tick(app: Celery, worker: Worker, done: Callable[[], None] = lambda: None) -> None:
    """Register the tick: a message says "queue X has work", and the worker claims what it can.

    ``done`` is called at the end of each.
    """

    @app.task(name=TICK, ignore_result=True)  # type: ignore[untyped-decorator]
    def tick(queue: str) -> None:
        del queue  # a worker takes ticks of its own queue only
        try:
            worker.tick()
        finally:
            done()


def run_worker(settings: Settings) -> None:
    """Be a worker process until SIGTERM or SIGINT; the broker may come and go meanwhile.

    Celery's SIGTERM handler asks for a warm shutdown and sends ``worker_shutting_down``, from
    which the engine is told to stop; Celery then waits for the tick in flight, which ends once the
    job has been released.
    """
    store = open_store(settings)
    ticker = Ticker(settings.broker)
    worker = Worker(store, open_artifacts(settings), settings, ticker)
    nudges = Nudges(settings.broker, worker.nudge)
    app = make_app(settings.broker)
    program = None

    def done() -> None:
        if program is not None and program.hub is not None:
            program.hub.call_soon(_look_again, program.hub)

    add_tick(app, worker, done)
    keep_logging()
    # whoever runs a container as root has decided so; messages are JSON and carry no code
    warnings.simplefilter("ignore", SecurityWarning)

    def shutting_down(**_: Any) -> None:
        worker.stop()
        nudges.stop()

    worker_shutting_down.connect(shutting_down, weak=False)
    worker.start()
    nudges.start()
    try:
        program = app.Worker(
            hostname=f"{worker.id}@longtake",
            queues=[settings.queue],
            quiet=True,
            loglevel=settings.log_level.upper(),
            optimization="fair",
            **WORKER_OPTIONS,
        )
        program.start()
    finally:
        worker.close()
        nudges.stop()
        ticker.close()
        store.close()


def _look_again(hub: Any) -> None:
    """Have Celery's loop ask the broker again as soon as the tick that ends has left its slot.

    Without prefetch it asks only while the slot is free, and looks whether it is once a second:
    the first tick after a job would wait for that (0.5 s on average, measured).
    """
    if reserved_requests:
        hub.call_later(FREE_S, _look_again, hub)
