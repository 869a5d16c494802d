"""Cancel, retry, trash, restore and change."""

from __future__ import annotations

from typing import Any

import pytest


def _make(api: Any, **fields: Any) -> str:
    body = {"prompt": "a red ball", "num_frames": 17, **fields}
    return str(api.http.post("/v1/videos", json=body).json()["id"])


def _show(api: Any, video_id: str) -> dict[str, Any]:
    shown: dict[str, Any] = api.http.get(f"/v1/videos/{video_id}").json()
    return shown


def test_a_queued_video_is_cancelled_at_once(api: Any, api_maker: Any) -> None:
    video_id = _make(api)
    answer = api.http.post(f"/v1/videos/{video_id}/cancel")
    assert answer.json()["status"] == "cancelled"
    assert answer.json()["error"] is None
    assert api_maker.claim() is None
    assert api.http.post(f"/v1/videos/{video_id}/cancel").json()["status"] == "cancelled"


def test_a_running_video_is_asked_to_stop(api: Any, api_maker: Any) -> None:
    video_id = _make(api)
    job = api_maker.claim()
    api_maker.chunk(job, 0)
    shown = api.http.post(f"/v1/videos/{video_id}/cancel", json={"keep": True}).json()
    assert shown["status"] == "in_progress"
    assert shown["cancel_requested"]
    assert shown["x_progress"]["phase"] == "cancelling"
    renewal = api.service.store.held.renew(job.id, job.fence, 60)
    assert renewal.cancel_requested
    assert renewal.keep_chunks
    api.service.store.leases.cancelled(job.id, job.fence, api_maker.results(job, frames=8))
    shown = _show(api, video_id)
    assert (shown["num_frames"], shown["seconds"]) == (8, f"{8 / shown['fps']:g}")
    assert (shown["status"], shown["x_progress"]["chunk"]) == ("cancelled", 1)
    kept = api.http.get(f"/v1/videos/{video_id}/content")
    assert kept.status_code == 200
    # it may be tried again and change then
    assert "immutable" not in kept.headers["cache-control"]
    again = api.http.post(f"/v1/videos/{video_id}/retry").json()
    assert (again["status"], again["x_progress"]["chunk"]) == ("queued", 1)
    assert again["num_frames"] == job.plan["num_frames"]


def test_a_finished_video_is_answered_as_it_is(api: Any, api_maker: Any) -> None:
    video_id = _make(api)
    api_maker.make_all()
    assert api.http.post(f"/v1/videos/{video_id}/cancel").json()["status"] == "completed"


@pytest.mark.parametrize("body", [{"keep": "perhaps"}, {"kep": True}])
def test_cancel_refuses_other_fields(api: Any, body: dict[str, Any]) -> None:
    video_id = _make(api)
    assert api.http.post(f"/v1/videos/{video_id}/cancel", json=body).status_code == 400
    assert _show(api, video_id)["status"] == "queued"


def test_retry_queues_it_again(api: Any, api_maker: Any) -> None:
    video_id = _make(api)
    assert api.http.post(f"/v1/videos/{video_id}/retry").status_code == 409
    job = api_maker.claim()
    api.service.store.leases.fail(job.id, job.fence, {"code": "timeout", "message": "x"})
    shown = api.http.post(f"/v1/videos/{video_id}/retry").json()
    assert (shown["status"], shown["error"], shown["attempt"]) == ("queued", None, 0)
    api_maker.make_all()
    answer = api.http.post(f"/v1/videos/{video_id}/retry")
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"


def test_trash_and_restore(api: Any, api_maker: Any) -> None:
    video_id = _make(api)
    api_maker.make_all()
    shown = api.http.post(f"/v1/videos/{video_id}/trash").json()
    assert shown["trashed"]
    assert shown["trashed_at"] is not None
    assert api.http.get("/v1/videos").json()["data"] == []
    assert api.http.get(f"/v1/videos/{video_id}/content").status_code == 200
    assert not api.http.post(f"/v1/videos/{video_id}/restore").json()["trashed"]
    assert len(api.http.get("/v1/videos").json()["data"]) == 1


def test_what_is_trashed_while_queued_is_not_made(api: Any, api_maker: Any) -> None:
    video_id = _make(api)
    assert api.http.post(f"/v1/videos/{video_id}/trash").json()["status"] == "cancelled"
    assert api_maker.claim() is None


def test_change_place_and_flags(api: Any, api_maker: Any) -> None:
    first, second, third = (_make(api) for _ in range(3))

    def patch(video_id: str, **fields: Any) -> dict[str, Any]:
        answer = api.http.patch(f"/v1/videos/{video_id}", json=fields)
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        return shown

    assert patch(third, priority=0)["priority"] == 0
    assert patch(first, paused=True)["x_progress"]["phase"] == "paused"
    assert patch(second, tags=["x"], starred=True)["tags"] == ["x"]
    assert [api_maker.claim().id, api_maker.claim().id] == [third, second]
    assert api_maker.claim() is None
    patch(first, paused=False)
    assert api_maker.claim().id == first


def test_change_order(api: Any, api_maker: Any) -> None:
    a, b, c = (_make(api) for _ in range(3))
    for video_id, position in [(c, "first"), (a, "last"), (b, {"before": c})]:
        answer = api.http.patch(f"/v1/videos/{video_id}", json={"position": position})
        assert answer.status_code == 200, answer.text
    assert [api_maker.claim().id for _ in range(3)] == [b, c, a]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"position": "middle"}, 400),
        ({"position": {"before": "video_" + "a" * 24}}, 404),
        ({"priority": 11}, 400),
        ({"paused": "perhaps"}, 400),
        ({"owner": "me"}, 400),
        ({"state": "completed"}, 400),
        ({"num_frames": 20}, 400),
        ({"input_reference": {"file_id": "x"}}, 400),
    ],
)
def test_illegal_changes(api: Any, fields: dict[str, Any], status: int) -> None:
    video_id = _make(api)
    before = _show(api, video_id)
    assert api.http.patch(f"/v1/videos/{video_id}", json=fields).status_code == status
    assert _show(api, video_id) == before


def test_a_video_has_no_place_beside_itself(api: Any) -> None:
    video_id = _make(api)
    answer = api.http.patch(f"/v1/videos/{video_id}", json={"position": {"after": video_id}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "position")


def test_the_request_can_change_while_queued(api: Any, api_maker: Any) -> None:
    video_id = _make(api, seed=4, negative_prompt="snow")
    fields = {"prompt": "a blue ball", "seconds": 3, "negative_prompt": None}
    shown = api.http.patch(f"/v1/videos/{video_id}", json=fields).json()
    assert (shown["prompt"], shown["seconds"], shown["seed"]) == ("a blue ball", "3", 4)
    assert "negative_prompt" not in shown["request"]
    assert "num_frames" not in shown["request"]
    job = api_maker.claim()
    assert job.request["prompt"] == "a blue ball"
    assert job.plan["num_frames"] == 49
    answer = api.http.patch(f"/v1/videos/{video_id}", json={"seed": 1})
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "not_queued"
    assert api.http.patch(f"/v1/videos/{video_id}", json={"tags": ["x"]}).status_code == 200


def test_an_input_stays_with_a_changed_request(api: Any, media: Any) -> None:
    files = {"input_reference": ("start.webp", media.picture, "image/webp")}
    form = {"prompt": "a red ball", "num_frames": "17"}
    video = api.http.post("/v1/videos", data=form, files=files).json()
    answer = api.http.patch(f"/v1/videos/{video['id']}", json={"num_frames": 33})
    assert answer.status_code == 200, answer.text
    assert answer.json()["request"]["input_reference"] == video["request"]["input_reference"]
