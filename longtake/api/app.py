"""The application: ``create_app`` is what uvicorn calls as a factory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from longtake import __version__
from longtake.api import (
    batches,
    errors,
    events,
    gallery,
    health,
    jobs,
    media,
    metrics,
    models,
    videos,
    webhooks,
    workers,
)
from longtake.api.guard import Guard
from longtake.api.openapi import describe_webhooks, install_openapi
from longtake.api.service import open_service
from longtake.settings import Settings

DESCRIPTION = "Long videos from open models, made by durable jobs. Speaks OpenAI's Videos API."
EXPOSED = (
    "etag",
    "content-range",
    "accept-ranges",
    "openai-poll-after-ms",
    "ratelimit",
    "ratelimit-policy",
    "retry-after",
    "x-request-id",
    "x-should-retry",
)
# jobs before videos: /plan is no video's id
ROUTERS: tuple[APIRouter, ...] = tuple(
    module.router
    for module in (
        *(jobs, videos, media, models, events, batches),
        *(webhooks, workers, health, metrics),
    )
)


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application of ``settings``, or of the environment's.

    The database is opened when it starts (ASGI lifespan); ``app.state.service`` holds it then.
    """
    settings = settings or Settings()
    app = FastAPI(
        title="longtake",
        version=__version__,
        summary=DESCRIPTION,
        generate_unique_id_function=lambda route: route.name,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.settings = settings
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)
    _answer_head(app)
    describe_webhooks(app)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "HEAD", "POST", "PATCH", "PUT", "DELETE"],
            allow_headers=["authorization", "content-type", "idempotency-key", "last-event-id"],
            expose_headers=EXPOSED,
        )
    app.add_middleware(Guard, settings=settings)
    metrics.install(app)  # around the guard, so that it sees refusals too
    gallery.install(app)  # outermost: the login needs no key
    base = settings.base_path.rstrip("/")
    if base:
        app.add_middleware(BasePath, path=base)
    install_openapi(app)
    return app


class BasePath:
    """ASGI middleware: the path under which a proxy serves the API, whether it cuts it off or not.

    Routing takes it off where it is there, and links are made with it.
    """

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and not scope.get("root_path"):
            scope["root_path"] = self._path
        await self._app(scope, receive, send)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service = await run_in_threadpool(open_service, app.state.settings)
    service.start()
    app.state.service = service
    try:
        yield
    finally:
        await run_in_threadpool(service.close)


def _answer_head(app: FastAPI) -> None:
    """Answer HEAD wherever GET is; a HEAD on a stream of events would never end."""
    for router in ROUTERS:
        for route in router.routes if router is not events.router else ():
            if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
                app.router.add_api_route(
                    route.path, route.endpoint, methods=["HEAD"], include_in_schema=False
                )
