"""Manifests of many requests: one JSON document, or JSON lines with one request a line.

The keys of an item are the REST fields of ``POST /v1/videos``. An item that is no JSON object does
not stop the others; it is told by its place. What the fields mean is the caller's affair.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from longtake.errors import RequestError, TooLargeError

MAX_ITEMS = 1000
MAX_NAME = 255
_FIELDS = ("name", "items")
_BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a manifest. ``line`` is its line in a file of lines, from 1.

    ``error`` says why there are no ``fields``.
    """

    index: int
    line: int | None
    fields: dict[str, Any]
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """A batch as it was asked for."""

    name: str | None
    items: tuple[Item, ...]


def read_manifest(data: bytes, *, lines: bool | None = None, name: str | None = None) -> Manifest:
    """The manifest in ``data``: JSON lines, or ``{"name": ..., "items": [...]}``.

    Args:
        data: UTF-8 text.
        lines: which of the two it is; None finds out.
        name: the batch's name, where ``data`` names none.

    Raises:
        RequestError: it is not of that form, holds no item, or too many.
    """
    try:
        text = data.decode().removeprefix(_BOM)
    except UnicodeDecodeError as error:
        raise RequestError("items", "the manifest", f"is not UTF-8: {error.reason}") from None
    if lines is None:
        lines = not _is_document(text)
    if lines:
        items = _of_lines(text)
    else:
        document = _document(text)
        items = _of_list(document["items"])
        name = document.get("name", name)
    if not items:
        raise RequestError("items", 0, "a batch has at least one request")
    return Manifest(_name(name), tuple(items))


def _is_document(text: str) -> bool:
    """Whether the whole is one object that holds items: no request has such a field."""
    try:
        document = _parse(text)
    except ValueError:
        return False
    return isinstance(document, dict) and "items" in document


def _of_lines(text: str) -> list[Item]:
    items: list[Item] = []
    # at "\n" only: other line ends may stand inside a JSON string
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        _check_count(len(items) + 1)
        try:
            items.append(_item(len(items), number, _parse(line)))
        except ValueError as error:
            items.append(_broken(len(items), number, f"line {number} is not JSON: {error}"))
    return items


def _of_list(values: Any) -> list[Item]:
    if not isinstance(values, list):
        raise RequestError("items", values, "is not a list of requests")
    _check_count(len(values))
    return [_item(index, None, value) for index, value in enumerate(values)]


def _item(index: int, line: int | None, value: Any) -> Item:
    if isinstance(value, dict):
        return Item(index, line, value)
    where = f"line {line}" if line is not None else f"item {index}"
    return _broken(index, line, f"{where} is {type(value).__name__}, expected an object")


def _broken(index: int, line: int | None, reason: str) -> Item:
    return Item(index, line, {}, RequestError("items", index, reason))


def _document(text: str) -> dict[str, Any]:
    try:
        document = _parse(text)
    except ValueError as error:
        raise RequestError("items", "the manifest", f"is not JSON: {error}") from None
    form = '{"name": ..., "items": [{"prompt": ...}, ...]}, or JSON lines'
    if not isinstance(document, dict):
        raise RequestError("items", "the manifest", "is not an object", form)
    if "input_file_id" in document:
        reason = "there are no uploaded batch files here"
        raise RequestError("input_file_id", document["input_file_id"], reason, f"send {form}")
    for field in document:
        if field not in _FIELDS:
            raise RequestError(field, document[field], "no such field", form)
    if "items" not in document:
        raise RequestError("items", None, "is missing", form)
    return document


def _parse(text: str) -> Any:
    """JSON without NaN and Infinity, which no other reader takes."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _check_count(count: int) -> None:
    if count > MAX_ITEMS:
        reason = f"a batch has at most {MAX_ITEMS} requests"
        raise TooLargeError("items", count, reason, "send several batches")


def _name(name: Any) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str):
        raise RequestError("name", name, f"got {type(name).__name__}, expected text")
    if len(name) > MAX_NAME or any(ord(char) < 32 or 0xD800 <= ord(char) < 0xE000 for char in name):
        legal = f"at most {MAX_NAME} characters, no control characters"
        raise RequestError("name", name, "is too long or holds control characters", legal)
    return name.strip() or None
