"""The door: every request passes here before any route sees it.

Gives it an id, checks where it comes from (Host and Origin), whose it is and how often it came,
bounds its body, and sees that every answer has the security headers and every failure a problem
body. A page in a browser must not reach a service that runs without keys on loopback, neither
straight (CSRF) nor through a name that points there (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Mapping
from urllib.parse import urlsplit

from fastapi.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longtake.api.auth import Principal
from longtake.api.errors import ApiError, ProblemResponse, api_error, retry_after
from longtake.api.headers import Raw, find, request_id, with_defaults
from longtake.api.limits import Rate, RateLimiter
from longtake.api.service import Service
from longtake.settings import MIB, Settings

LOG = logging.getLogger("longtake.api")
# nobody needs a key to ask whether the service lives
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OWN_FETCH = frozenset({b"same-origin", b"none"})
FORM_OVERHEAD = MIB  # boundaries and headers of a form, besides its files and fields


class Guard:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._limiter = RateLimiter()
        self._origins = frozenset(settings.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Raw = scope["headers"]
        known = request_id(find(headers, b"x-request-id"))
        state = scope.setdefault("state", {})
        state["request_id"] = known
        extra = {b"x-request-id": known.encode()}
        answer = _Answer(send, extra)
        try:
            if self._path(scope) not in OPEN_PATHS and not self._is_preflight(scope, headers):
                service: Service = scope["app"].state.service
                authenticator = service.authenticator
                if authenticator.stale:
                    await run_in_threadpool(authenticator.refresh)
                self._check_source(scope, headers, keyless=not authenticator.needs_keys)
                state["principal"] = await self._identify(service, scope, headers, extra)
            bounded = _Bounded(receive, self._body_limit(headers), find(headers, b"content-length"))
            await self._app(scope, bounded, answer)
        except ClientDisconnect:
            return
        except Exception as error:
            await self._failed(error, scope, receive, answer, known)

    async def _failed(
        self, error: Exception, scope: Scope, receive: Receive, answer: _Answer, known: str
    ) -> None:
        problem = api_error(error)
        if problem.status == 500:
            LOG.error("request failed", exc_info=error, extra={"request_id": known})
        if answer.started:
            # the status is out already: only a broken connection tells that the rest is missing
            raise error
        await ProblemResponse(problem, known)(scope, receive, answer)

    def _is_preflight(self, scope: Scope, headers: Raw) -> bool:
        """A browser's question whether it may ask; it brings no key and reaches no route."""
        asks = find(headers, b"access-control-request-method") is not None
        return bool(self._origins) and scope["method"] == "OPTIONS" and asks

    def _path(self, scope: Scope) -> str:
        path: str = scope["path"]
        return path.removeprefix(str(scope.get("root_path", "")))

    def _body_limit(self, headers: Raw) -> int:
        form = (find(headers, b"content-type") or b"").lower().startswith(b"multipart/")
        limit = self._settings.max_body_bytes
        return limit + self._settings.max_upload_bytes + FORM_OVERHEAD if form else limit

    def _check_source(self, scope: Scope, headers: Raw, *, keyless: bool) -> None:
        """Refuse what a web page of another origin sends, and names that are not this machine's.

        Raises:
            ApiError: 403.
        """
        host = (find(headers, b"host") or b"").decode("latin-1").lower()
        authorized = find(headers, b"authorization") is not None
        if keyless and not self._settings.allow_open and not self._is_local(host):
            message = (
                "Without API keys only this machine is answered, under its own names. Make a key "
                "(longtake keys create) to use another Host."
            )
            raise ApiError(403, message, code="host_not_allowed")
        if scope["method"] in SAFE_METHODS or (authorized and not keyless):
            return
        origin = find(headers, b"origin")
        site = find(headers, b"sec-fetch-site")
        if origin is None:
            foreign = site is not None and site not in OWN_FETCH
        else:
            text = origin.decode("latin-1")
            foreign = text not in self._origins and urlsplit(text).netloc.lower() != host
        if foreign:
            message = "A page of another origin may not change anything here."
            raise ApiError(403, message, code="cross_origin")

    def _is_local(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.removeprefix("[").removesuffix("]")
        if name in ("localhost", self._settings.host.lower()) or name.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    async def _identify(
        self,
        service: Service,
        scope: Scope,
        headers: Raw,
        extra: dict[bytes, bytes],
    ) -> Principal:
        """Whose request it is; counts it.

        Raises:
            ApiError: 401 or 429.
        """
        authenticator = service.authenticator
        header = find(headers, b"authorization")
        cookies = find(headers, b"cookie")
        text = header.decode("latin-1") if header is not None else None
        address = scope["client"][0] if scope.get("client") else "unknown"
        try:
            who = authenticator.cached(text)
            if who is None and text is None and cookies is not None:
                who = await run_in_threadpool(service.sessions.principal, cookies)
            if who is None:
                who = await run_in_threadpool(authenticator.principal, text)
        except ApiError:
            self._count(f"address {address}", self._settings.requests_per_minute, extra)
            raise
        name = f"key {who.id}" if authenticator.needs_keys else f"address {address}"
        self._count(name, who.limits.get("requests_per_minute", 0), extra)
        return who

    def _count(self, name: str, limit: int, extra: dict[bytes, bytes]) -> None:
        if limit <= 0:
            return
        rate: Rate = self._limiter.take(name, limit)
        extra.update({k.encode(): v.encode() for k, v in rate.headers.items()})
        if rate.wait_s:
            message = f"More than {limit} requests a minute; ask again in {rate.wait_s} s."
            raise ApiError(
                429, message, code="rate_limit_exceeded", headers=retry_after(rate.wait_s)
            )


class _Answer:
    """Sends an answer on with the headers that every one has."""

    def __init__(self, send: Send, extra: Mapping[bytes, bytes]) -> None:
        self._send = send
        self._extra = extra
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            message["headers"] = with_defaults(list(message.get("headers", ())), self._extra)
        await self._send(message)


class _Bounded:
    """Reads a body up to a limit; more is a 413, told before it is read where its length is."""

    def __init__(self, receive: Receive, limit: int, length: bytes | None) -> None:
        self._receive = receive
        self._limit = limit
        self._seen = 0
        if length is not None and length.isdigit() and int(length) > limit:
            raise _too_large(limit)

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            if self._seen > self._limit:
                raise _too_large(self._limit)
        return message


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"The body is larger than {limit} bytes.")
