"""The video object, and making new videos from old ones."""

from __future__ import annotations

from typing import Any

import pytest


def _make(api: Any, **fields: Any) -> dict[str, Any]:
    answer = api.http.post("/v1/videos", json={"prompt": "a red ball", "num_frames": 17, **fields})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def test_object_has_openai_fields_and_ours(api: Any) -> None:
    video = _make(api, seconds=None, seed=7, tags=["a", "b"], priority=3)
    assert video["object"] == "video"
    assert video["status"] == "queued"
    assert video["progress"] == 0
    assert video["seconds"] == "1.0625"
    assert video["size"] == "128x80"
    assert (video["width"], video["height"], video["num_frames"], video["fps"]) == (128, 80, 17, 16)
    assert (video["seed"], video["priority"], video["tags"]) == (7, 3, ["a", "b"])
    assert video["error"] is None
    assert video["completed_at"] is None
    assert isinstance(video["created_at"], int)
    assert video["x_progress"] == {
        "phase": "queued",
        "chunk": 0,
        "chunks": 2,
        "step": 0,
        "steps": 4,
        "fps": None,
        "eta_seconds": None,
        "queue_position": None,
    }


def test_seconds_are_echoed_and_the_plan_says_what_they_become(api: Any) -> None:
    video = _make(api, num_frames=None, seconds="5")
    assert video["seconds"] == "5"
    assert video["num_frames"] == 81
    assert video["plan"]["seconds"] == pytest.approx(81 / 16)


def test_seed_is_drawn_once_and_shown(api: Any) -> None:
    video = _make(api)
    again = api.http.get(f"/v1/videos/{video['id']}").json()
    assert again["seed"] == video["seed"] == video["request"]["seed"]


def test_unknown_words_are_told(api: Any) -> None:
    video = _make(api, prompt="a red dragon")
    assert video["warnings"] == ["papercut does not know: dragon"]


def test_request_makes_the_same_video_again(api: Any) -> None:
    timeline = [{"at": 1, "prompt": "a blue ball"}]
    first = _make(api, num_frames=None, seconds=5, prompts=timeline, num_inference_steps=6)
    answer = api.http.post("/v1/videos", json=first["request"])
    second = answer.json()
    assert answer.status_code == 200
    assert second["plan"] == first["plan"]
    assert second["request"] == first["request"]


def test_queue_position_counts_those_before(api: Any) -> None:
    ids = [_make(api)["id"] for _ in range(3)]
    shown = [api.http.get(f"/v1/videos/{one}").json() for one in ids]
    assert [video["x_progress"]["queue_position"] for video in shown] == [0, 1, 2]
    listed = api.http.get("/v1/videos", params={"order": "asc"}).json()["data"]
    assert [video["x_progress"]["queue_position"] for video in listed] == [0, 1, 2]


def test_progress_is_honest_to_the_step(api: Any, api_maker: Any) -> None:
    video_id = _make(api)["id"]
    job = api_maker.claim()
    seen = []
    for chunk in range(2):
        for step in (1, 4):
            api_maker.progress(job, chunk, step)
            shown = api.http.get(f"/v1/videos/{video_id}").json()
            assert shown["status"] == "in_progress"
            assert shown["x_progress"]["step"] == step
            seen.append(shown["progress"])
    assert seen == [
        100 * (4 * c + s) // 8 if (c, s) != (1, 4) else 99 for c in range(2) for s in (1, 4)
    ]
    api_maker.complete(job)
    shown = api.http.get(f"/v1/videos/{video_id}").json()
    assert (shown["status"], shown["progress"]) == ("completed", 100)
    assert shown["x_progress"]["phase"] == "completed"
    assert shown["completed_at"] >= shown["created_at"]
    assert shown["expires_at"] > shown["completed_at"]


def test_failure_tells_code_and_message(api: Any, api_maker: Any) -> None:
    video_id = _make(api)["id"]
    job = api_maker.claim()
    error = {"code": "out_of_memory", "message": "the device is full"}
    api.service.store.leases.fail(job.id, job.fence, error)
    shown = api.http.get(f"/v1/videos/{video_id}").json()
    assert (shown["status"], shown["error"]) == ("failed", error)
    assert shown["progress"] < 100


def test_deleted_is_gone(api: Any, api_maker: Any) -> None:
    video_id = _make(api)["id"]
    api_maker.make_all()
    answer = api.http.delete(f"/v1/videos/{video_id}")
    assert answer.json() == {"id": video_id, "object": "video.deleted", "deleted": True}
    for method, path in [("GET", ""), ("DELETE", ""), ("GET", "/content"), ("POST", "/cancel")]:
        assert api.http.request(method, f"/v1/videos/{video_id}{path}").status_code == 404


@pytest.mark.parametrize("video_id", ["video_", "x", "..%2f..%2fetc", "video_" + "a" * 23 + "%00"])
def test_ids_are_confined(api: Any, video_id: str) -> None:
    answer = api.http.get(f"/v1/videos/{video_id}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] in ("video_not_found", "not_found")


def test_remix_keeps_all_but_the_prompt(api: Any) -> None:
    source = _make(api, seed=9, num_inference_steps=6)
    answer = api.http.post(f"/v1/videos/{source['id']}/remix", json={"prompt": "a blue ball"})
    remix = answer.json()
    assert answer.status_code == 200
    assert remix["remixed_from_video_id"] == source["id"]
    assert remix["prompt"] == "a blue ball"
    assert remix["request"] == {**source["request"], "prompt": "a blue ball"}


def test_remix_takes_other_fields_too(api: Any) -> None:
    source = _make(api, seed=9)
    body = {"prompt": "a blue ball", "seed": 10, "seconds": 3}
    remix = api.http.post(f"/v1/videos/{source['id']}/remix", json=body).json()
    assert (remix["seed"], remix["seconds"]) == (10, "3")
    assert "num_frames" not in remix["request"]


def test_extension_continues_stored_chunks_to_the_total(api: Any, api_maker: Any) -> None:
    source = _make(api, seed=9)
    api_maker.make_all()
    body = {"prompt": "it rolls away", "seconds": "2", "video": {"id": source["id"]}}
    answer = api.http.post("/v1/videos/extensions", json=body)
    longer = answer.json()
    assert answer.status_code == 200, answer.text
    assert longer["extended_from_video_id"] == source["id"]
    assert longer["num_frames"] == 33
    assert longer["seed"] == 9
    assert longer["plan"]["input"] == {"kind": "continue", "frames": 17}
    job = api.service.store.listings.get(longer["id"])
    assert job.request["video"] == f"job:{source['id']}"
    assert job.plan["layout"]["given"] == [3, 2]


def test_extension_is_longer_than_its_source(api: Any, api_maker: Any) -> None:
    source = _make(api)
    api_maker.make_all()
    body = {"prompt": "x", "num_frames": 17, "video": {"id": source["id"]}}
    answer = api.http.post("/v1/videos/extensions", json=body)
    assert answer.status_code == 400
    assert "at least 21 frames" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "field"), [({"size": "64x64"}, "size"), ({"strength": 0.5}, "strength")]
)
def test_extension_refuses_what_it_cannot_change(
    api: Any, api_maker: Any, changes: dict[str, Any], field: str
) -> None:
    source = _make(api)
    api_maker.make_all()
    body = {"prompt": "x", "seconds": 3, "video": {"id": source["id"]}, **changes}
    answer = api.http.post("/v1/videos/extensions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_nothing_goes_on_from_an_unfinished_video(api: Any) -> None:
    source = _make(api)
    for route in ("extensions", "edits"):
        body = {"prompt": "x", "seconds": 3, "video": {"id": source["id"]}}
        answer = api.http.post(f"/v1/videos/{route}", json=body)
        assert answer.status_code == 409
        assert answer.json()["error"]["code"] == "video_not_ready"
        assert answer.headers["x-should-retry"] == "false"


def test_nothing_goes_on_from_an_unknown_video(api: Any) -> None:
    for video in ({"id": "video_" + "a" * 24}, {"id": "nonsense"}):
        body = {"prompt": "x", "seconds": 3, "video": video}
        assert api.http.post("/v1/videos/extensions", json=body).status_code == 404


def test_edit_redraws_a_stored_video(api: Any, api_maker: Any) -> None:
    source = _make(api)
    api_maker.make_all()
    body = {"prompt": "a blue ball", "video": {"id": source["id"]}, "strength": 0.4}
    answer = api.http.post("/v1/videos/edits", json=body)
    edited = answer.json()
    assert answer.status_code == 200, answer.text
    assert edited["edited_from_video_id"] == source["id"]
    assert edited["num_frames"] == 17
    assert edited["request"]["strength"] == 0.4
    assert edited["plan"]["input"]["kind"] == "redraw"


def test_edit_has_a_strength_of_its_own(api: Any, api_maker: Any) -> None:
    source = _make(api)
    api_maker.make_all()
    body = {"prompt": "a blue ball", "video": source["id"]}
    assert api.http.post("/v1/videos/edits", json=body).json()["request"]["strength"] == 0.6


def test_characters_are_unsupported(api: Any) -> None:
    for answer in (
        api.http.post("/v1/videos/characters", data={"name": "x"}),
        api.http.get("/v1/videos/characters/char_1"),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "unsupported"
        assert answer.headers["x-should-retry"] == "false"


def test_poll_header_is_a_whole_number_and_never_changes(api: Any, api_maker: Any) -> None:
    video_id = _make(api)["id"]
    before = api.http.get(f"/v1/videos/{video_id}").headers["openai-poll-after-ms"]
    api_maker.make_all()
    after = api.http.get(f"/v1/videos/{video_id}").headers["openai-poll-after-ms"]
    assert int(before) == int(after) == 1000
