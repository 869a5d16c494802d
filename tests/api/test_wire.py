"""Requests as OpenAI's SDK sent them, byte for byte (see wire/record.py), answered today."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

WIRE = Path(__file__).parent / "wire"
PLACE = "video_" + "a" * 24


def _replay(api: Any, media: Any, name: str, video_id: str) -> Any:
    """Send a recorded request about ``video_id``, with real files in place of its stand-ins."""
    recorded = json.loads((WIRE / f"{name}.json").read_text())
    body = base64.b64decode(recorded["body"]).replace(PLACE.encode(), video_id.encode())
    body = body.replace(b"\nCLIP\r", b"\n" + media.video + b"\r")
    body = body.replace(b"\nIMAGE\r", b"\n" + media.picture + b"\r")
    data_url = b"data:image/webp;base64," + base64.b64encode(media.picture)
    body = body.replace(b"data:IMAGE", data_url)
    path = recorded["path"].replace(PLACE, video_id)
    return api.http.request(
        recorded["method"], path, headers=recorded["headers"], content=body or None
    )


@pytest.fixture
def done(api: Any, api_maker: Any) -> str:
    """A completed video of nine frames."""
    video_id = str(api.submit().id)
    api_maker.make_all()
    return video_id


def _answer(api: Any, media: Any, name: str, video_id: str) -> dict[str, Any]:
    answer = _replay(api, media, name, video_id)
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("create", {"prompt": "a red ball", "seconds": 5, "size": "128x80"}),
        (
            "create_extra_body",
            {"prompt": "a red ball", "seed": 42, "num_inference_steps": 6, "num_frames": 17},
        ),
        ("create_json_text", {"prompts": [{"at": 1, "prompt": "snow"}]}),
        ("create_empty_file", {"prompt": "a red ball"}),
        ("remix", {"prompt": "a blue ball", "num_frames": 9}),
        ("extend_id", {"prompt": "snow", "seconds": 4}),
        ("edit_id", {"prompt": "snow", "strength": 0.6}),
    ],
)
def test_fields_arrive(
    api: Any, media: Any, done: str, name: str, expected: dict[str, Any]
) -> None:
    video = _answer(api, media, name, done)
    assert video["status"] == "queued"
    assert expected.items() <= video["request"].items()


def test_lists_arrive(api: Any, media: Any, done: str) -> None:
    assert _answer(api, media, "create_json_text", done)["tags"] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("create_file", "image"),
        ("create_bytes", "image"),
        ("create_reference", "image"),
        ("create_empty_file", "text"),
        ("edit_file", "redraw"),
        ("edit_id", "redraw"),
        ("extend_file", "continue"),
        ("extend_id", "continue"),
    ],
)
def test_inputs_arrive(api: Any, media: Any, done: str, name: str, kind: str) -> None:
    assert _answer(api, media, name, done)["plan"]["input"]["kind"] == kind


def test_relations(api: Any, media: Any, done: str) -> None:
    for name, field in [
        ("remix", "remixed_from_video_id"),
        ("extend_id", "extended_from_video_id"),
        ("edit_id", "edited_from_video_id"),
    ]:
        assert _answer(api, media, name, done)[field] == done


def test_reading(api: Any, media: Any, done: str) -> None:
    later = api.submit().id
    assert _answer(api, media, "retrieve", done)["id"] == done
    assert _answer(api, media, "poll", done)["status"] == "completed"
    listed = _answer(api, media, "list", done)
    assert [video["id"] for video in listed["data"]] == [later]
    assert _replay(api, media, "content", done).content == media.video
    for variant in ("thumbnail", "spritesheet"):
        assert _replay(api, media, f"content_{variant}", done).content == media.picture
    deleted = {"id": done, "object": "video.deleted", "deleted": True}
    assert _answer(api, media, "delete", done) == deleted


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("create_nested_list", 400, "invalid_value"),
        ("create_character", 404, "unsupported"),
        ("get_character", 404, "unsupported"),
    ],
)
def test_refusals(api: Any, media: Any, done: str, name: str, status: int, code: str) -> None:
    answer = _replay(api, media, name, done)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_the_sdk_still_sends_the_same(tmp_path: Path) -> None:
    """Recorded anew; only boundaries may differ. If this fails, look at what changed and record."""
    spec = importlib.util.spec_from_file_location("record", WIRE / "record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.record(tmp_path)
    names = sorted(path.name for path in WIRE.glob("*.json"))
    assert names == sorted(path.name for path in tmp_path.glob("*.json"))
    for name in names:
        assert _plain(WIRE / name) == _plain(tmp_path / name), name


def _plain(path: Path) -> dict[str, Any]:
    """A recording without its boundary and the SDK's patch version."""
    recorded: dict[str, Any] = json.loads(path.read_text())
    body = base64.b64decode(recorded["body"])
    kind, mark, boundary = recorded["headers"].get("content-type", "").partition("boundary=")
    if mark:
        body = body.replace(boundary.encode(), b"BOUNDARY")
        recorded["headers"]["content-type"] = kind
    del recorded["sdk"]
    return {**recorded, "body": body}
