"""Webhook endpoints of an owner, as OpenAI's SDK speaks of them, and their delivery log.

The routes stand under ``/v1/webhooks`` and, for the SDK, under ``/v1/webhook_endpoints`` too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

from fastapi import APIRouter, Body, FastAPI, Path, Query, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from longtake.api.auth import Owner
from longtake.api.errors import problems
from longtake.api.objects import JsonResponse
from longtake.api.schemas import Text
from longtake.api.service import Service, ServiceDep
from longtake.errors import ConflictError, NotFoundError, RequestError
from longtake.queue.net import MAX_URL_CHARACTERS, AddressError, check_url, resolve
from longtake.queue.records import Delivery, Webhook
from longtake.queue.subscriptions import EVENT_TYPES
from longtake.queue.webhooks import Deliverer

P = ParamSpec("P")
T = TypeVar("T")

MAX_WEBHOOKS = 50  # of one owner
MAX_NAME = 120
READ = problems(400, 401, 403, 404, 429, 503)
CHANGED = READ | problems(409, 413)


def _one_line(value: str) -> str:
    if not value.strip() or any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise ValueError("is empty or holds control characters")
    return value.strip()


Name = Annotated[Text, Field(max_length=MAX_NAME), AfterValidator(_one_line)]
Url = Annotated[Text, Field(max_length=MAX_URL_CHARACTERS)]
Types = Annotated[list[Text], Field(min_length=1, max_length=len(EVENT_TYPES))]
WebhookId = Annotated[str, Path(max_length=64, description="id of a webhook endpoint")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewWebhook(_Body):
    """An endpoint that wants to be told."""

    name: Name
    url: Url = Field(description="http or https; its host must be a public one")
    event_types: Types = Field(description="what it wants: see GET /v1/webhook_event_types")


class ChangeWebhook(_Body):
    """What is to change; an endpoint that answered 410 is disabled until ``enabled`` again."""

    name: Name | None = None
    url: Url | None = None
    event_types: Types | None = None
    enabled: bool | None = None


class RotateSecret(_Body):
    """How to rotate: with the old secret kept, both sign for a day."""

    keep_old_secret_active_for_24_hours: bool = True


class TestWebhook(_Body):
    """What to tell of."""

    event_type: Text


class WebhookEndpoint(BaseModel):
    """An endpoint; ``signing_secret`` is told on creation and rotation only."""

    id: str
    object: Literal["webhook_endpoint"]
    name: str
    url: str
    event_types: list[str]
    enabled: bool
    created_at: int
    signing_secret_hint: str
    signing_secret: str | None = None


class WebhookEndpointList(BaseModel):
    """A page; the next one is ``after=last_id``."""

    object: Literal["list"]
    data: list[WebhookEndpoint]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedWebhook(BaseModel):
    """An endpoint that is gone."""

    id: str
    object: Literal["webhook_endpoint.deleted"]
    deleted: Literal[True]


class WebhookTest(BaseModel):
    """How a test delivery was answered; ``success`` says that it was, whatever the status."""

    object: Literal["webhook_endpoint.test"]
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: Literal[True]


class WebhookDelivery(BaseModel):
    """One event for one endpoint, and how the last try at it went."""

    id: str
    object: Literal["webhook_delivery"]
    type: str
    state: Literal["pending", "delivered", "failed"]
    attempt: int
    status_code: int | None
    response: str | None
    created_at: int
    next_at: int | None
    finished_at: int | None
    payload: dict[str, Any]


class WebhookDeliveryList(BaseModel):
    """A page of the log, newest first."""

    object: Literal["list"]
    data: list[WebhookDelivery]
    first_id: str | None
    last_id: str | None
    has_more: bool


class EventTypeList(BaseModel):
    """What endpoints can be told of."""

    object: Literal["list"]
    data: list[str]


endpoints = APIRouter(tags=["webhooks"])


class Page(BaseModel):
    """Which part of a list."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = Field(None, max_length=64, description="last_id of the page before")
    limit: int = Field(20, ge=1, le=100)


PageQuery = Annotated[Page, Query()]


@endpoints.post("", response_model=WebhookEndpoint, responses=CHANGED)
async def create_webhook(body: NewWebhook, service: ServiceDep, who: Owner) -> Response:
    """Have an endpoint told of events. The answer alone holds its signing secret."""
    types = _known(body.event_types)
    await _check_target(service, body.url)
    webhooks = service.store.webhooks
    if len(await _call(webhooks.list, who.id)) >= MAX_WEBHOOKS:
        raise ConflictError(f"There are {MAX_WEBHOOKS} webhooks; delete one.", "too_many_webhooks")
    made = await _call(webhooks.create, who.id, body.name, body.url, types)
    return JsonResponse(_object(made, secret=True))


@endpoints.get("", response_model=WebhookEndpointList, responses=READ)
def list_webhooks(service: ServiceDep, who: Owner, page: PageQuery) -> Response:
    """The caller's endpoints, oldest first."""
    found = service.store.webhooks.list(who.id)
    if page.after is not None:
        ids = [one.id for one in found]
        if page.after not in ids:
            raise NotFoundError("webhook", page.after)
        found = found[ids.index(page.after) + 1 :]
    return _list([_object(one) for one in found[: page.limit + 1]], page.limit)


@endpoints.get("/{webhook_id}", response_model=WebhookEndpoint, responses=READ)
def get_webhook(webhook_id: WebhookId, service: ServiceDep, who: Owner) -> Response:
    """One endpoint."""
    return JsonResponse(_object(service.store.webhooks.get(webhook_id, who.id)))


@endpoints.post("/{webhook_id}", response_model=WebhookEndpoint, responses=CHANGED)
async def update_webhook(
    webhook_id: WebhookId, body: ChangeWebhook, service: ServiceDep, who: Owner
) -> Response:
    """Change an endpoint; what is left out stays."""
    await _call(service.store.webhooks.get, webhook_id, who.id)
    changes: dict[str, Any] = body.model_dump(exclude_none=True)
    if body.event_types is not None:
        changes["event_types"] = _known(body.event_types)
    if body.url is not None:
        await _check_target(service, body.url)
    changed = await _call(service.store.webhooks.update, webhook_id, who.id, changes)
    return JsonResponse(_object(changed))


@endpoints.delete("/{webhook_id}", response_model=DeletedWebhook, responses=READ)
def delete_webhook(webhook_id: WebhookId, service: ServiceDep, who: Owner) -> Response:
    """Remove an endpoint, what it is still owed and its log."""
    service.store.webhooks.delete(webhook_id, who.id)
    return JsonResponse({"id": webhook_id, "object": "webhook_endpoint.deleted", "deleted": True})


@endpoints.post("/{webhook_id}/rotate_secret", response_model=WebhookEndpoint, responses=CHANGED)
def rotate_secret(
    webhook_id: WebhookId,
    service: ServiceDep,
    who: Owner,
    body: Annotated[RotateSecret | None, Body()] = None,
) -> Response:
    """A new signing secret, told in the answer alone."""
    keep_old = body is None or body.keep_old_secret_active_for_24_hours
    changed = service.store.webhooks.rotate(webhook_id, who.id, keep_old=keep_old)
    return JsonResponse(_object(changed, secret=True))


@endpoints.post("/{webhook_id}/test", response_model=WebhookTest, responses=CHANGED)
async def test_webhook(
    webhook_id: WebhookId, body: TestWebhook, service: ServiceDep, who: Owner
) -> Response:
    """Send one signed sample now; 400 where nothing answers."""
    [event_type] = _known([body.event_type], "event_type")
    webhook = await _call(service.store.webhooks.get, webhook_id, who.id)
    deliverer = Deliverer(service.store, service.settings)
    try:
        answer = await deliverer.test(webhook, event_type)
    finally:
        await deliverer.close()
    if answer.status is None:
        raise RequestError("url", webhook.url, answer.text)
    return JsonResponse(
        {
            "object": "webhook_endpoint.test",
            "webhook_endpoint_id": webhook.id,
            "event_type": event_type,
            "status_code": answer.status,
            "success": True,
        }
    )


@endpoints.get("/{webhook_id}/deliveries", response_model=WebhookDeliveryList, responses=READ)
def list_deliveries(
    webhook_id: WebhookId, service: ServiceDep, who: Owner, page: PageQuery
) -> Response:
    """What the endpoint was and will be told, newest first."""
    webhook = service.store.webhooks.get(webhook_id, who.id)
    found = service.store.webhooks.deliveries(webhook.id, page.after, page.limit + 1)
    return _list([_delivery(one) for one in found], page.limit)


@asynccontextmanager
async def _deliver(app: FastAPI) -> AsyncIterator[None]:
    """Deliver what is due while the application runs; its service is open by then."""
    service = app.state.service
    deliverer = Deliverer(service.store, service.settings)
    deliverer.start()
    try:
        yield
    finally:
        await run_in_threadpool(deliverer.stop)


router = APIRouter(lifespan=_deliver)
router.include_router(endpoints, prefix="/v1/webhooks")
router.include_router(endpoints, prefix="/v1/webhook_endpoints", include_in_schema=False)


@router.get(
    "/v1/webhook_event_types",
    response_model=EventTypeList,
    responses=problems(401, 403, 429),
    tags=["webhooks"],
)
def list_event_types() -> Response:
    """What endpoints can be told of."""
    return JsonResponse({"object": "list", "data": list(EVENT_TYPES)})


def _known(types: list[str], field: str = "event_types") -> list[str]:
    """The types, each once.

    Raises:
        RequestError: there is no such type.
    """
    for name in types:
        if name not in EVENT_TYPES:
            raise RequestError(field, name, "no such event type", ", ".join(EVENT_TYPES))
    return list(dict.fromkeys(types))


async def _check_target(service: Service, url: str) -> None:
    """Refuse a URL that must not be connected to, as far as can be known now.

    A name that has no address just now is taken: it is looked up anew with every delivery.

    Raises:
        RequestError: it must not.
    """
    private = service.settings.allow_private_addresses
    parsed = check_url(url, "url", allow_private=private)
    try:
        await resolve(parsed, allow_private=private)
    except AddressError as error:
        if not error.unknown:
            raise RequestError("url", url, str(error)) from None


def _call(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
    return run_in_threadpool(partial(call, *args, **kwargs))


def _object(webhook: Webhook, *, secret: bool = False) -> dict[str, Any]:
    shown = {
        "id": webhook.id,
        "object": "webhook_endpoint",
        "name": webhook.name,
        "url": webhook.url,
        "event_types": list(webhook.event_types),
        "enabled": webhook.enabled,
        "created_at": int(webhook.created_at),
        "signing_secret_hint": f"whsec_...{webhook.secret[-4:]}",
    }
    return {**shown, "signing_secret": webhook.secret} if secret else shown


def _delivery(delivery: Delivery) -> dict[str, Any]:
    pending = delivery.state == "pending"
    return {
        "id": delivery.id,
        "object": "webhook_delivery",
        "type": delivery.type,
        "state": delivery.state,
        "attempt": delivery.attempt,
        "status_code": delivery.status_code,
        "response": delivery.response,
        "created_at": int(delivery.created_at),
        "next_at": int(delivery.next_at) if pending else None,
        "finished_at": int(delivery.finished_at) if delivery.finished_at is not None else None,
        "payload": delivery.payload,
    }


def _list(found: list[dict[str, Any]], limit: int) -> JsonResponse:
    data = found[:limit]
    return JsonResponse(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(found) > limit,
        }
    )
