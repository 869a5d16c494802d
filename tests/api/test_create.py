"""Bodies: the same schema in three encodings, the odd forms, and refusals that name things."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

BALL = {"prompt": "a red ball", "num_frames": "17"}


def _png(media: Any) -> bytes:
    picture: bytes = media.picture
    return picture


def _refused(answer: Any, field: str, *words: str) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["param"] == field
    for word in words:
        assert word in error["message"]
    return error


@pytest.mark.parametrize("encoding", ["json", "data", "multipart"])
def test_every_encoding_makes_the_same_request(api: Any, encoding: str) -> None:
    fields = {
        "prompt": "a red ball",
        "seconds": "5",
        "size": "128x80",
        "seed": "42",
        "num_inference_steps": "6",
        "guidance_scale": "2.5",
        "flow_shift": "4",
        "sampler": "euler",
        "negative_prompt": "snow",
        "window": "8",
        "sink": "1",
        "attention": "window",
        "mode": "hybrid",
        "model": "papercut",
        "fps": "16",
    }
    if encoding == "multipart":
        sent: dict[str, Any] = {"files": {name: (None, text) for name, text in fields.items()}}
    else:
        sent = {encoding: fields}
    answer = api.http.post("/v1/videos", **sent)
    assert answer.status_code == 200, answer.text
    assert answer.json()["request"] == {
        "prompt": "a red ball",
        "seconds": 5,
        "size": "128x80",
        "seed": 42,
        "num_inference_steps": 6,
        "guidance_scale": 2.5,
        "flow_shift": 4,
        "sampler": "euler",
        "negative_prompt": "snow",
        "window": 8,
        "sink": 1,
        "attention": "window",
        "mode": "hybrid",
        "model": "papercut",
        "fps": 16,
    }


def test_complex_fields_of_a_form_are_json_text(api: Any) -> None:
    timeline = [{"at": 1, "prompt": "a blue ball"}]
    form = {**BALL, "num_frames": "81", "prompts": json.dumps(timeline), "tags": '["a", "b"]'}
    video = api.http.post("/v1/videos", data=form).json()
    assert video["request"]["prompts"] == timeline
    assert video["tags"] == ["a", "b"]


@pytest.mark.parametrize("name", ["tags", "tags[]"])
def test_repeated_fields_of_a_form_are_a_list(api: Any, name: str) -> None:
    video = api.http.post("/v1/videos", data={**BALL, name: ["a", "b"]}).json()
    assert video["tags"] == ["a", "b"]


def test_ambiguous_lists_of_objects_are_refused(api: Any) -> None:
    form = {**BALL, "prompts[][at]": "1", "prompts[][prompt]": "x"}
    _refused(api.http.post("/v1/videos", data=form), "prompts", "JSON text")


def test_width_and_height_are_a_size(api: Any) -> None:
    fields = {**BALL, "width": 128, "height": 80}
    assert api.http.post("/v1/videos", json=fields).json()["size"] == "128x80"
    _refused(api.http.post("/v1/videos", json={**BALL, "width": 128}), "width", "height")
    both = {**fields, "size": "64x64"}
    _refused(api.http.post("/v1/videos", json=both), "size", "128x80")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("frames", "num_frames"),
        ("steps", "num_inference_steps"),
        ("promt", "prompt"),
        ("negativ_prompt", "negative_prompt"),
        ("image", "input_reference"),
        ("output_path", "fields: "),
        ("lora", "fields: "),
        ("device", "setting of the service"),
        ("dtype", "setting of the service"),
    ],
)
def test_unknown_fields_are_refused_by_name(api: Any, name: str, near: str) -> None:
    for sent in ({"json": {**BALL, name: "x"}}, {"data": {**BALL, name: "x"}}):
        error = _refused(api.http.post("/v1/videos", **sent), name, near)
        assert error["code"] == "unknown_field"
    assert api.service.store.listings.counts()["queued"] == 0


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"num_frames": 20}, "num_frames", "17 or 21"),
        ({"size": "130x80"}, "size", "128x80"),
        ({"size": "big"}, "size", "832x480"),
        ({"fps": 24}, "fps", "16"),
        ({"seconds": 5}, "num_frames", "give one"),
        ({"seed": -1}, "seed", "from 0 to"),
        ({"seed": 2**63}, "seed", "from 0 to"),
        ({"seed": True}, "seed", "expected a number"),
        ({"seed": "x"}, "seed", "is not a whole number"),
        ({"sampler": "ddim"}, "sampler", "euler or lcm"),
        ({"mode": "fast"}, "mode", "hybrid or clip"),
        ({"model": "papercute"}, "model", "papercut"),
        ({"model": "/etc/passwd"}, "model", "models: "),
        ({"model": "../papercut"}, "model", "papercut"),
        ({"window": 1}, "window", "window 6 or more"),
        ({"priority": 10}, "priority", "less than or equal to 9"),
        ({"tags": ["x" * 65]}, "tags", "at most 64"),
        ({"tags": ["a\nb"]}, "tags", "control"),
        ({"prompt": " "}, "prompt", "is empty"),
        ({"prompt": "a\x00b"}, "prompt", "null character"),
        ({"prompt": "x" * 8001}, "prompt", "at most 8000"),
        ({"prompt": "ball " * 40}, "prompt", "at most 32 tokens"),
        ({"negative_prompt": "ball " * 40}, "negative_prompt", "at most 32 tokens"),
        ({"prompts": [{"at": 1, "prompt": "ball " * 40}]}, "prompts", "at most 32 tokens"),
        ({"strength": 0.5}, "strength", "needs a video"),
        ({"prompts": [{"at": 0, "prompt": "x"}]}, "prompts", "above 0"),
        ({"prompts": [{"at": 1}]}, "prompts", "missing"),
        ({"input_reference": {"path": "/etc/passwd"}}, "input_reference", ""),
        ({"input_reference": {}}, "input_reference", "exactly one"),
        ({"input_reference": {"file_id": "a", "id": "b"}}, "input_reference", "exactly one"),
        ({"input_reference": {"image_url": "/etc/passwd"}}, "input_reference", ""),
        ({"input_reference": {"image_url": "file:///etc/passwd"}}, "input_reference", ""),
        ({"input_reference": {"image_url": "http://127.0.0.1/x"}}, "input_reference", ""),
    ],
)
def test_illegal_values_are_refused(
    api: Any, fields: dict[str, Any], field: str, words: str
) -> None:
    _refused(api.http.post("/v1/videos", json={**BALL, **fields}), field, words)


def test_null_is_absent(api: Any) -> None:
    nothing = dict.fromkeys(("seed", "tags", "priority", "prompts", "input_reference", "size"))
    video = api.http.post("/v1/videos", json={**BALL, **nothing}).json()
    assert (video["priority"], video["tags"]) == (5, [])


def test_long_names_are_not_sent_back_whole(api: Any) -> None:
    answer = api.http.post("/v1/videos", json={**BALL, "x" * 100_000: 1})
    assert answer.status_code == 400
    assert len(answer.content) < 2_000


def test_missing_prompt(api: Any) -> None:
    error = _refused(api.http.post("/v1/videos", json={}), "prompt", "missing")
    assert error["code"] == "missing_field"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"prompt": "x", "seconds": NaN}',
        b'{"prompt": "x", "seconds": Infinity}',
        b'{"prompt": "x", "seconds": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\u0000"}',
        b"\xff\xfe",
        b'{"seed": ' + b"9" * 5000 + b', "prompt": "x"}',
        b"[" * 100_000,
    ],
)
def test_json_that_is_none_or_wrong_is_a_400(api: Any, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = api.http.post("/v1/videos", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_other_content_types_are_a_415(api: Any) -> None:
    for kind in ("text/plain", "application/xml", ""):
        headers = {"content-type": kind}
        answer = api.http.post("/v1/videos", content=b"{}", headers=headers)
        assert answer.status_code == 415


@pytest.mark.parametrize(
    "body",
    [
        b"--x\r\n\r\nprompt\r\n--x--\r\n",
        b'--x\r\nContent-Disposition: form-data; filename="a"\r\n\r\nprompt\r\n--x--\r\n',
        b"nothing",
        b"--x\r\nContent-Disposition: form-data\r\n\r\nv\r\n--x--\r\n",
    ],
)
def test_broken_multipart_is_a_400(api: Any, body: bytes) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = api.http.post("/v1/videos", content=body, headers=headers)
    assert answer.status_code == 400, answer.text


def test_start_image_as_a_file(api: Any, media: Any) -> None:
    files = {"input_reference": ("start.webp", _png(media), "image/webp")}
    answer = api.http.post("/v1/videos", data=BALL, files=files)
    video = answer.json()
    assert answer.status_code == 200, answer.text
    assert video["plan"]["input"] == {"kind": "image", "frames": 1}
    file_id = video["request"]["input_reference"]["file_id"]
    job = api.service.store.listings.get(video["id"])
    assert job.request["image"] == f"input:{file_id}"
    artifact = api.service.store.files.get(file_id)
    assert artifact.job_id == video["id"]
    assert api.service.artifacts.local_path(artifact.key).read_bytes() == _png(media)


def test_start_image_as_a_data_url(api: Any, media: Any) -> None:
    url = "data:image/webp;base64," + base64.b64encode(_png(media)).decode()
    for sent in (
        {"json": {**BALL, "input_reference": {"image_url": url}}},
        {"json": {**BALL, "input_reference": url}},
        {"data": {**BALL, "input_reference[image_url]": url}},
        {"data": {**BALL, "input_reference": json.dumps({"image_url": url})}},
    ):
        answer = api.http.post("/v1/videos", **sent)
        assert answer.status_code == 200, answer.text
        assert answer.json()["plan"]["input"]["kind"] == "image"


def test_an_input_can_be_used_again(api: Any, media: Any) -> None:
    files = {"input_reference": ("start.webp", _png(media), "image/webp")}
    first = api.http.post("/v1/videos", data=BALL, files=files).json()
    file_id = first["request"]["input_reference"]["file_id"]
    second = api.http.post("/v1/videos", json=first["request"]).json()
    form = {**BALL, "input_reference[file_id]": file_id}
    third = api.http.post("/v1/videos", data=form).json()
    remix = api.http.post(f"/v1/videos/{first['id']}/remix", json={"prompt": "snow"}).json()
    api.http.delete(f"/v1/videos/{first['id']}")
    for video in (second, third, remix):
        own = video["request"]["input_reference"]["file_id"]
        assert own != file_id
        artifact = api.service.store.files.get(own)
        assert artifact.job_id == video["id"]
        assert api.service.artifacts.local_path(artifact.key).read_bytes() == _png(media)


def test_a_clip_to_continue_or_redraw(api: Any, media: Any) -> None:
    clip = ("clip.mp4", media.video, "video/mp4")
    form = {"prompt": "a red ball", "num_frames": "33"}
    answer = api.http.post("/v1/videos", data=form, files={"input_reference": clip})
    assert answer.status_code == 200, answer.text
    assert answer.json()["plan"]["input"] == {"kind": "continue", "frames": 9}
    form = {"prompt": "a red ball", "strength": "0.5"}
    redrawn = api.http.post("/v1/videos", data=form, files={"input_reference": clip}).json()
    assert redrawn["plan"]["input"] == {"kind": "redraw", "frames": 9}
    assert redrawn["num_frames"] == 9


def test_extension_and_edit_take_a_file(api: Any, media: Any) -> None:
    clip = {"video": ("clip.mp4", media.video, "video/mp4")}
    form = {"prompt": "a red ball", "seconds": "2"}
    longer = api.http.post("/v1/videos/extensions", data=form, files=clip).json()
    assert longer["num_frames"] == 33
    assert longer["extended_from_video_id"] is None
    edited = api.http.post("/v1/videos/edits", data={"prompt": "snow"}, files=clip).json()
    assert edited["request"]["strength"] == 0.6


def test_an_image_is_no_video(api: Any, media: Any) -> None:
    files = {"video": ("start.webp", _png(media), "image/webp")}
    answer = api.http.post("/v1/videos/edits", data={"prompt": "snow"}, files=files)
    _refused(answer, "video")


def test_an_empty_file_part_is_absent(api: Any, api_maker: Any) -> None:
    for name in ("", "upload"):
        files = {"input_reference": (name, b"", "application/octet-stream")}
        answer = api.http.post("/v1/videos", data=BALL, files=files)
        assert answer.status_code == 200, answer.text
        assert answer.json()["plan"]["input"]["kind"] == "text"
    api_maker.make_all()
    files = {"video": ("upload", b"", "application/octet-stream")}
    form = {"prompt": "snow", "video[id]": answer.json()["id"]}
    edited = api.http.post("/v1/videos/edits", data=form, files=files)
    assert edited.status_code == 200, edited.text


def test_files_where_none_belongs_are_refused(api: Any, media: Any) -> None:
    picture = ("start.webp", _png(media), "image/webp")
    for name in ("image", "mask", "prompt"):
        answer = api.http.post("/v1/videos", data={"prompt": "x"}, files={name: picture})
        _refused(answer, name)
    both = {**BALL, "input_reference[file_id]": "file_" + "a" * 24}
    answer = api.http.post("/v1/videos", data=both, files={"input_reference": picture})
    _refused(answer, "input_reference", "give one")
    twice = [("input_reference", picture), ("input_reference", picture)]
    _refused(
        api.http.post("/v1/videos", data=BALL, files=twice), "input_reference", "more than one"
    )


def test_unreadable_files_are_refused(api: Any) -> None:
    files = {"input_reference": ("../../etc/passwd", b"nothing like an image" * 50, "image/png")}
    answer = api.http.post("/v1/videos", data=BALL, files=files)
    error = _refused(answer, "input_reference")
    assert str(api.settings.data_dir) not in error["message"]


def test_inputs_of_others_are_not_there(api: Any) -> None:
    for reference in ({"file_id": "file_" + "a" * 24}, {"file_id": "../x"}, "file_x", "video_x"):
        answer = api.http.post("/v1/videos", json={**BALL, "input_reference": reference})
        assert answer.status_code == 404, answer.text


def test_plan_queues_nothing(api: Any) -> None:
    answer = api.http.post("/v1/videos/plan", json={"prompt": "a red ball", "seconds": 5})
    plan = answer.json()
    assert answer.status_code == 200
    assert (plan["num_frames"], plan["chunks"], plan["steps"]) == (81, 7, 4)
    assert plan["cost"]["flops"]["total"] > 0
    assert api.service.store.listings.counts()["queued"] == 0
    bad = api.http.post("/v1/videos/plan", json={"prompt": "a red ball", "num_frames": 20})
    _refused(bad, "num_frames", "17 or 21")


def test_plan_of_a_day_answers(api: Any) -> None:
    answer = api.http.post("/v1/videos/plan", json={"prompt": "a red ball", "seconds": 86_400})
    assert answer.json()["cost"] is None
    assert answer.json()["num_frames"] == 1_382_401


def test_clip_mode_is_planned_too(api: Any) -> None:
    body = {"prompt": "a red ball", "mode": "clip", "num_frames": 17}
    video = api.http.post("/v1/videos", json=body).json()
    assert (video["mode"], video["x_progress"]["chunks"]) == ("clip", 1)
    _refused(api.http.post("/v1/videos", json={**body, "sampler": "lcm"}), "sampler", "clip mode")
