"""Batches: legal items are queued, the others told; counts and results per item."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from longtake.queue.records import Job

if TYPE_CHECKING:
    from tests.api.conftest import MakeSite, Site

GOOD = {"prompt": "a red ball", "num_frames": 9}


def create(site: Site, *items: Any, **headers: str) -> dict[str, Any]:
    body = {"name": "balls", "items": list(items)}
    answer = site.http.post("/v1/batches", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def jobs_of(site: Site, batch: dict[str, Any]) -> list[Job]:
    return site.service.store.batches.results(batch["id"])


def test_legal_items_are_queued_and_the_others_told(api: Site) -> None:
    wrong_seed = {**GOOD, "seed": -1}
    batch = create(api, GOOD, {}, {**GOOD, "seed": 7}, {**GOOD, "sed": 7}, wrong_seed, "text")

    assert batch["name"] == "balls"
    assert batch["status"] == "in_progress"
    assert batch["request_counts"] == {
        "total": 6,
        "queued": 2,
        "in_progress": 0,
        "completed": 0,
        "failed": 0,
        "cancelled": 0,
        "invalid": 4,
        "deleted": 0,
    }
    items = batch["items"]
    assert [item["index"] for item in items] == list(range(6))
    states = ["queued", "invalid", "queued", "invalid", "invalid", "invalid"]
    assert [item["status"] for item in items] == states
    assert [item["param"] for item in items] == [None, "prompt", None, "sed", "seed", "items"]
    assert items[3]["error"]["code"] == "unknown_field"
    assert "nearest: seed" in items[3]["error"]["message"]
    first, second = jobs_of(api, batch)
    assert (first.batch_index, second.batch_index) == (0, 2)
    assert second.request["seed"] == 7
    listed = api.http.get("/v1/videos", params={"batch_id": batch["id"]}).json()["data"]
    assert {one["id"] for one in listed} == {first.id, second.id}
    assert items[0]["urls"]["content"] == f"/v1/videos/{first.id}/content"
    assert api.http.get(items[0]["urls"]["video"]).json()["id"] == first.id


@pytest.mark.parametrize("kind", ["application/jsonl", "application/x-ndjson", "form", "document"])
def test_lines_and_files_are_taken(api: Site, kind: str) -> None:
    lines = f"{json.dumps(GOOD)}\n\nnonsense\n".encode()
    if kind == "form":
        files = {"file": ("balls.jsonl", lines, "application/octet-stream")}
        answer = api.http.post("/v1/batches", files=files, data={"name": "balls"})
    elif kind == "document":
        document = json.dumps({"items": [GOOD, "nonsense"], "name": "balls"}, indent=1).encode()
        answer = api.http.post("/v1/batches", files={"file": ("balls.json", document)})
    else:
        answer = api.http.post("/v1/batches", content=lines, headers={"content-type": kind})

    batch = answer.json()
    assert [item["status"] for item in batch["items"]] == ["queued", "invalid"]
    assert batch["items"][1]["line"] == (None if kind == "document" else 3)
    assert batch["name"] == ("balls" if kind in ("form", "document") else None)


@pytest.mark.parametrize(
    ("content", "kind", "status", "param"),
    [
        (b'{"items": []}', "application/json", 400, "items"),
        (b"nonsense", "application/json", 400, "items"),
        (b'{"input_file_id": "file-1", "endpoint": "/v1/videos"}', "application/json", 400, None),
        (b'{"items": [{}], "endpoint": "a"}', "application/json", 400, "endpoint"),
        (b"", "application/jsonl", 400, "items"),
        (b"{}", "text/html", 415, None),
        (b"{}\n" * 1001, "application/jsonl", 413, "items"),
        (b"[" * 100_000, "application/json", 400, "items"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused(
    api: Site, content: bytes, kind: str, status: int, param: str | None
) -> None:
    answer = api.http.post("/v1/batches", content=content, headers={"content-type": kind})

    assert answer.status_code == status, answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param
    assert api.http.get("/v1/batches").json()["data"] == []


def test_a_form_without_a_file_or_with_too_long_a_one_is_refused(make_site: MakeSite) -> None:
    site = make_site(max_body_bytes=1000)

    missing = site.http.post("/v1/batches", files={"other": ("a", b"{}")})
    long = site.http.post("/v1/batches", files={"file": ("a", b" " * 1001)})

    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "file")
    assert long.status_code == 413


def test_a_quota_refuses_the_batch_as_a_whole(make_site: MakeSite) -> None:
    site = make_site(max_queued=2)

    answer = site.http.post("/v1/batches", json={"items": [GOOD] * 3})

    assert answer.status_code == 429
    assert site.http.get("/v1/batches").json()["data"] == []
    assert site.http.get("/v1/videos").json()["data"] == []


def test_the_same_key_makes_one_batch(api: Site) -> None:
    key = {"idempotency-key": '"mine"'}
    first = create(api, GOOD, {}, **key)
    again = create(api, GOOD, {}, **key)
    other = api.http.post("/v1/batches", json={"items": [GOOD]}, headers=key)

    assert again["id"] == first["id"]
    assert again["items"] == first["items"]
    assert len(jobs_of(api, first)) == 1
    assert other.status_code == 422


def test_cancel_stops_what_is_not_finished(api: Site) -> None:
    batch = create(api, GOOD, GOOD, GOOD)
    store = api.service.store
    running = store.leases.claim("worker-1", "default", loaded_model=None, affinity_s=0, lease_s=60)
    done = store.leases.claim("worker-2", "default", loaded_model=None, affinity_s=0, lease_s=60)
    assert running is not None
    assert done is not None
    store.leases.complete(done.id, done.fence, [], {})

    answer = api.http.post(f"/v1/batches/{batch['id']}/cancel").json()

    counts = answer["request_counts"]
    assert [counts[name] for name in ("completed", "cancelled", "in_progress")] == [1, 1, 1]
    assert answer["status"] == "in_progress"
    assert store.listings.get(running.id).cancel_requested
    store.leases.cancelled(running.id, running.fence, [])
    assert api.http.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed"


def test_items_are_paged_and_deleted_ones_said(api: Site) -> None:
    batch = create(api, GOOD, {}, GOOD, GOOD)
    path = f"/v1/batches/{batch['id']}"
    api.http.delete(f"/v1/videos/{jobs_of(api, batch)[1].id}")

    first = api.http.get(path, params={"limit": 3}).json()
    rest = api.http.get(path, params={"after": first["last_index"], "limit": 3}).json()

    assert [item["status"] for item in first["items"]] == ["queued", "invalid", "deleted"]
    assert (first["has_more"], first["last_index"]) == (True, 2)
    assert [item["status"] for item in rest["items"]] == ["queued"]
    assert rest["has_more"] is False
    assert rest["request_counts"]["deleted"] == 1
    assert api.http.get(path, params={"after": 99}).json()["items"] == []


def test_batches_are_listed_newest_first_and_are_their_owners_own(api: Site) -> None:
    made = [create(api, GOOD)["id"] for _ in range(3)]
    foreign = api.service.store.batches.create("key_other", None, 0)

    first = api.http.get("/v1/batches", params={"limit": 2}).json()
    rest = api.http.get("/v1/batches", params={"after": first["last_id"]}).json()

    assert [one["id"] for one in first["data"] + rest["data"]] == made[::-1]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    for method, path in (("GET", ""), ("POST", "/cancel")):
        assert api.http.request(method, f"/v1/batches/{foreign.id}{path}").status_code == 404
    assert api.http.get("/v1/batches", params={"after": foreign.id}).status_code == 404


def test_a_service_that_stops_takes_no_batch(site: Site) -> None:
    site.service.draining = True

    answer = site.http.post("/v1/batches", json={"items": [GOOD]})

    assert answer.status_code == 503
    assert "retry-after" in answer.headers
