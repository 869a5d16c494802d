"""Webhook deliveries: claimed from the database, signed, sent to checked addresses, tried again.

Standard Webhooks 1.0.0. Any API or worker process may run a ``Deliverer``; a claim on the
delivery's row keeps two of them from sending the same one. A delivery whose sender died is claimed
again, so a receiver may see one twice, under the same ``webhook-id``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from typing import ParamSpec, TypeVar

import httpx
from sqlalchemy.exc import SQLAlchemyError
from standardwebhooks import Webhook as Signer

from longtake.errors import NotFoundError, RequestError, ServiceError
from longtake.queue.net import AddressError, check_url, guarded_client
from longtake.queue.records import Delivery, Webhook
from longtake.queue.store import Store
from longtake.queue.subscriptions import DELIVERED, FAILED, PENDING
from longtake.settings import DAY_S, Settings

P = ParamSpec("P")
T = TypeVar("T")

LOG = logging.getLogger("longtake.webhooks")
# Waits between one try and the next; the first try has none.
RETRIES_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
JITTER = 0.1  # of a wait, more or less
LONGEST_WAIT_S = DAY_S
POLL_S = 1.0
ERROR_PAUSE_S = 5.0
MAX_AT_ONCE = 32
STOP_S = 3.0
CLAIM_MARGIN_S = 30.0  # a claim outlives the longest try by this
MAX_ANSWER_BYTES = 2000
MAX_PAYLOAD_BYTES = 20_000
TEST_ID = "video_test"  # the video that a test delivery tells of


@dataclass(frozen=True, slots=True)
class Answer:
    """What an endpoint said; ``status`` is None where it said nothing, ``text`` then says why."""

    status: int | None
    text: str
    retry_after_s: float = 0.0

    @property
    def good(self) -> bool:
        """True for 2xx."""
        return self.status is not None and 200 <= self.status < 300


def sign(webhook: Webhook, delivery_id: str, body: str, now: datetime) -> dict[str, str]:
    """The three headers of Standard Webhooks; for a day after a rotation both secrets sign.

    ``now`` is aware: the library takes a naive time for UTC, whatever it was.
    """
    if now.tzinfo is None:
        raise ValueError("the time of a signature needs its zone")
    now = now.astimezone(UTC)
    secrets = [webhook.secret]
    rotated_at = webhook.rotated_at or 0.0
    if webhook.previous_secret and now.timestamp() < rotated_at + DAY_S:
        secrets.append(webhook.previous_secret)
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": " ".join(Signer(one).sign(delivery_id, now, body) for one in secrets),
    }


def next_wait(attempt: int, answer: Answer) -> float | None:
    """Seconds until the try after ``attempt`` (from 1), without jitter; None for no further one."""
    if attempt > len(RETRIES_S) or answer.status == HTTPStatus.GONE:
        return None
    return min(max(RETRIES_S[attempt - 1], answer.retry_after_s), LONGEST_WAIT_S)


def retry_after(header: str | None, now: datetime) -> float:
    """Seconds that a ``Retry-After`` asks for, as a number or a date; 0 for none or nonsense."""
    text = (header or "").strip()
    if text.isascii() and text.isdecimal():
        return float(min(int(text), LONGEST_WAIT_S))
    try:
        wait_s = (parsedate_to_datetime(text) - now).total_seconds()
    except (TypeError, ValueError):
        return 0.0
    return min(max(wait_s, 0.0), LONGEST_WAIT_S)


class Deliverer:
    """Sends what is due until it is stopped. ``start`` gives it a thread of its own."""

    def __init__(self, store: Store, settings: Settings, *, poll_s: float = POLL_S) -> None:
        self._store = store
        self._settings = settings
        self._poll_s = poll_s
        self._lease_s = settings.webhook_timeout_s + CLAIM_MARGIN_S
        self._client: httpx.AsyncClient | None = None
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] | None = None

    def start(self) -> None:
        """Deliver from a thread of its own, until ``stop``."""
        ready = threading.Event()

        def body() -> None:
            asyncio.run(self._main(ready))

        self._thread = threading.Thread(target=body, name="webhooks", daemon=True)
        self._thread.start()
        ready.wait()

    def stop(self) -> None:
        """End the thread; a try in flight is given up and made again when its claim is over."""
        if self._thread is None or self._stop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._stop()
        self._thread.join(STOP_S)
        self._thread = self._stop = None

    async def run(self, stopping: asyncio.Event) -> None:
        """Deliver what is due, when it is due, until ``stopping``."""
        running: set[asyncio.Task[None]] = set()
        try:
            while not stopping.is_set():
                pause_s = self._poll_s
                try:
                    claimed = await self._claim(MAX_AT_ONCE - len(running))
                except SQLAlchemyError as error:
                    LOG.warning("deliveries cannot be read just now: %s", type(error).__name__)
                    claimed, pause_s = [], ERROR_PAUSE_S
                for delivery in claimed:
                    task = asyncio.create_task(self._guarded(delivery))
                    running.add(task)
                    task.add_done_callback(running.discard)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), pause_s)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self.close()

    async def once(self) -> int:
        """Deliver everything that is due now; returns how many tries that took."""
        claimed = await self._claim(MAX_AT_ONCE)
        await asyncio.gather(*(self.deliver(delivery) for delivery in claimed))
        return len(claimed)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def deliver(self, delivery: Delivery) -> Answer:
        """One try at a claimed delivery, and what follows from it."""
        try:
            webhook = await _thread(self._store.webhooks.get)(delivery.webhook_id)
        except NotFoundError:
            return Answer(None, "the endpoint is gone")
        if not webhook.enabled:
            answer = Answer(None, "the endpoint is disabled")
            await self._finish(delivery, FAILED, answer)
            return answer
        answer = await self._send(webhook, delivery)
        await self._settle(webhook, delivery, answer)
        return answer

    async def test(self, webhook: Webhook, event_type: str) -> Answer:
        """Send a test delivery now, once.

        Raises:
            ServiceError: another process has taken it, and does not tell of it in time.
        """
        made = await _thread(self._store.webhooks.send_test)(webhook.id, webhook.owner, event_type)
        claimed = await _thread(self._store.webhooks.claim)(made.id, self._lease_s)
        if claimed is not None:
            return await self.deliver(claimed)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._lease_s):
                while True:
                    for row in await _thread(self._store.webhooks.deliveries)(webhook.id):
                        if row.id == made.id and row.state != PENDING:
                            return Answer(row.status_code, row.response or "")
                    await asyncio.sleep(self._poll_s)
        raise ServiceError("The test delivery is still on its way; see the delivery log.")

    async def _main(self, ready: threading.Event) -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        # for the database and for names: slow ones must not keep the others waiting
        loop.set_default_executor(ThreadPoolExecutor(2 * MAX_AT_ONCE, "webhooks"))
        self._stop = partial(loop.call_soon_threadsafe, stopping.set)
        ready.set()
        await self.run(stopping)

    async def _claim(self, limit: int) -> list[Delivery]:
        if limit <= 0:
            return []
        return await _thread(self._store.webhooks.due)(limit, self._lease_s)

    async def _guarded(self, delivery: Delivery) -> None:
        try:
            await self.deliver(delivery)
        except Exception:
            # one delivery must not end the loop; its claim runs out and it is tried again
            LOG.exception("delivery %s could not be settled", delivery.id)

    async def _send(self, webhook: Webhook, delivery: Delivery) -> Answer:
        body = json.dumps(delivery.payload, separators=(",", ":"))
        if len(body) >= MAX_PAYLOAD_BYTES:
            return Answer(None, f"the payload has {len(body)} bytes")
        now = datetime.now(UTC)
        headers = sign(webhook, delivery.id, body, now) | {"Content-Type": "application/json"}
        private = self._settings.allow_private_addresses
        if self._client is None:
            timeout_s = self._settings.webhook_timeout_s
            self._client = guarded_client(timeout_s, allow_private=private)
        try:
            check_url(webhook.url, "url", allow_private=private)
            async with (
                asyncio.timeout(self._settings.webhook_timeout_s),
                self._client.stream("POST", webhook.url, content=body, headers=headers) as got,
            ):
                wait_s = retry_after(got.headers.get("retry-after"), now)
                return Answer(got.status_code, await _head(got), wait_s)
        except RequestError:
            return Answer(None, "the endpoint's URL is not one to be connected to")
        except (TimeoutError, httpx.TimeoutException):
            return Answer(None, f"no answer in {self._settings.webhook_timeout_s:g} s")
        except AddressError as error:
            return Answer(None, str(error))
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            return Answer(None, f"no answer: {type(error).__name__}")

    async def _settle(self, webhook: Webhook, delivery: Delivery, answer: Answer) -> None:
        test = delivery.payload.get("data", {}).get("id") == TEST_ID
        wait_s = None if test else next_wait(delivery.attempt, answer)
        if answer.good:
            await self._finish(delivery, DELIVERED, answer)
        elif wait_s is None:
            await self._finish(delivery, FAILED, answer)
        else:
            spread = random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - spreads load, no secret
            # never sooner than the endpoint asked
            wait_s = max(wait_s * spread, answer.retry_after_s)
            await self._finish(delivery, PENDING, answer, time.time() + wait_s)
        if answer.status == HTTPStatus.GONE and webhook.enabled:
            await _thread(self._store.webhooks.update)(webhook.id, None, {"enabled": False})
            LOG.info("webhook %s answered 410 and is disabled", webhook.id)

    async def _finish(
        self, delivery: Delivery, state: str, answer: Answer, next_at: float | None = None
    ) -> None:
        finish = _thread(self._store.webhooks.finish)
        await finish(delivery.id, state, answer.status, answer.text, next_at)


async def _head(answer: httpx.Response) -> str:
    """The first characters of an answer's body, for the delivery log."""
    head = b""
    async for block in answer.aiter_raw():
        head += block
        if len(head) >= MAX_ANSWER_BYTES:
            break
    return head[:MAX_ANSWER_BYTES].decode(errors="replace").replace("\x00", "\ufffd")


def _thread(call: Callable[P, T]) -> Callable[P, Awaitable[T]]:
    """``call`` as a coroutine function that runs it in a thread: the database blocks."""

    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(call, *args, **kwargs)

    return run
