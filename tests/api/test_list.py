"""Listing: pages over many videos, filters, and cursors that outlive their video."""

from __future__ import annotations

from typing import Any

import pytest

from longtake.queue.records import LOCAL_OWNER


def _fill(api: Any, count: int, **options: Any) -> list[str]:
    from dataclasses import replace

    job = api.service.client.new_job({"prompt": "a red ball", "num_frames": 9}, LOCAL_OWNER)
    made = []
    for number in range(count):
        one = replace(job, prompt=f"ball {number}", **options)
        made += api.service.client.submit_jobs([one], limits={})
    return [one.id for one in made]


def _walk(api: Any, **query: Any) -> list[str]:
    """Every id, page by page, as SDKs walk."""
    found: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = api.http.get("/v1/videos", params={**query, **after}).json()
        assert page["object"] == "list"
        ids = [video["id"] for video in page["data"]]
        found += ids
        assert page["first_id"] == (ids[0] if ids else None)
        assert page["last_id"] == (ids[-1] if ids else None)
        if not page["has_more"]:
            return found
        after = {"after": page["last_id"]}


def test_pages_hold_every_video_once(api: Any) -> None:
    made = _fill(api, 45)
    for limit in (7, 20, 45, 100):
        assert _walk(api, limit=limit, order="asc") == made
        assert _walk(api, limit=limit) == made[::-1]


def test_default_page(api: Any) -> None:
    made = _fill(api, 21)
    page = api.http.get("/v1/videos").json()
    assert len(page["data"]) == 20
    assert page["has_more"]
    assert page["data"][0]["id"] == made[-1]


def test_a_cursor_outlives_its_video(api: Any) -> None:
    made = _fill(api, 6)
    api.http.delete(f"/v1/videos/{made[2]}")
    page = api.http.get("/v1/videos", params={"after": made[2], "order": "asc"}).json()
    assert [video["id"] for video in page["data"]] == made[3:]


@pytest.mark.parametrize("after", ["video_" + "a" * 24, "x", "' OR 1=1 --", "video_\x00"])
def test_unknown_cursors_are_told(api: Any, after: str) -> None:
    assert api.http.get("/v1/videos", params={"after": after}).status_code == 404


@pytest.mark.parametrize(
    "query",
    [
        {"limit": 0},
        {"limit": 101},
        {"limit": "x"},
        {"order": "up"},
        {"status": "done"},
        {"colour": "red"},
        {"q": "\x00"},
        {"seed": -1},
        {"trashed": "maybe"},
    ],
)
def test_illegal_queries_are_refused_by_name(api: Any, query: dict[str, Any]) -> None:
    answer = api.http.get("/v1/videos", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(query))


def test_filters(api: Any, api_maker: Any) -> None:
    def make(**fields: Any) -> str:
        body = {"prompt": "a red ball", "num_frames": 9, **fields}
        return str(api.http.post("/v1/videos", json=body).json()["id"])

    done = make(seed=5, tags=["sea"])
    api_maker.make_all()
    other = make(prompt="a blue square", tags=["sea", "sky"])
    starred = make()
    api.http.patch(f"/v1/videos/{starred}", json={"starred": True})
    trashed = make()
    api.http.post(f"/v1/videos/{trashed}/trash")
    remix = api.http.post(f"/v1/videos/{done}/remix", json={"prompt": "snow"}).json()["id"]
    assert _walk(api, status="completed") == [done]
    assert set(_walk(api, status="queued")) == {other, starred, remix}
    assert _walk(api, q="BLUE") == [other]
    assert set(_walk(api, tag="sea")) == {done, other}
    assert set(_walk(api, seed=5)) == {done, remix}
    assert _walk(api, starred="true") == [starred]
    assert _walk(api, trashed="true") == [trashed]
    assert trashed in _walk(api, trashed="all")
    assert _walk(api, parent_id=done) == [remix]
    assert _walk(api, model="nothing") == []
    created = api.http.get(f"/v1/videos/{other}").json()["created_at"]
    assert other in _walk(api, created_after=created)
    assert other not in _walk(api, created_before=created)


def test_text_filter_takes_percent_signs_as_they_are(api: Any) -> None:
    body = {"prompt": "100% red", "num_frames": 9}
    video_id = api.http.post("/v1/videos", json=body).json()["id"]
    _fill(api, 1)
    assert _walk(api, q="100%") == [video_id]
    assert _walk(api, q="%") == [video_id]
