"""Templates and the headers of pages: everything is escaped, nothing inline may run or style."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse

from longtake import __version__
from longtake.api.gallery import texts
from longtake.queue.records import LOCAL_OWNER

HERE = Path(__file__).parent
STATIC = HERE / "static"
# htmx may neither inject its indicator's style nor keep pages in the browser's storage
HTMX_CONFIG = {
    "includeIndicatorCSS": False,
    "extensions": "sse",
    "history": "reload",
    "defaultSwap": "outerHTML",
    "defaultSettleDelay": 0,
    "sse": {"pauseOnBackground": False, "reconnectDelay": 400, "reconnectMaxDelay": 3000},
}
CSP = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
PAGE_HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
    "vary": "HX-Request, Cookie",
}


@cache
def static_version() -> str:
    """Names the files as they are now, so that browsers may keep them for good."""
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(STATIC.rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(texts.FILTERS)
    environment.globals.update(htmx_config=HTMX_CONFIG, version=__version__)
    return environment


def base_of(request: Request) -> str:
    """The path under which the service is served, without a slash at its end."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def is_part(request: Request) -> bool:
    """True where htmx or a module asks for a part of the page and not for all of it."""
    restoring = request.headers.get("hx-history-restore-request") == "true"
    return request.headers.get("hx-request") == "true" and not restoring


def render(request: Request, name: str, status: int = 200, **context: Any) -> HTMLResponse:
    """A template as an answer."""
    base = base_of(request)
    principal = getattr(request.state, "principal", None)
    keyed = principal is not None and principal.id != LOCAL_OWNER
    signed_in = (principal.name or "signed in") if principal is not None and keyed else None
    text = (
        _environment()
        .get_template(name)
        .render(
            base=base,
            static=f"{base}/gallery/static/{static_version()}",
            signed_in=signed_in,
            **{"nav": "", "since": 0, **context},
        )
    )
    return HTMLResponse(text, status, headers=PAGE_HEADERS)
