"""A submission that is sent twice makes one video."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from longtake.api import submit

VIDEO = {"prompt": "a red ball", "num_frames": 9}


def _post(api: Any, body: dict[str, Any] | None = None, path: str = "", **headers: str) -> Any:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return api.http.post(f"/v1/videos{path}", json=body or VIDEO, headers=names)


def _count(api: Any) -> int:
    return int(api.service.store.listings.counts()["queued"])


def test_the_same_key_makes_one_video(api: Any) -> None:
    first = _post(api, idempotency_key="abc")
    assert _post(api, idempotency_key="abc").json()["id"] == first.json()["id"]
    assert _post(api, idempotency_key='"abc"').json()["id"] == first.json()["id"]
    assert _post(api, idempotency_key="abd").json()["id"] != first.json()["id"]
    assert _count(api) == 2


def test_a_key_of_a_deleted_video_says_so(api: Any) -> None:
    made = _post(api, idempotency_key="abc").json()["id"]
    api.http.delete(f"/v1/videos/{made}")
    answer = _post(api, idempotency_key="abc")
    assert answer.status_code == 404
    assert "was deleted since" in answer.json()["detail"]


def test_a_form_and_its_files_are_compared_by_content(api: Any, media: Any) -> None:
    headers = {"idempotency-key": "k"}

    def send(picture: bytes, name: str) -> Any:
        files = {"input_reference": (name, picture, "image/webp")}
        return api.http.post("/v1/videos", data=VIDEO, files=files, headers=headers)

    first = send(media.picture, "a.webp")
    assert first.status_code == 200
    # another boundary and file name are the same request
    assert send(media.picture, "b.webp").json()["id"] == first.json()["id"]
    assert send(media.picture + b"\0", "a.webp").status_code == 422


def test_another_body_or_route_is_a_422(api: Any) -> None:
    first = _post(api, idempotency_key="abc").json()
    changed = _post(api, {**VIDEO, "seed": 1}, idempotency_key="abc")
    assert changed.status_code == 422
    assert changed.json()["error"]["code"] == "idempotency_mismatch"
    remix = _post(api, {"prompt": "snow"}, f"/{first['id']}/remix", idempotency_key="abc")
    assert remix.status_code == 422
    assert _count(api) == 1


def test_the_answer_is_the_video_as_it_is_now(api: Any, api_maker: Any) -> None:
    _post(api, idempotency_key="abc")
    api_maker.make_all()
    assert _post(api, idempotency_key="abc").json()["status"] == "completed"


def test_a_refused_request_uses_no_key_up(api: Any) -> None:
    assert _post(api, {**VIDEO, "num_frames": 20}, idempotency_key="abc").status_code == 400
    assert _post(api, idempotency_key="abc").status_code == 200


@pytest.mark.parametrize("key", ["", '""', "a b", "x" * 201, '"a', 'a"b" c'])
def test_illegal_keys(api: Any, key: str) -> None:
    answer = _post(api, idempotency_key=key)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_idempotency_key"


def test_keys_are_each_owners_own(make_site: Any) -> None:
    site = make_site(require_keys=True)
    secrets = [site.service.store.keys.create(name)[1] for name in ("one", "two")]
    ids = {
        _post(site, authorization=f"Bearer {secret}", idempotency_key="k").json()["id"]
        for secret in secrets
    }
    assert len(ids) == 2


def test_many_at_once_make_one_video(api: Any) -> None:
    barrier = threading.Barrier(6)
    answers: list[Any] = []

    def send() -> None:
        barrier.wait()
        answers.append(_post(api, idempotency_key="abc"))

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert _count(api) == 1


def test_a_retry_of_the_sdk_is_the_earlier_try(api: Any) -> None:
    first = _post(api, x_stainless_retry_count="0").json()["id"]
    for count in ("1", "2"):
        assert _post(api, x_stainless_retry_count=count).json()["id"] == first
    assert _post(api, {**VIDEO, "seed": 1}, x_stainless_retry_count="1").json()["id"] != first
    assert _count(api) == 2


def test_first_tries_are_never_taken_for_retries(api: Any) -> None:
    ids = {_post(api, x_stainless_retry_count="0").json()["id"] for _ in range(3)}
    assert len(ids) == 3
    last = _post(api, x_stainless_retry_count="1").json()["id"]
    newest = api.http.get("/v1/videos").json()["data"][0]["id"]
    assert last == newest


def test_a_retry_whose_first_try_never_came_makes_a_video(api: Any) -> None:
    assert _post(api, x_stainless_retry_count="2").status_code == 200
    assert _count(api) == 1


def test_an_old_try_is_no_earlier_one(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _post(api, x_stainless_retry_count="0").json()["id"]
    monkeypatch.setattr("longtake.api.idempotency.RETRY_S", -1)
    assert _post(api, x_stainless_retry_count="1").json()["id"] != first


def test_a_retry_waits_for_a_try_still_at_work(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gave up on its first try, which has not committed yet."""
    began, go_on = threading.Event(), threading.Event()
    create = submit.create

    def slow(caller: submit.Caller) -> submit.Draft:
        if caller.headers.get("x-stainless-retry-count") == "0":
            began.set()
            go_on.wait(10)
        return create(caller)

    monkeypatch.setattr(submit, "create", slow)
    answers: dict[str, str] = {}

    def send(count: str) -> None:
        answers[count] = _post(api, x_stainless_retry_count=count).json()["id"]

    threads = [threading.Thread(target=send, args=(count,)) for count in ("0", "1")]
    threads[0].start()
    assert began.wait(10)
    threads[1].start()
    assert "1" not in answers
    go_on.set()
    for thread in threads:
        thread.join()
    assert answers["0"] == answers["1"]
    assert _count(api) == 1
