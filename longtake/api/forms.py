"""Bodies as plain fields and files, the same for JSON, multipart and urlencoded ones.

A form spells structure as SDKs do: ``input_reference[image_url]`` and ``video[id]`` are objects,
``tags[]`` and repeated names are lists, and ``prompts`` or ``tags`` may be JSON text. An empty file
part counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from starlette.datastructures import FormData, UploadFile

from longtake.api.errors import ApiError

REFERENCES = frozenset({"input_reference", "video"})
JSON_TEXT = REFERENCES | {"prompts", "tags"}
MAX_FILES = 4
MAX_FIELDS = 100
HASH_BLOCK = 1 << 20
_KEY = re.compile(r"^([^\[\]]+)((?:\[[^\[\]]*\])*)$")
_PART = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True, slots=True)
class Body:
    """What a request says: ``fields`` by name, and the files that came with it."""

    fields: dict[str, Any]
    files: dict[str, UploadFile] = field(default_factory=dict)

    def fingerprint(self, route: str) -> str:
        """SHA-256 of route, fields and files; reads the files, so call it in a thread."""
        digest = hashlib.sha256(route.encode())
        text = json.dumps(self.fields, sort_keys=True, separators=(",", ":"))
        digest.update(b"\0" + text.encode())
        for name, upload in sorted(self.files.items()):
            digest.update(f"\0{name}\0".encode())
            upload.file.seek(0)
            while block := upload.file.read(HASH_BLOCK):
                digest.update(block)
            upload.file.seek(0)
        return digest.hexdigest()


@asynccontextmanager
async def read_body(request: Request) -> AsyncIterator[Body]:
    """The body's fields and files; the files are closed at the end.

    Raises:
        ApiError: 415 for another content type, 400 for a body that is not of its type.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        yield Body(json_object(await request.body()))
    elif kind in ("multipart/form-data", "application/x-www-form-urlencoded"):
        form = await request.form(
            max_files=MAX_FILES,
            max_fields=MAX_FIELDS,
            max_part_size=request.app.state.settings.max_body_bytes,
        )
        try:
            yield _from_form(form)
        finally:
            await form.close()
    elif not kind and not await request.body():
        yield Body({})
    else:
        shown = kind or "of the body is missing"
        raise ApiError(415, f"Content-Type {shown}: send multipart/form-data or JSON.")


def json_object(data: bytes) -> dict[str, Any]:
    """A JSON object; NaN, Infinity, lone surrogates and null characters are refused.

    Raises:
        ApiError: 400.
    """
    try:
        value = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not JSON: {str(error)[:200]}", code="not_json") from None
    if not isinstance(value, dict):
        message = f"The body is JSON of type {type(value).__name__}, expected an object."
        raise ApiError(400, message, code="not_an_object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _from_form(form: FormData) -> Body:
    fields: dict[str, Any] = {}
    files: dict[str, UploadFile] = {}
    for key, value in form.multi_items():
        if isinstance(value, UploadFile):
            if value.size:
                _add_file(files, key, value)
        else:
            _add_field(fields, key, value)
    for name in REFERENCES & fields.keys():
        if fields[name] == "":
            # a file input that nobody filled, sent without a file name
            del fields[name]
    for name in JSON_TEXT & fields.keys():
        fields[name] = _structure(name, fields[name])
    return Body(fields, files)


def _add_file(files: dict[str, UploadFile], key: str, upload: UploadFile) -> None:
    if key in files:
        raise ApiError(400, f"{key}: more than one file was sent", param=key, code="invalid_value")
    files[key] = upload


def _add_field(fields: dict[str, Any], key: str, value: str) -> None:
    match = _KEY.match(key)
    if match is None:
        raise ApiError(400, f"{key[:60]!r} is no field name", code="unknown_field")
    name, parts = match[1], _PART.findall(match[2])
    if not parts:
        if name in fields:
            fields[name] = [*_listed(fields[name]), value]
        else:
            fields[name] = value
    elif parts == [""]:
        fields[name] = [*_listed(fields.get(name, [])), value]
    elif len(parts) == 1:
        inside = fields.setdefault(name, {})
        if not isinstance(inside, dict) or parts[0] in inside:
            raise ApiError(400, f"{name}: was sent twice", param=name, code="invalid_value")
        inside[parts[0]] = value
    else:
        # name[][a], name[][b]: which belong to one item cannot be known
        message = f"{name}: send it as JSON text in one field, or send the whole body as JSON"
        raise ApiError(400, message, param=name, code="invalid_value")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _structure(name: str, value: Any) -> Any:
    """JSON text in a form's field as what it says; other text as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        message = f"{name}: starts like JSON and is none: {str(error)[:200]}"
        raise ApiError(400, message, param=name, code="not_json") from None
