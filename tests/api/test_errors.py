"""Every failure has one body, which both kinds of client read."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from longtake.api.errors import api_error
from longtake.errors import (
    ConflictError,
    DeviceError,
    LeaseLostError,
    LimitError,
    MediaError,
    ModelError,
    NotFoundError,
    RequestError,
    ServiceError,
    TooLargeError,
)

OPENAI = {"message", "type", "param", "code"}


def _check(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert {"type", "title", "status", "detail", "instance", "error"} <= set(body)
    assert body["status"] == status
    assert set(body["error"]) == OPENAI
    assert body["error"]["message"] == body["detail"]
    assert body["instance"].endswith(answer.headers["x-request-id"])
    return body


def test_both_shapes_in_one_body(api: Any) -> None:
    body = _check(api.http.post("/v1/videos", json={"prompt": "x", "num_frames": 20}), 400)
    assert body["type"] == "urn:longtake:problem:invalid_value"
    assert body["title"] == "Bad Request"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == "num_frames"


def test_every_fault_is_listed(api: Any) -> None:
    fields = {"seed": "x", "fps": "y", "tags": ["a", 1], "colour": "red"}
    body = _check(api.http.post("/v1/videos", json={"prompt": "x", **fields}), 400)
    pointers = {fault["pointer"] for fault in body["errors"]}
    assert pointers == {"/seed", "/fps", "/tags/1", "/colour"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/videos/video_aaaaaaaaaaaaaaaaaaaaaaaa", 404),
        ("PUT", "/v1/videos", 405),
        ("GET", "/v1/videos?limit=x", 400),
        ("GET", "/v1/videos/" + "a" * 100, 400),
        ("GET", "/docs", 404),
    ],
)
def test_routing_errors(api: Any, method: str, path: str, status: int) -> None:
    _check(api.http.request(method, path), status)


def test_405_names_the_methods(api: Any) -> None:
    assert "GET" in api.http.put("/v1/models").headers["allow"]


def test_an_unexpected_error_tells_nothing(
    make_site: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret /srv/path")

    monkeypatch.setattr(site.service.store.listings, "get", broken)
    with caplog.at_level(logging.ERROR, "longtake.api"):
        answer = site.http.get("/v1/videos/video_" + "a" * 24)
    body = _check(answer, 500)
    assert body["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert "ZeroDivisionError" in caplog.text
    records = [r for r in caplog.records if r.name == "longtake.api"]
    assert getattr(records[-1], "request_id", None) == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("seed", 1, "no"), 400, "invalid_value"),
        (TooLargeError("file", "x", "large"), 413, "too_large"),
        (NotFoundError("video", "x"), 404, "video_not_found"),
        (NotFoundError("queued video", "x"), 404, "queued_video_not_found"),
        (ConflictError("x", "not_queued"), 409, "not_queued"),
        (ConflictError("x", "idempotency_mismatch"), 422, "idempotency_mismatch"),
        (LeaseLostError("x"), 409, "conflict"),
        (LimitError("x", "queue_full", 60), 429, "queue_full"),
        (ServiceError("x", 7), 503, "service_unavailable"),
        (ModelError("/srv/x is gone"), 503, "model_unavailable"),
        (OperationalError("select", {}, Exception("host=db")), 503, "service_unavailable"),
        (DeviceError("x"), 500, "internal_error"),
    ],
)
def test_each_exception_has_its_answer(error: Exception, status: int, code: str) -> None:
    answer = api_error(error)
    assert (answer.status, answer.code) == (status, code)
    if status in (429, 503):
        assert 1 <= int(answer.headers["retry-after"]) <= 120
    if status in (409, 422):
        assert answer.headers["x-should-retry"] == "false"
    assert "/srv" not in answer.message
    assert "host=db" not in answer.message


def test_a_long_wait_is_told_as_one_that_sdks_keep() -> None:
    assert api_error(LimitError("x", "running_quota", 3600)).headers["retry-after"] == "120"


def test_paths_of_the_server_are_not_told() -> None:
    answer = api_error(MediaError("image", "/srv/data/x.png", "is not an image"))
    assert answer.message == "input_reference: is not an image"
    assert answer.param == "input_reference"


def test_behind_a_proxy_with_a_path(make_site: Any, make_maker: Any) -> None:
    """Some proxies cut the path off, others do not; links have it."""
    site = make_site(base_path="/studio/")
    job = site.submit()
    make_maker(site).make_all()
    for prefix in ("", "/studio"):
        assert site.http.get(f"{prefix}/healthz").status_code == 200
        shown = site.http.get(f"{prefix}/v1/videos/{job.id}/segments").json()
        assert shown["init"] == f"/studio/v1/videos/{job.id}/segments/init.mp4"
        assert site.http.get(shown["init"]).status_code == 200


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2_3", True), ("a" * 65, False), ("a b", False), ("x\tY", False), ("<script>", False)],
)
def test_request_ids_are_echoed_where_harmless(api: Any, given: str, kept: bool) -> None:
    shown = api.http.get("/healthz", headers={"x-request-id": given}).headers["x-request-id"]
    assert (shown == given) is kept
    assert kept or shown.startswith("req_")
