"""What models tell of themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from longtake.errors import RequestError, ServiceError
from longtake.queue.catalogue import Catalogue
from longtake.settings import Settings
from longtake.video.manifest import BUNDLED


def test_list_has_the_default_first(api: Any) -> None:
    shown = api.http.get("/v1/models").json()
    assert shown["object"] == "list"
    first = shown["data"][0]
    assert (first["id"], first["object"], first["default"]) == ("papercut", "model", True)
    assert first["available"]
    assert "self-forcing-1.3b" in [model["id"] for model in shown["data"]]


def test_capabilities_say_what_a_request_may_ask(api: Any) -> None:
    model = api.http.get("/v1/models/papercut").json()
    able = model["capabilities"]
    assert able["modes"] == ["hybrid", "clip"]
    assert able["inputs"] == ["text", "image", "video"]
    assert able["sizes"] == ["128x80"]
    assert able["frame_rule"] == "1+4k"
    assert (able["fps"], able["num_frames"], able["max_seconds"]) == (16, 81, 86_400)
    assert able["num_inference_steps"] == 4
    assert {"red", "ball"} <= set(able["vocabulary"])
    assert not any(word.startswith("<") for word in able["vocabulary"])
    body = {
        "prompt": " ".join(able["vocabulary"][:5]),
        "model": model["id"],
        "mode": able["modes"][0],
        "size": able["sizes"][0],
        "num_frames": able["num_frames"],
        "num_inference_steps": able["num_inference_steps"],
        "guidance_scale": able["guidance_scale"],
        "flow_shift": able["flow_shift"],
        "sampler": able["samplers"][0],
        "window": able["window"],
        "sink": able["sink"],
        "attention": able["attention"][0],
    }
    answer = api.http.post("/v1/videos/plan", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["warnings"] == []


def test_a_model_that_is_not_at_hand_is_listed_and_fetched_from_nowhere(api: Any) -> None:
    model = api.http.get("/v1/models/self-forcing-1.3b").json()
    assert not model["available"]
    assert model["capabilities"] is None
    assert model["licence"] == "Apache-2.0"


def test_unknown_models(api: Any) -> None:
    for name in ("nothing", "owner/nothing", "%2e%2e/papercut"):
        answer = api.http.get(f"/v1/models/{name}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


def _own_model(folder: Path, name: str) -> Path:
    shutil.copytree(BUNDLED, folder)
    manifest = json.loads((folder / "longtake.json").read_text())
    (folder / "longtake.json").write_text(json.dumps({**manifest, "name": name}))
    return folder


def test_a_folder_in_the_settings_is_named_by_its_manifest(make_site: Any, tmp_path: Path) -> None:
    folder = _own_model(tmp_path / "weights", "mine")
    site = make_site(models=(str(folder),), default_model=str(folder))
    shown = site.http.get("/v1/models").text
    assert str(folder) not in shown
    assert '"id":"mine"' in shown
    made = site.http.post("/v1/videos", json={"prompt": "a red ball", "num_frames": 9})
    assert made.json()["model"] == made.json()["request"]["model"] == "mine"
    assert str(folder) not in made.text
    job = site.service.store.listings.get(made.json()["id"])
    assert job.request["model"] == str(folder)
    refused = site.http.post("/v1/videos", json={"prompt": "x", "model": str(folder)})
    assert refused.status_code == 400


def test_catalogue_refuses_two_models_of_one_name(tmp_path: Path) -> None:
    folder = _own_model(tmp_path / "weights", "papercut")
    with pytest.raises(ServiceError, match="two models are called 'papercut'"):
        Catalogue(Settings(models=(str(folder),)))
    with pytest.raises(ServiceError, match="is no name"):
        Catalogue(Settings(models=("no such thing",)))


def test_catalogue_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nearest papercut"):
        Catalogue(Settings(data_dir=tmp_path)).find("papercot")
