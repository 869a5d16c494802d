"""The OpenAPI document, and the command that keeps docs/openapi.json equal to it.

``python -m longtake.api.openapi --write docs/openapi.json`` writes it, ``--check`` compares.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from longtake.api.errors import Problem
from longtake.api.schemas import (
    CancelVideo,
    ChangeVideo,
    CreateVideo,
    EditVideo,
    ExtendVideo,
    RemixVideo,
)
from longtake.queue.subscriptions import EVENT_TYPES

BODIES: tuple[type[BaseModel], ...] = (
    CreateVideo,
    RemixVideo,
    ExtendVideo,
    EditVideo,
    ChangeVideo,
    CancelVideo,
)
FILES = {"CreateVideo": "input_reference", "ExtendVideo": "video", "EditVideo": "video"}
REF = "#/components/schemas/{model}"
SECURITY = {"key": {"type": "http", "scheme": "bearer", "description": "an API key, lt_..."}}
OPEN = frozenset({"/healthz", "/readyz"})


def install_openapi(app: FastAPI) -> None:
    """Have ``app.openapi`` describe bodies, errors and keys, which FastAPI does not see."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the way FastAPI documents


class WebhookData(BaseModel):
    """What an event is about."""

    model_config = ConfigDict(extra="allow")

    id: str


class WebhookEvent(BaseModel):
    """What a webhook is sent, signed after Standard Webhooks 1.0.0."""

    id: str
    object: Literal["event"]
    type: str
    created_at: int
    timestamp: datetime
    data: WebhookData


def describe_webhooks(app: FastAPI) -> None:
    """Declare what endpoints are sent."""

    def deliver(body: WebhookEvent) -> None:
        """Answer 2xx to say that it arrived; anything else is tried again."""

    for name in EVENT_TYPES:
        app.webhooks.add_api_route(
            name,
            deliver,
            methods=["POST"],
            name=f"deliver_{name.replace('.', '_')}",
            summary=f"A {name} event",
            status_code=200,
        )


def text(document: Mapping[str, Any]) -> str:
    """The document as the file holds it."""
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        routes=app.routes,
        webhooks=app.webhooks.routes,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    models: tuple[type[BaseModel], ...] = (*BODIES, Problem)
    described: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (model, "validation") for model in models
    ]
    _, made = models_json_schema(described, ref_template=REF)
    schemas |= made["$defs"]
    for model in BODIES:
        schemas[f"{model.__name__}Form"] = _form(schemas[model.__name__], model.__name__)
    document["components"]["securitySchemes"] = SECURITY
    document["security"] = [{}, {"key": []}]
    for path, operations in (*document["paths"].items(), *document["webhooks"].items()):
        for operation in operations.values():
            _correct(operation, path)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _form(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The schema of the same body as a form: its reference may be a file."""
    form = copy.deepcopy(dict(schema))
    form["title"] = f"{name}Form"
    field = FILES.get(name)
    if field is not None:
        binary = {"type": "string", "format": "binary"}
        described = form["properties"][field]
        described["anyOf"] = [binary, *described["anyOf"]]
    return form


def _correct(operation: dict[str, Any], path: str) -> None:
    """Errors of parameters are a 400 here; open routes need no key."""
    responses = operation["responses"]
    validation = responses.get("422", {}).get("content", {}).get("application/json", {})
    if validation.get("schema", {}).get("$ref", "").endswith("HTTPValidationError"):
        del responses["422"]
    if path in OPEN:
        operation["security"] = []


def main(arguments: list[str] | None = None) -> int:
    """Write or check the committed document; 1 if it is another."""
    from longtake.api.app import create_app
    from longtake.settings import Settings

    parser = argparse.ArgumentParser(prog="python -m longtake.api.openapi", description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", type=Path, metavar="FILE")
    group.add_argument("--check", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    current = text(create_app(Settings()).openapi())
    if options.write is not None:
        options.write.write_text(current, encoding="utf-8")
        return 0
    if options.check.is_file() and options.check.read_text(encoding="utf-8") == current:
        return 0
    sys.stderr.write(f"{options.check} is not what the code says: run `make docs`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
