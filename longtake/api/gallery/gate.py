"""In front of the door: the files and the login, which need no key.

A page that is refused for want of a key becomes the login, which trades a key for a session cookie
(``longtake.api.sessions``); the door takes that in place of an ``Authorization``.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longtake.api.gallery import pages, parts
from longtake.api.gallery.render import STATIC, base_of, render, static_version
from longtake.api.headers import find
from longtake.api.sessions import COOKIE, SESSION_S

STATIC_PATH = "/gallery/static"
LOGIN_PATH, LOGOUT_PATH = "/login", "/logout"
MAX_FORM = 4096
YEAR_S = 31_536_000


def install(app: FastAPI) -> None:
    """Give ``app`` the gallery, once; its middleware must be the last that is added."""
    if getattr(app.state, "gallery", False):
        return
    app.state.gallery = True
    app.include_router(pages.router)
    app.include_router(parts.router)
    app.add_middleware(Gate)


class Gate:
    """ASGI middleware, outermost."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open = Starlette(
            routes=[
                Mount(f"{STATIC_PATH}/{{version}}", _Files(directory=STATIC), name="static"),
                Route(LOGIN_PATH, self._login, methods=["GET", "POST"]),
                Route(LOGOUT_PATH, self._logout, methods=["POST"]),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = _path(scope)
        if path.startswith(f"{STATIC_PATH}/") or path in (LOGIN_PATH, LOGOUT_PATH):
            # the inner application puts itself into its scope
            scope.setdefault("state", {})["sessions"] = scope["app"].state.service.sessions
            await self._open(scope, receive, send)
            return
        headers = scope["headers"]
        wants_page = b"text/html" in (find(headers, b"accept") or b"")
        whole = find(headers, b"hx-request") is None
        page = scope["method"] == "GET" and wants_page and whole
        await self._app(scope, receive, _ToLogin(scope, receive, send) if page else send)

    async def _login(self, request: Request) -> Response:
        target = _safe_target(request.query_params.get("next", ""))
        if request.method == "GET":
            return render(request, "login.html", target=target, wrong=False)
        if _foreign(request):
            return render(request, "error.html", 403, title="Refused", text="Log in from here.")
        secret = (await _form(request)).get("key", "").strip()
        cookie = await run_in_threadpool(request.state.sessions.sign_in, secret) if secret else None
        if cookie is None:
            return render(request, "login.html", 401, target=target, wrong=True)
        answer = RedirectResponse(f"{base_of(request)}{target}", 303)
        answer.set_cookie(COOKIE, cookie, max_age=SESSION_S, **_cookie_options(request))
        return answer

    async def _logout(self, request: Request) -> Response:
        if _foreign(request):
            return render(request, "error.html", 403, title="Refused", text="Log out from here.")
        answer = RedirectResponse(f"{base_of(request)}{LOGIN_PATH}", 303)
        answer.delete_cookie(COOKIE, **_cookie_options(request))
        return answer


class _Files(StaticFiles):
    """The files of this version, kept by browsers for good; those of another are not here."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        current = scope["path_params"].get("version") == static_version()
        keep = f"public, max-age={YEAR_S}, immutable" if current else "no-cache"
        answer.headers["cache-control"] = keep
        answer.headers["x-content-type-options"] = "nosniff"
        return answer


class _ToLogin:
    """Sends an answer on, and the login in place of a 401."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._replaced = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 401:
            self._replaced = True
            request = Request(self._scope)
            query = f"?{request.url.query}" if request.url.query else ""
            target = quote(_path(self._scope) + query, safe="/")
            login = f"{base_of(request)}{LOGIN_PATH}?next={target}"
            await RedirectResponse(login, 303)(self._scope, self._receive, self._send)
        elif not self._replaced:
            await self._send(message)


def _path(scope: Scope) -> str:
    root = str(scope.get("root_path", "")).rstrip("/")
    path: str = scope["path"]
    return path.removeprefix(root) if root else path


def _safe_target(path: str) -> str:
    """A path of ours; anything that a browser could take for another host becomes ``/``."""
    good = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if good else "/"


def _foreign(request: Request) -> bool:
    """True if a page of another origin sent the form."""
    origin = request.headers.get("origin")
    if origin is None:
        return request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
    return urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower()


async def _form(request: Request) -> dict[str, str]:
    """The fields of a small urlencoded form."""
    body = b""
    async for block in request.stream():
        body += block
        if len(body) > MAX_FORM:
            return {}
    fields = parse_qs(body.decode("latin-1"), max_num_fields=8)
    return {name: values[0] for name, values in fields.items()}


def _cookie_options(request: Request) -> dict[str, Any]:
    return {
        "path": f"{base_of(request)}/",
        "httponly": True,
        "samesite": "strict",
        "secure": request.url.scheme == "https",
    }
