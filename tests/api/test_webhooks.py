"""Webhook endpoints over HTTP, by hand and by OpenAI's SDK."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import openai
import pytest

from longtake.api import webhooks as routes

if TYPE_CHECKING:
    from tests.api.conftest import MakeSite, Site

NEW = {"name": "mine", "url": "https://hooks.example/a", "event_types": ["video.completed"]}


class Receiver(ThreadingHTTPServer):
    """An endpoint that keeps bodies and headers, and wakes who waits for them."""

    daemon_threads = True

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], str]] = []
        self.arrived = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                receiver.got.append((dict(self.headers.items()), body))
                receiver.arrived.set()
                self.send_response(202)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/hook"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def create(site: Site, **changes: Any) -> dict[str, Any]:
    answer = site.http.post("/v1/webhooks", json={**NEW, **changes})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def test_a_secret_is_told_on_creation_and_rotation_only(api: Site) -> None:
    made = create(api)
    assert made["signing_secret"].startswith("whsec_")
    path = f"/v1/webhooks/{made['id']}"
    shown = [
        api.http.get(path).json(),
        api.http.post(path, json={"name": "yours"}).json(),
        api.http.get("/v1/webhooks").json()["data"][0],
    ]
    assert all("signing_secret" not in one for one in shown)
    assert shown[0]["signing_secret_hint"].endswith(made["signing_secret"][-4:])

    rotated = api.http.post(f"{path}/rotate_secret").json()

    assert rotated["signing_secret"] != made["signing_secret"]
    stored = api.service.store.webhooks.get(made["id"])
    assert stored.previous_secret == made["signing_secret"]
    body = {"keep_old_secret_active_for_24_hours": False}
    assert api.http.post(f"{path}/rotate_secret", json=body).status_code == 200
    assert api.service.store.webhooks.get(made["id"]).previous_secret is None


def test_openais_sdk_manages_endpoints_and_receives_what_they_are_sent(
    make_site: MakeSite, receiver: Receiver
) -> None:
    site = make_site(allow_private_addresses=True)
    client = openai.OpenAI(api_key="none", base_url=f"{site.url}/v1", max_retries=0)
    with client:
        assert "video.completed" in client.webhooks.event_types.list().data
        made = client.webhooks.create(
            event_types=["video.completed", "video.failed"], name="mine", url=receiver.url
        )
        assert (made.object, made.name, made.url) == ("webhook_endpoint", "mine", receiver.url)
        changed = client.webhooks.update(made.id, name="yours", event_types=["video.completed"])
        assert (changed.name, changed.event_types) == ("yours", ["video.completed"])
        assert client.webhooks.retrieve(made.id).name == "yours"
        more = [
            client.webhooks.create(event_types=["video.failed"], name=f"{k}", url=receiver.url).id
            for k in range(4)
        ]
        assert [one.id for one in client.webhooks.list(limit=2)] == [made.id, *more]

        tested = client.webhooks.test(made.id, event_type="video.completed")
        assert (tested.status_code, tested.success) == (202, True)
        rotated = client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
        client.webhooks.test(made.id, event_type="video.completed")
        headers, body = receiver.got[-1]
        for secret in (made.signing_secret, rotated.signing_secret):
            event = client.webhooks.unwrap(body, headers, secret=secret)
            assert str(event.type) == "video.completed"
        gone = client.webhooks.delete(made.id)
        assert (gone.deleted, gone.object) == (True, "webhook_endpoint.deleted")
        with pytest.raises(openai.NotFoundError):
            client.webhooks.retrieve(made.id)


def test_a_finished_video_is_told_and_logged(make_site: MakeSite, receiver: Receiver) -> None:
    site = make_site(allow_private_addresses=True)
    hook = create(site, url=receiver.url, event_types=["video.cancelled"])
    job = site.submit()
    assert site.http.post(f"/v1/videos/{job.id}/cancel").status_code == 200

    assert receiver.arrived.wait(60)

    path = f"/v1/webhooks/{hook['id']}/deliveries"
    while (log := site.http.get(path).json())["data"][0]["state"] == "pending":
        pass
    [told] = log["data"]
    assert (told["state"], told["status_code"], told["attempt"]) == ("delivered", 202, 1)
    assert told["payload"]["data"] == {"id": job.id}
    assert (log["first_id"], log["has_more"]) == (told["id"], False)


def test_the_log_is_paged_newest_first(api: Site) -> None:
    hook = create(api)
    store = api.service.store.webhooks
    made = [store.send_test(hook["id"], None, "video.failed").id for _ in range(5)]
    path, seen, after = f"/v1/webhooks/{hook['id']}/deliveries", [], None
    while True:
        query = {"limit": 2, **({"after": after} if after else {})}
        page = api.http.get(path, params=query).json()
        seen += [one["id"] for one in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert sorted(seen) == sorted(made)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"url": "http://127.0.0.1/"}, "url"),
        ({"url": "http://localhost:8000/"}, "url"),
        ({"url": "http://2130706433/"}, "url"),
        ({"url": "http://[::ffff:169.254.169.254]/"}, "url"),
        ({"url": "ftp://hooks.example/"}, "url"),
        ({"url": "https://user:secret@hooks.example/"}, "url"),
        ({"url": "https://hooks.example/\r\nx-evil: 1"}, "url"),
        ({"url": "https://" + "a" * 3000}, "url"),
        ({"event_types": []}, "event_types"),
        ({"event_types": ["video.exploded"]}, "event_types"),
        ({"event_types": "video.completed"}, "event_types"),
        ({"name": ""}, "name"),
        ({"name": "a\r\nb"}, "name"),
        ({"name": "a" * 121}, "name"),
        ({"name": "a\x00"}, "name"),
        ({"secret": "whsec_mine"}, "secret"),
    ],
)
def test_what_is_not_legal_is_refused_by_name(
    api: Site, changes: dict[str, Any], param: str
) -> None:
    answer = api.http.post("/v1/webhooks", json={**NEW, **changes})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    hook = create(api)
    if changes.get("name") != "" and "secret" not in changes:
        answer = api.http.post(f"/v1/webhooks/{hook['id']}", json=changes)
        assert answer.status_code == 400
        assert api.service.store.webhooks.get(hook["id"]).url == NEW["url"]


def test_a_sample_that_nobody_answers_is_a_400(make_site: MakeSite) -> None:
    site = make_site(allow_private_addresses=True)
    hook = create(site, url="http://127.0.0.1:1024/nobody")

    answer = site.http.post(f"/v1/webhooks/{hook['id']}/test", json={"event_type": "video.failed"})

    assert answer.status_code == 400
    assert "no answer: ConnectError" in answer.json()["detail"]
    wrong = site.http.post(f"/v1/webhooks/{hook['id']}/test", json={"event_type": "a"})
    assert wrong.json()["error"]["param"] == "event_type"


def test_endpoints_are_their_owners_own(api: Site) -> None:
    foreign = api.service.store.webhooks.create(
        "key_other", "theirs", "https://hooks.example/", ["video.completed"]
    )
    path = f"/v1/webhooks/{foreign.id}"
    answers = [
        api.http.get(path),
        api.http.post(path, json={"name": "mine"}),
        api.http.delete(path),
        api.http.post(f"{path}/rotate_secret"),
        api.http.post(f"{path}/test", json={"event_type": "video.failed"}),
        api.http.get(f"{path}/deliveries"),
        api.http.get("/v1/webhooks", params={"after": foreign.id}),
    ]
    assert [answer.status_code for answer in answers] == [404] * len(answers)
    assert api.http.get("/v1/webhooks").json()["data"] == []
    assert api.service.store.webhooks.get(foreign.id) == foreign


def test_an_owner_has_so_many_endpoints(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_WEBHOOKS", 1)
    create(api)

    answer = api.http.post("/v1/webhooks", json=NEW)

    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "too_many_webhooks"
