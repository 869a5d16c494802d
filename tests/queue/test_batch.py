"""Manifests: both forms, and items that are wrong by themselves."""

from __future__ import annotations

import json

import pytest

from longtake.errors import RequestError, TooLargeError
from longtake.queue.batch import MAX_ITEMS, read_manifest

ONE = {"prompt": "a red ball"}


def test_a_document_and_lines_are_the_same_manifest() -> None:
    items = [ONE, {"prompt": "ein grüner Ball", "seed": 3}]
    document = json.dumps({"name": " balls ", "items": items}).encode()
    lines = "\n".join(json.dumps(item, ensure_ascii=False) for item in items).encode()

    one, other = read_manifest(document, lines=False), read_manifest(lines, lines=True)

    assert (one.name, other.name) == ("balls", None)
    assert [item.fields for item in one.items] == [item.fields for item in other.items] == items
    assert [item.line for item in one.items] == [None, None]
    assert [item.line for item in other.items] == [1, 2]
    assert read_manifest(document) == one
    assert read_manifest(lines, name="mine").name == "mine"


def test_a_wrong_line_is_told_by_its_place_and_stops_no_other() -> None:
    text = '\ufeff{"prompt": "a"}\r\n\n{"prompt": \n[1]\n{"seed": NaN}\n{"prompt": "b\u2028"}\n'

    items = read_manifest(text.encode(), lines=True).items

    assert [(item.index, item.line) for item in items] == [(0, 1), (1, 3), (2, 4), (3, 5), (4, 6)]
    assert [str(item.error) if item.error else "" for item in items] == [
        "",
        "items=1: line 3 is not JSON: Expecting value at character 12",
        "items=2: line 4 is list, expected an object",
        "items=3: line 5 is not JSON: NaN is no JSON number",
        "",
    ]


def test_an_item_that_is_no_object_is_told() -> None:
    items = read_manifest(b'{"items": [{"prompt": "a"}, "b", null]}', lines=False).items

    assert [str(item.error) if item.error else "" for item in items] == [
        "",
        "items=1: item 1 is str, expected an object",
        "items=2: item 2 is NoneType, expected an object",
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[]", "is not an object"),
        (b"{}", "items=None: is missing"),
        (b'{"items": []}', "at least one request"),
        (b'{"items": {}}', "is not a list"),
        (b'{"items": [{}], "model": "a"}', "^model='a': no such field"),
        (b'{"input_file_id": "file-1"}', "^input_file_id='file-1': there are no uploaded"),
        (b'{"items": [{}], "name": 3}', "got int, expected text"),
        (b'{"items": [{}], "name": "a\\nb"}', "control characters"),
        (b'{"items": [{}], "name": "\\ud800"}', "control characters"),
        (b'{"items": [{"a": Infinity}]}', "Infinity is no JSON number"),
        (b"\xff\xfe{}", "is not UTF-8"),
        (b'{"items": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_document_that_cannot_be_read_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_manifest(data, lines=False)


@pytest.mark.parametrize("lines", [True, False])
def test_a_batch_is_bounded(lines: bool) -> None:
    items = [ONE] * (MAX_ITEMS + 1)
    if lines:
        data = "\n".join(json.dumps(item) for item in items).encode()
    else:
        data = json.dumps({"items": items}).encode()

    with pytest.raises(TooLargeError, match="at most 1000 requests"):
        read_manifest(data, lines=lines)


def test_deep_lines_stop_no_other() -> None:
    items = read_manifest(b"[" * 100_000 + b'\n{"prompt": "a"}', lines=True).items

    assert "nested too deeply" in str(items[0].error)
    assert items[1].fields == {"prompt": "a"}
