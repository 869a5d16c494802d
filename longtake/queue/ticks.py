"""Waking workers: ticks through the broker, the outbox that sends them, and nudges.

All of it may fail or be late: workers poll the database, and read ``cancel_requested`` from it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

import redis
from kombu.exceptions import OperationalError
from sqlalchemy.exc import SQLAlchemyError

from longtake.queue.app import KEY_PREFIX, PUBLISHER_TRANSPORT, TICK, TICK_EXPIRES_S, make_app
from longtake.queue.store import Store

NUDGES = f"{KEY_PREFIX}nudges"
OUTBOX_BATCH = 500
GATHER_S = 0.1  # between two batches: every batch is a write that submissions wait for
IDLE_S = 2.0
RETRY_S = 1.0
BROKER_ERRORS = (OperationalError, redis.RedisError, OSError)
logger = logging.getLogger(__name__)


class Ticker:
    """Publishes ticks and nudges; a broker that is away costs a moment and is no error."""

    def __init__(self, broker_url: str) -> None:
        self._app = make_app(broker_url, publisher=True)
        self._redis = connect(broker_url, timeout_s=PUBLISHER_TRANSPORT["socket_connect_timeout"])
        self._silent = False

    def publish(self, queue: str, count: int = 1) -> bool:
        """Say that ``queue`` has work; False if the broker did not take it."""

        def send() -> None:
            for _ in range(count):
                self._app.send_task(
                    TICK, args=(queue,), queue=queue, expires=TICK_EXPIRES_S, retry=False
                )

        return self._guarded(send)

    def nudge(self, job_id: str) -> bool:
        """Have the worker that runs this job read its row now."""

        def send() -> None:
            self._redis.publish(NUDGES, job_id)

        return self._guarded(send)

    def close(self) -> None:
        """Close all connections."""
        self._app.close()
        self._redis.close()

    def _guarded(self, send: Callable[[], None]) -> bool:
        try:
            send()
        except BROKER_ERRORS as error:
            if not self._silent:
                logger.warning("the broker is away, workers poll meanwhile: %s", error)
            self._silent = True
            return False
        self._silent = False
        return True


class Dispatcher:
    """A thread that sends the outbox: of the API after every submission, of workers when idle."""

    def __init__(self, store: Store, ticker: Ticker) -> None:
        self._store = store
        self._ticker = ticker
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)

    def start(self) -> None:
        """Begin sending."""
        self._thread.start()

    def wake(self) -> None:
        """Something was committed: look soon. Returns at once."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread; what is left is sent by the next dispatcher."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            if send_outbox(self._store, self._ticker):
                self._stopping.wait(GATHER_S)
                self._wake.wait(IDLE_S)
            else:
                # no wake shortens this: a broker that is away is not tried at every submission
                self._stopping.wait(RETRY_S)


def send_outbox(store: Store, ticker: Ticker) -> bool:
    """Send a tick for everything in the outbox and empty it; False if that has to be tried again.

    Several may do this at once: ticks sent twice change nothing.
    """
    try:
        full = True
        while full:  # what is added meanwhile may wait for the next call
            rows = store.outbox.pending(OUTBOX_BATCH)
            for queue, count in Counter(row.queue for row in rows).items():
                # one for each worker is enough: whoever is woken takes all that there is
                most = max(1, store.workers.count(queue))
                if not ticker.publish(queue, min(count, most)):
                    return False
            store.outbox.sent([row.id for row in rows])
            full = len(rows) == OUTBOX_BATCH
    except SQLAlchemyError as error:
        logger.warning("the outbox cannot be read just now: %s", error)
        return False
    return True


class Nudges:
    """A thread that hears which jobs to look at; silent while the broker is away."""

    def __init__(self, broker_url: str, heard: Callable[[str], None]) -> None:
        self._url = broker_url
        self._heard = heard
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nudges", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; the thread ends within half a second, and nobody needs to wait."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except BROKER_ERRORS:
                self._stopping.wait(RETRY_S)

    def _listen(self) -> None:
        client = connect(self._url, timeout_s=RETRY_S)
        try:
            channel = client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
            with channel:
                channel.subscribe(NUDGES)
                while not self._stopping.is_set():
                    message = channel.get_message(timeout=RETRY_S / 2)
                    if message is not None:
                        self._heard(message["data"].decode())
        finally:
            client.close()


def connect(broker_url: str, timeout_s: float) -> redis.Redis:
    """A plain client of the broker; kombu's ``redis+socket`` URLs are redis-py's ``unix`` ones."""
    url = broker_url
    for scheme in ("redis+socket://", "redis+unix://"):
        if url.startswith(scheme):
            url = url.replace(scheme, "unix://", 1).replace("virtual_host=", "db=")
    client: redis.Redis = redis.Redis.from_url(
        url, socket_connect_timeout=timeout_s, socket_timeout=max(timeout_s, 1.0)
    )
    return client
