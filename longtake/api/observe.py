"""Sees every request from outside: one log line and one set of figures each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longtake.logs import bind

LOG = logging.getLogger("longtake.access")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNKNOWN = "unknown"
# asked every few seconds by machines
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
_GONE = 499  # the client left before there was an answer


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: ``route`` as declared, ``seconds`` until its answer began."""

    method: str
    route: str
    status: int
    seconds: float


class Observed:
    """ASGI middleware around everything else. Query strings are not logged: they hold prompts."""

    def __init__(self, app: ASGIApp, record: Callable[[Seen], None]) -> None:
        self._app = app
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        began = time.perf_counter()
        status, seconds = _GONE, 0.0

        async def noting(message: Message) -> None:
            nonlocal status, seconds
            if message["type"] == "http.response.start":
                status, seconds = message["status"], time.perf_counter() - began
            await send(message)

        with bind(state):  # the guard puts the request id there
            try:
                await self._app(scope, receive, noting)
            except Exception:
                status = status if status != _GONE else 500
                raise
            finally:
                if status == _GONE:
                    seconds = time.perf_counter() - began
                method = scope["method"] if scope["method"] in METHODS else UNKNOWN
                route = getattr(scope.get("route"), "path", UNKNOWN)
                self._record(Seen(method, route, status, seconds))
                level = logging.DEBUG if route in QUIET else logging.INFO
                where = scope["path"] if route == UNKNOWN else route
                details = {"status": status, "ms": round(1000 * seconds, 1)}
                LOG.log(level, "%s %s %d", method, where[:200], status, extra=details)
