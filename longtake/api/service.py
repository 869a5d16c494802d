"""What the handlers work with: settings, store, artifacts, client and the sender of ticks."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request

from longtake.api.auth import Authenticator
from longtake.api.idempotency import Once
from longtake.api.sessions import Sessions
from longtake.errors import ServiceError
from longtake.queue.artifacts import Artifacts, open_artifacts
from longtake.queue.catalogue import Catalogue
from longtake.queue.client import Client
from longtake.queue.lookups import Lookups
from longtake.queue.store import Store, open_store
from longtake.queue.ticks import Dispatcher, Ticker
from longtake.settings import Settings

FREE_SPACE_S = 2.0  # how long a look at the disk is good for
DRAINING_RETRY_S = 10
FULL_RETRY_S = 60


@dataclass(slots=True)
class Service:
    """Everything that one API process holds; started and closed with the application."""

    settings: Settings
    store: Store
    artifacts: Artifacts
    catalogue: Catalogue
    client: Client
    authenticator: Authenticator
    sessions: Sessions
    once: Once
    lookups: Lookups
    ticker: Ticker
    dispatcher: Dispatcher
    draining: bool = False
    _started: bool = False
    _room_until: float = 0.0
    _room: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check_accepting(self) -> None:
        """Refuse new work while the service stops or the disk is full.

        Raises:
            ServiceError: with the time after which to ask again.
        """
        if self.draining:
            raise ServiceError("The service is stopping; ask again soon.", DRAINING_RETRY_S)
        if not self.has_room():
            raise ServiceError("The disk is full; nothing new is taken.", FULL_RETRY_S)

    def has_room(self) -> bool:
        """True while results can be stored; the disk is looked at every two seconds."""
        now = time.monotonic()
        if now < self._room_until:
            return self._room
        with self._lock:
            free = self.artifacts.free_bytes()
            self._room = free is None or free >= self.settings.min_free_bytes
            self._room_until = now + FREE_SPACE_S
        return self._room

    def submitted(self) -> None:
        """Jobs were committed: have their ticks sent, which never holds up the request."""
        self.dispatcher.wake()

    def start(self) -> None:
        """Send the outbox from now on."""
        self.dispatcher.start()
        self._started = True

    def close(self) -> None:
        """Take no more work, and let go of broker and database."""
        self.draining = True
        if self._started:
            self.dispatcher.stop()
        self.ticker.close()
        self.store.close()


def open_service(settings: Settings) -> Service:
    """Open what the settings name.

    Raises:
        ServiceError: the database's schema is older than this program, or a model is not known.
    """
    store = open_store(settings)
    catalogue = Catalogue(settings)
    ticker = Ticker(settings.broker)
    lookups = Lookups(store.db)
    return Service(
        settings=settings,
        store=store,
        artifacts=open_artifacts(settings),
        catalogue=catalogue,
        client=Client(store, settings, catalogue),
        authenticator=Authenticator(store, settings),
        sessions=Sessions(store, settings),
        once=Once(lookups, settings.idempotency_s),
        lookups=lookups,
        ticker=ticker,
        dispatcher=Dispatcher(store, ticker),
    )


async def service(request: Request) -> Service:
    """The application's service, as a dependency; async, so that it takes no thread."""
    return cast(Service, request.app.state.service)


ServiceDep = Annotated[Service, Depends(service)]
