"""Rates, quotas, body sizes, and taking nothing while draining or full."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from longtake.api.limits import RateLimiter

VIDEO = {"prompt": "a red ball", "num_frames": 9}


def test_bucket_fills_evenly() -> None:
    now = [0.0]
    limiter = RateLimiter(lambda: now[0])
    rates = [limiter.take("a", 60) for _ in range(61)]
    assert [rate.wait_s for rate in rates] == [0] * 60 + [1]
    assert (rates[0].remaining, rates[59].remaining) == (59, 0)
    assert limiter.take("b", 60).wait_s == 0
    now[0] = 1.0
    assert limiter.take("a", 60).wait_s == 0
    assert limiter.take("a", 60).wait_s == 1
    now[0] = 100.0
    assert limiter.take("a", 60).remaining == 59


def test_slow_rates_wait_long() -> None:
    limiter = RateLimiter(lambda: 0.0)
    limiter.take("a", 1)
    assert limiter.take("a", 1).wait_s == 60


def test_rate_of_an_address(make_site: Any) -> None:
    site = make_site(requests_per_minute=3)
    answers = [site.http.get("/v1/models") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[0].headers["ratelimit-policy"] == '"default";q=3;w=60'
    assert answers[0].headers["ratelimit"].startswith('"default";r=2;t=')
    assert 1 <= int(answers[3].headers["retry-after"]) <= 120
    assert answers[3].json()["error"]["type"] == "rate_limit_error"
    assert site.http.get("/healthz").status_code == 200


def test_rate_of_a_key_is_its_own(make_site: Any) -> None:
    site = make_site(require_keys=True)
    _, slow = site.service.store.keys.create("slow", {"requests_per_minute": 1})
    _, other = site.service.store.keys.create("other")

    def get(secret: str) -> Any:
        return site.http.get("/v1/models", headers={"authorization": f"Bearer {secret}"})

    assert [get(slow).status_code, get(slow).status_code] == [200, 429]
    assert get(other).status_code == 200
    assert "ratelimit" not in get(other).headers


def test_guessing_keys_is_limited_too(make_site: Any) -> None:
    site = make_site(require_keys=True, requests_per_minute=2)
    headers = {"authorization": "Bearer lt_x"}
    statuses = [site.http.get("/v1/models", headers=headers).status_code for _ in range(3)]
    assert statuses == [401, 401, 429]


def test_queued_videos_of_one_key(make_site: Any) -> None:
    site = make_site(max_queued=2)
    answers = [site.http.post("/v1/videos", json=VIDEO) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].json()["error"]["code"] == "queue_full"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 120
    site.http.delete(f"/v1/videos/{answers[0].json()['id']}")
    assert site.http.post("/v1/videos", json=VIDEO).status_code == 200


def test_json_bodies_are_bounded(make_site: Any) -> None:
    site = make_site(max_body_bytes=10_000)
    fits = {**VIDEO, "prompt": "x" * 7_000}
    assert site.http.post("/v1/videos", json=fits).status_code == 200
    for body in (b"x" * 10_001, b'{"a":' * 3_000):
        answer = site.http.post(
            "/v1/videos", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


def test_a_body_of_untold_length_is_bounded_too(make_site: Any) -> None:
    site = make_site(max_body_bytes=10_000)

    def pieces() -> Iterator[bytes]:
        for _ in range(11):
            yield b"x" * 1_000

    for path in ("/v1/videos", "/v1/webhooks"):
        answer = site.http.post(
            path, content=pieces(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413, path


def test_a_large_body_is_refused_before_it_is_read(make_site: Any) -> None:
    site = make_site(max_body_bytes=10_000)
    host, port = site.url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/videos HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        "Content-Length: 10000000\r\n\r\n{"
    )
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head.encode())
        assert b" 413 " in connection.recv(100)


def test_uploads_are_bounded(make_site: Any, media: Any) -> None:
    site = make_site(max_upload_bytes=len(media.picture))
    files = {"input_reference": ("a.webp", media.picture, "image/webp")}
    assert site.http.post("/v1/videos", data=VIDEO, files=files).status_code == 200
    files = {"input_reference": ("a.webp", media.picture + b"\0", "image/webp")}
    answer = site.http.post("/v1/videos", data=VIDEO, files=files)
    assert answer.status_code == 413
    assert answer.json()["error"]["param"] == "input_reference"


def test_fields_of_a_form_are_bounded(api: Any) -> None:
    many = {f"x{number}": "1" for number in range(200)}
    assert api.http.post("/v1/videos", data={**VIDEO, **many}).status_code == 400
    files = [("input_reference", (f"{n}", b"x", "image/png")) for n in range(9)]
    assert api.http.post("/v1/videos", data=VIDEO, files=files).status_code == 400


@pytest.mark.parametrize("state", ["draining", "full"])
def test_nothing_new_is_taken(make_site: Any, state: str) -> None:
    site = make_site(min_free_bytes=0 if state == "draining" else 2**62)
    old = site.submit(seed=1)
    site.service.store.submissions.cancel(old.id, old.owner)
    site.service.draining = state == "draining"
    for path in ("", f"/{old.id}/remix", f"/{old.id}/retry"):
        answer = site.http.post(f"/v1/videos{path}", json={"prompt": "x"})
        assert answer.status_code == 503, path
        assert 1 <= int(answer.headers["retry-after"]) <= 120
    assert site.http.get(f"/v1/videos/{old.id}").status_code == 200


def test_room_is_noticed_again(make_site: Any) -> None:
    site = make_site()
    site.service._room, site.service._room_until = False, float("inf")
    assert site.http.post("/v1/videos", json=VIDEO).status_code == 503
    site.service._room_until = 0.0
    assert site.http.post("/v1/videos", json=VIDEO).status_code == 200
