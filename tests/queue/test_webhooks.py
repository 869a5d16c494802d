"""Deliveries to a real endpoint: signed, tried again on schedule, sent once by many senders."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import openai
import pytest
from sqlalchemy import update
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError

from longtake.queue.database import open_database
from longtake.queue.records import Delivery, Webhook
from longtake.queue.store import Store
from longtake.queue.tables import deliveries
from longtake.queue.webhooks import RETRIES_S, Answer, Deliverer, next_wait, retry_after, sign
from longtake.settings import DAY_S, Settings

if TYPE_CHECKING:
    from tests.queue.conftest import Desk

SETTINGS = Settings(allow_private_addresses=True, webhook_timeout_s=5)


class Endpoint(ThreadingHTTPServer):
    """Keeps what it is sent, as (headers, body), and answers ``status`` with ``headers``."""

    daemon_threads = True

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], str]] = []
        self.status = 200
        self.headers: dict[str, str] = {}
        self.body = b"thanks"
        self.hang: threading.Event | None = None
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                headers = {name.lower(): value for name, value in self.headers.items()}
                endpoint.got.append((headers, body))
                if endpoint.hang is not None:
                    endpoint.hang.wait()
                self.send_response(endpoint.status)
                for name, value in endpoint.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(endpoint.body)

            do_GET = do_POST  # noqa: N815 - a redirect that is followed may become one

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/hook"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    if server.hang is not None:
        server.hang.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def light(sqlite_url: str) -> Iterator[Store]:
    """A store on SQLite alone."""
    db = open_database(sqlite_url)
    yield Store(db)
    db.dispose()


def subscribe(store: Store, endpoint: Endpoint) -> Webhook:
    return store.webhooks.create("local", "mine", endpoint.url, ["video.completed"])


def owe(store: Store, webhook: Webhook) -> str:
    """A delivery that is due now; its id."""
    with store.db.write() as conn:
        store.webhooks.enqueue(conn, webhook.owner, "video.completed", "video_1")
    return store.webhooks.deliveries(webhook.id)[0].id


def make_due(store: Store) -> None:
    """Let every waiting delivery's time have come."""
    with store.db.write() as conn:
        conn.execute(update(deliveries).values(next_at=0.0, claimed_until=0.0))


def deliver(store: Store, settings: Settings = SETTINGS) -> int:
    """One round of a deliverer."""

    async def run() -> int:
        deliverer = Deliverer(store, settings)
        try:
            return await deliverer.once()
        finally:
            await deliverer.close()

    return asyncio.run(run())


def log(store: Store, webhook: Webhook) -> Delivery:
    """The newest delivery."""
    return store.webhooks.deliveries(webhook.id)[0]


def test_a_finished_video_is_told_signed_and_once(desk: Desk, endpoint: Endpoint) -> None:
    """Two senders at a time, on both databases; every verifier accepts what one of them sends."""
    store = desk.store
    webhook = subscribe(store, endpoint)
    job = desk.submit()
    desk.complete(desk.claim())

    async def both() -> int:
        senders = [Deliverer(store, SETTINGS), Deliverer(store, SETTINGS)]
        try:
            return sum(await asyncio.gather(*(one.once() for one in senders)))
        finally:
            for one in senders:
                await one.close()

    assert asyncio.run(both()) == 1
    [(headers, body)] = endpoint.got
    payload = Verifier(webhook.secret).verify(body, headers)
    assert (payload["type"], payload["data"]) == ("video.completed", {"id": job.id})
    assert payload["id"] == headers["webhook-id"]
    assert payload["object"] == "event"
    assert headers["content-type"] == "application/json"
    assert len(body) < 20_000
    client = openai.OpenAI(api_key="none", webhook_secret=webhook.secret)
    event = client.webhooks.unwrap(body, headers)
    assert (event.type, getattr(event.data, "id", None)) == ("video.completed", job.id)
    client.close()
    told = log(store, webhook)
    assert (told.state, told.status_code, told.response) == ("delivered", 200, "thanks")
    assert deliver(store) == 0


def test_a_failed_try_is_made_again_under_the_same_id_until_tries_run_out(
    light: Store, endpoint: Endpoint
) -> None:
    webhook = subscribe(light, endpoint)
    delivery_id = owe(light, webhook)
    endpoint.status, endpoint.body = 500, b"broken\x00" + b"x" * 5000
    for wait_s in RETRIES_S:
        before = time.time()
        assert deliver(light) == 1
        told = log(light, webhook)
        assert told.state == "pending"
        assert 0.89 * wait_s < told.next_at - before < 1.11 * wait_s + 60
        assert deliver(light) == 0  # not before its time
        make_due(light)
    assert deliver(light) == 1

    told = log(light, webhook)
    assert (told.state, told.attempt, told.status_code) == ("failed", len(RETRIES_S) + 1, 500)
    assert told.response is not None
    assert told.response.startswith("broken\ufffd")
    assert len(told.response) <= 2000
    assert {headers["webhook-id"] for headers, _ in endpoint.got} == {delivery_id}
    assert len({body for _, body in endpoint.got}) == 1
    assert len(endpoint.got) == 10
    make_due(light)
    assert deliver(light) == 0


def test_the_schedule_is_that_of_standard_webhooks() -> None:
    assert RETRIES_S == (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
    assert next_wait(1, Answer(500, "")) == 5
    assert next_wait(1, Answer(429, "", retry_after_s=77)) == 77
    assert next_wait(9, Answer(429, "", retry_after_s=77)) == 86_400
    assert next_wait(10, Answer(500, "")) is None
    assert next_wait(1, Answer(410, "")) is None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0),
        ("", 0),
        ("120", 120),
        ("99999999999", 86_400),
        ("-5", 0),
        ("soon", 0),
        ("١٢", 0),
        (format_datetime(datetime(2030, 1, 1, 0, 1, tzinfo=UTC), usegmt=True), 60),
        (format_datetime(datetime(2029, 1, 1, tzinfo=UTC), usegmt=True), 0),
        ("Tue, 01 Jan 2030 00:01:00 -0000", 0),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: int) -> None:
    assert retry_after(header, datetime(2030, 1, 1, tzinfo=UTC)) == seconds


def test_an_endpoint_that_asks_for_time_is_given_it(
    light: Store, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the spread would make the wait shorter."""
    monkeypatch.setattr("longtake.queue.webhooks.random.uniform", lambda low, _: low)
    webhook = subscribe(light, endpoint)
    owe(light, webhook)
    endpoint.status, endpoint.headers = 429, {"Retry-After": "1000"}
    before = time.time()

    deliver(light)

    assert log(light, webhook).next_at >= before + 1000


def test_a_redirect_is_a_failure_and_not_followed(light: Store, endpoint: Endpoint) -> None:
    webhook = subscribe(light, endpoint)
    owe(light, webhook)
    endpoint.status, endpoint.headers = 307, {"Location": endpoint.url}

    deliver(light)

    assert len(endpoint.got) == 1
    told = log(light, webhook)
    assert (told.state, told.status_code) == ("pending", 307)


def test_410_disables_the_endpoint_and_what_it_is_still_owed(
    light: Store, endpoint: Endpoint
) -> None:
    webhook = subscribe(light, endpoint)
    owe(light, webhook)
    endpoint.status = 410
    deliver(light)
    assert log(light, webhook).state == "failed"
    assert not light.webhooks.get(webhook.id).enabled

    light.webhooks.update(webhook.id, None, {"enabled": True})
    owe(light, webhook)
    light.webhooks.update(webhook.id, None, {"enabled": False})
    deliver(light)
    told = log(light, webhook)
    assert (told.state, told.response) == ("failed", "the endpoint is disabled")
    assert len(endpoint.got) == 1


def verifies(secret: str, endpoint: Endpoint) -> bool:
    headers, body = endpoint.got[-1]
    try:
        Verifier(secret).verify(body, headers)
    except WebhookVerificationError:
        return False
    return True


def test_for_a_day_after_a_rotation_both_secrets_sign(light: Store, endpoint: Endpoint) -> None:
    old = subscribe(light, endpoint)
    new = light.webhooks.rotate(old.id, None)
    owe(light, new)
    deliver(light)
    assert verifies(old.secret, endpoint)
    assert verifies(new.secret, endpoint)

    later = datetime.fromtimestamp(float(new.rotated_at or 0), UTC) + timedelta(seconds=DAY_S + 1)
    assert sign(new, "evt_1", "{}", later)["webhook-signature"].count("v1,") == 1
    only = light.webhooks.rotate(old.id, None, keep_old=False)
    owe(light, only)
    deliver(light)
    assert verifies(only.secret, endpoint)
    assert not verifies(new.secret, endpoint)


def test_a_naive_time_is_not_signed(light: Store, endpoint: Endpoint) -> None:
    """The library would take a local time for UTC, and the receiver would refuse it."""
    webhook = subscribe(light, endpoint)
    with pytest.raises(ValueError, match="zone"):
        sign(webhook, "evt_1", "{}", datetime.now())
    there = datetime.now(UTC).astimezone(timezone(timedelta(hours=5)))
    Verifier(webhook.secret).verify("{}", sign(webhook, "evt_1", "{}", there))


def test_an_endpoint_that_says_nothing_is_given_up_in_time(
    light: Store, endpoint: Endpoint
) -> None:
    webhook = subscribe(light, endpoint)
    owe(light, webhook)
    endpoint.hang = threading.Event()
    settings = Settings(allow_private_addresses=True, webhook_timeout_s=0.2)

    deliver(light, settings)

    told = log(light, webhook)
    assert (told.state, told.response) == ("pending", "no answer in 0.2 s")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433"])
def test_a_private_endpoint_is_not_connected_to(
    light: Store, endpoint: Endpoint, host: str
) -> None:
    """Also one that was stored while the settings allowed it, or whose name has moved."""
    url = f"http://{host}:{endpoint.server_port}/hook"
    webhook = light.webhooks.create("local", "mine", url, ["video.completed"])
    owe(light, webhook)

    assert deliver(light, Settings()) == 1

    assert not endpoint.got
    told = log(light, webhook)
    assert (told.state, told.status_code) == ("pending", None)


def test_a_delivery_whose_sender_died_is_sent_by_another(store: Store, endpoint: Endpoint) -> None:
    webhook = subscribe(store, endpoint)
    owe(store, webhook)
    assert len(store.webhooks.due(10, lease_s=60)) == 1
    assert deliver(store) == 0
    make_due(store)  # the claim is over

    assert deliver(store) == 1
    assert log(store, webhook).attempt == 2
    assert len(endpoint.got) == 1


def test_a_sample_is_sent_at_once_and_never_again(light: Store, endpoint: Endpoint) -> None:
    webhook = subscribe(light, endpoint)
    endpoint.status = 503

    async def run() -> Answer:
        deliverer = Deliverer(light, SETTINGS)
        try:
            return await deliverer.test(webhook, "video.failed")
        finally:
            await deliverer.close()

    assert asyncio.run(run()).status == 503
    told = log(light, webhook)
    assert (told.type, told.state) == ("video.failed", "failed")
    headers, body = endpoint.got[0]
    assert Verifier(webhook.secret).verify(body, headers) == told.payload == json.loads(body)


def wait_for(condition: Callable[[], bool]) -> None:
    """Until ``condition`` holds; the test's own time limit is the end of patience."""
    while not condition():
        threading.Event().wait(0.01)


def test_the_thread_delivers_until_it_is_stopped(light: Store, endpoint: Endpoint) -> None:
    webhook = subscribe(light, endpoint)
    deliverer = Deliverer(light, SETTINGS, poll_s=0.01)
    before = set(threading.enumerate())
    deliverer.start()
    try:
        owe(light, webhook)
        wait_for(lambda: log(light, webhook).state == "delivered")
    finally:
        deliverer.stop()
    owe(light, webhook)
    started = set(threading.enumerate()) - before
    assert not [thread for thread in started if thread.name == "webhooks"]
    assert log(light, webhook).state == "pending"


def test_a_slow_endpoint_does_not_hold_up_another(light: Store, endpoint: Endpoint) -> None:
    slow = Endpoint()
    slow.hang = threading.Event()
    threading.Thread(target=slow.serve_forever, args=(0.01,), daemon=True).start()
    for _ in range(3):
        owe(light, subscribe(light, slow))
    webhook = light.webhooks.create("other", "mine", endpoint.url, ["video.completed"])
    owe(light, webhook)
    deliverer = Deliverer(light, SETTINGS, poll_s=0.01)
    deliverer.start()
    try:
        wait_for(lambda: log(light, webhook).state == "delivered")
        assert not slow.hang.is_set()
    finally:
        slow.hang.set()
        deliverer.stop()
        slow.shutdown()
        slow.server_close()
