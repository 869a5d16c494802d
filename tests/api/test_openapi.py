"""The OpenAPI document: committed, whole, and true."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from longtake.api import openapi
from longtake.api.app import create_app
from longtake.api.errors import PROBLEM_TYPE
from longtake.api.objects import video_object
from longtake.api.schemas import CreateVideo
from longtake.settings import Settings
from longtake.video.request import REQUEST_FIELDS

COMMITTED = Path(__file__).parents[2] / "docs" / "openapi.json"


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As the code makes it, from JSON and back."""
    app = create_app(Settings(data_dir=tmp_path_factory.mktemp("data")))
    made: dict[str, Any] = json.loads(openapi.text(app.openapi()))
    return made


def _operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]


def test_the_committed_document_is_the_code_s(document: dict[str, Any]) -> None:
    assert COMMITTED.read_text() == openapi.text(document), "run `make docs`"


def test_check_finds_another_document(tmp_path: Path) -> None:
    path = tmp_path / "openapi.json"
    assert openapi.main(["--check", str(path)]) == 1
    assert openapi.main(["--write", str(path)]) == 0
    assert path.read_text() == COMMITTED.read_text()
    path.write_text(path.read_text().replace("longtake", "shorttake", 1))
    assert openapi.main(["--check", str(path)]) == 1


def test_operations_have_names_of_their_own(document: dict[str, Any]) -> None:
    names = Counter(operation["operationId"] for _, _, operation in _operations(document))
    assert [name for name, count in names.items() if count > 1] == []
    assert all(operation.get("description") for _, _, operation in _operations(document))


def test_errors_are_problems(document: dict[str, Any]) -> None:
    for method, path, operation in _operations(document):
        for status, answer in operation["responses"].items():
            if int(status) >= 400 and path not in ("/readyz",):
                assert list(answer["content"]) == [PROBLEM_TYPE], (method, path, status)
        if path not in ("/healthz", "/readyz"):
            assert {"401", "403", "429"} - set(operation["responses"]) <= {"403"}, (method, path)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in schemas
    assert "#/$defs/" not in text


def test_bodies_know_every_field_of_a_request() -> None:
    own = set(CreateVideo.model_fields)
    assert set(REQUEST_FIELDS) - {"image", "video"} <= own
    assert own - set(REQUEST_FIELDS) == {
        "width",
        "height",
        "priority",
        "tags",
        "input_reference",
    }


def test_the_video_object_is_described(api: Any, document: dict[str, Any]) -> None:
    shown = video_object(api.submit())
    described = document["components"]["schemas"]["Video"]["properties"]
    assert set(shown) == set(described)
    progress = document["components"]["schemas"]["Progress"]["properties"]
    assert set(shown["x_progress"]) == set(progress)


def test_a_form_may_bring_a_file(document: dict[str, Any]) -> None:
    content = document["paths"]["/v1/videos"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/json", "multipart/form-data"}
    form = document["components"]["schemas"]["CreateVideoForm"]["properties"]
    assert form["input_reference"]["anyOf"][0] == {"type": "string", "format": "binary"}
    assert document["components"]["schemas"]["CreateVideo"]["additionalProperties"] is False


def test_webhooks_and_keys_are_declared(document: dict[str, Any]) -> None:
    assert set(document["webhooks"]) == {"video.completed", "video.failed", "video.cancelled"}
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["paths"]["/healthz"]["get"]["security"] == []
