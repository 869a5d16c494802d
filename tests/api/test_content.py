"""Files over HTTP: variants, ranges, conditions, HEAD; from a folder and from elsewhere."""

from __future__ import annotations

import email
import shutil
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest

from longtake.api.ranges import read_ranges
from longtake.queue.artifacts import RemoteArtifacts, open_artifacts


def _make(api: Any) -> str:
    body = {"prompt": "a red ball", "num_frames": 17}
    return str(api.http.post("/v1/videos", json=body).json()["id"])


@pytest.fixture
def done(api: Any, api_maker: Any) -> str:
    """A completed video."""
    video_id = _make(api)
    api_maker.make_all()
    return video_id


@pytest.fixture(params=["folder", "elsewhere"])
def url(request: Any, api: Any, done: str, tmp_path: Path) -> Iterator[str]:
    """Content of a completed video, from a local folder and through fsspec."""
    if request.param == "folder":
        yield f"/v1/videos/{done}/content"
        return
    local = api.service.artifacts
    remote = fsspec.filesystem("memory")
    remote.put(f"{api.settings.artifacts}/jobs/{done}", f"/{done}/jobs/{done}", recursive=True)
    where = {"artifacts_url": f"memory://{done}", "scratch_dir": tmp_path / "scratch"}
    api.service.artifacts = open_artifacts(api.settings.model_copy(update=where))
    assert isinstance(api.service.artifacts, RemoteArtifacts)
    yield f"/v1/videos/{done}/content"
    api.service.artifacts = local
    remote.rm(f"/{done}", recursive=True)


def test_variants(api: Any, done: str, media: Any) -> None:
    for variant, data, kind in [
        (None, media.video, "video/mp4"),
        ("video", media.video, "video/mp4"),
        ("thumbnail", media.picture, "image/webp"),
        ("spritesheet", media.picture, "image/webp"),
    ]:
        params = {"variant": variant} if variant else {}
        answer = api.http.get(f"/v1/videos/{done}/content", params=params)
        assert answer.status_code == 200
        assert answer.content == data
        assert answer.headers["content-type"] == kind
        assert answer.headers["etag"] == f'"{sha256(data).hexdigest()}"'
        assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"
        assert answer.headers["accept-ranges"] == "bytes"
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert api.http.get(f"/v1/videos/{done}/content?variant=audio").status_code == 400


def test_file_names_are_safe(api: Any, done: str) -> None:
    shown = api.http.get(f"/v1/videos/{done}/content").headers["content-disposition"]
    assert shown == f'inline; filename="{done}.mp4"'
    params = {"download": "true", "variant": "thumbnail"}
    saved = api.http.get(f"/v1/videos/{done}/content", params=params)
    name = f"{done}-thumbnail.webp"
    assert saved.headers["content-disposition"] == f'attachment; filename="{name}"'


@pytest.mark.parametrize(
    ("wanted", "span"),
    [
        ("bytes=0-9", (0, 10)),
        ("bytes=100-", (100, None)),
        ("bytes=-7", (-7, None)),
        ("bytes=5-999999999", (5, None)),
        ("BYTES = 0-0", (0, 1)),
    ],
)
def test_single_ranges(
    api: Any, url: str, media: Any, wanted: str, span: tuple[int, int | None]
) -> None:
    answer = api.http.get(url, headers={"range": wanted})
    data = media.video[slice(*span)]
    start = media.video.index(data) if span[0] < 0 else span[0]
    assert answer.status_code == 206
    assert answer.content == data
    size = len(media.video)
    assert answer.headers["content-range"] == f"bytes {start}-{start + len(data) - 1}/{size}"
    assert int(answer.headers["content-length"]) == len(data)


def test_several_ranges(api: Any, url: str, media: Any) -> None:
    answer = api.http.get(url, headers={"range": "bytes=0-3, 10-19,-5"})
    assert answer.status_code == 206
    assert int(answer.headers["content-length"]) == len(answer.content)
    head = f"Content-Type: {answer.headers['content-type']}\r\n\r\n".encode()
    parts: Any = email.message_from_bytes(head + answer.content).get_payload()
    assert [part.get_payload(decode=True) for part in parts] == [
        media.video[:4],
        media.video[10:20],
        media.video[-5:],
    ]
    assert parts[1]["Content-Range"] == f"bytes 10-19/{len(media.video)}"
    assert parts[1].get_content_type() == "video/mp4"


@pytest.mark.parametrize("wanted", ["bytes=x-y", "bytes=", "frames=0-1", "bytes=9-1", "0-1"])
def test_unreadable_ranges_are_ignored(api: Any, url: str, media: Any, wanted: str) -> None:
    answer = api.http.get(url, headers={"range": wanted})
    assert answer.status_code == 200
    assert answer.content == media.video


def test_ranges_past_the_end(api: Any, url: str, media: Any) -> None:
    answer = api.http.get(url, headers={"range": f"bytes={len(media.video)}-"})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(media.video)}"
    assert answer.json()["error"]["code"] == "range_not_satisfiable"


def test_if_range(api: Any, url: str, media: Any) -> None:
    whole = api.http.get(url)
    for condition, status in [
        (whole.headers["etag"], 206),
        (whole.headers["last-modified"], 206),
        ('"other"', 200),
        (f"W/{whole.headers['etag']}", 200),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 200),
    ]:
        answer = api.http.get(url, headers={"range": "bytes=0-9", "if-range": condition})
        assert answer.status_code == status, condition
        assert answer.content == (media.video[:10] if status == 206 else media.video)


def test_if_none_match(api: Any, url: str) -> None:
    etag = api.http.get(url).headers["etag"]
    for condition in (etag, f'"x", {etag}', f"W/{etag}", "*"):
        answer = api.http.get(url, headers={"if-none-match": condition, "range": "bytes=0-1"})
        assert answer.status_code == 304
        assert answer.content == b""
        assert answer.headers["etag"] == etag
    assert api.http.get(url, headers={"if-none-match": '"x"'}).status_code == 200
    date = api.http.get(url).headers["last-modified"]
    assert api.http.get(url, headers={"if-modified-since": date}).status_code == 304
    later = "Fri, 01 Jan 2100 00:00:00 GMT"
    assert api.http.get(url, headers={"if-modified-since": later}).status_code == 304
    both = {"if-none-match": '"x"', "if-modified-since": date}
    assert api.http.get(url, headers=both).status_code == 200
    assert api.http.get(url, headers={"range": "bytes=0-" + "9" * 30}).status_code == 206


def test_if_match(api: Any, url: str) -> None:
    whole = api.http.get(url)
    etag, date = whole.headers["etag"], whole.headers["last-modified"]
    early, later = "Thu, 01 Jan 1970 00:00:00 GMT", "Fri, 01 Jan 2100 00:00:00 GMT"
    for condition, status in [(etag, 206), (f'"x", {etag}', 206), ("*", 206), ('"x"', 412)]:
        asked = {"if-match": condition, "if-unmodified-since": early, "range": "bytes=0-1"}
        assert api.http.get(url, headers=asked).status_code == status, condition
    assert api.http.get(url, headers={"if-match": f"W/{etag}"}).json()["status"] == 412
    for condition, status in [(date, 200), (later, 200), ("yesterday", 200), (early, 412)]:
        answer = api.http.get(url, headers={"if-unmodified-since": condition})
        assert answer.status_code == status, condition


def test_head_has_the_headers_of_get(api: Any, url: str, media: Any) -> None:
    got, head = api.http.get(url), api.http.head(url)
    assert head.status_code == 200
    assert head.content == b""
    for name in ("content-length", "etag", "content-type", "accept-ranges", "cache-control"):
        assert head.headers[name] == got.headers[name]
    part = api.http.head(url, headers={"range": "bytes=0-9"})
    assert (part.status_code, part.headers["content-length"]) == (206, "10")
    for path in ("/v1/videos", "/v1/models", "/healthz"):
        assert api.http.head(path).status_code == 200


def test_a_download_can_be_resumed(api: Any, url: str, media: Any) -> None:
    with api.http.stream("GET", url) as answer:
        begun = next(answer.iter_raw(1000))
        etag = answer.headers["etag"]
    headers = {"range": f"bytes={len(begun)}-", "if-range": etag}
    rest = api.http.get(url, headers=headers)
    assert rest.status_code == 206
    assert begun + rest.content == media.video


def test_not_ready_is_not_tried_again_by_sdks(api: Any, api_maker: Any) -> None:
    video_id = _make(api)
    job: Any = None
    for state in ("queued", "running"):
        job = api_maker.claim() if state == "running" else None
        for path in ("content", "content?variant=thumbnail", "receipt"):
            answer = api.http.get(f"/v1/videos/{video_id}/{path}")
            assert answer.status_code == 409, state
            assert answer.json()["error"]["code"] == "video_not_ready"
            assert answer.headers["x-should-retry"] == "false"
    api.service.store.leases.fail(job.id, job.fence, {"code": "timeout", "message": "x"})
    answer = api.http.get(f"/v1/videos/{video_id}/content")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (404, "false")


def test_a_file_that_is_gone_is_a_404(api: Any, done: str) -> None:
    shutil.rmtree(api.settings.data_dir / "artifacts" / "jobs" / done)
    answer = api.http.get(f"/v1/videos/{done}/content")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "gone"


def test_a_file_cut_short_breaks_the_connection(api: Any, done: str) -> None:
    artifact = api.service.store.files.of_job(done, "video")[0]
    path = api.service.artifacts.local_path(artifact.key)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(httpx.RemoteProtocolError):
        api.http.get(f"/v1/videos/{done}/content")


def test_receipt(api: Any, done: str, media: Any) -> None:
    answer = api.http.get(f"/v1/videos/{done}/receipt")
    assert answer.content == media.receipt
    assert answer.headers["content-type"] == "application/json"


def test_preview_is_the_newest(api: Any, api_maker: Any, media: Any) -> None:
    video_id = _make(api)
    url = f"/v1/videos/{video_id}/preview"
    assert api.http.get(url).status_code == 404
    job = api_maker.claim()
    api_maker.chunk(job, 0)
    first = api.http.get(url)
    assert first.content == media.picture
    assert first.headers["cache-control"] == "private, no-cache"
    same = api.http.get(url, headers={"if-none-match": first.headers["etag"]})
    assert same.status_code == 304
    api_maker._media = replace(media, picture=media.picture + b"\0")
    api_maker.chunk(job, 1)
    newer = api.http.get(url, headers={"if-none-match": first.headers["etag"]})
    assert (newer.status_code, newer.content) == (200, media.picture + b"\0")


def test_segments_appear_as_chunks_are_done(api: Any, api_maker: Any, media: Any) -> None:
    video_id = _make(api)
    url = f"/v1/videos/{video_id}/segments"
    empty: dict[str, Any] = {
        "object": "list",
        "init": None,
        "codecs": None,
        "fps": 16,
        "done": False,
        "data": [],
    }
    assert api.http.get(url).json() == empty
    job = api_maker.claim()
    api_maker.chunk(job, 0, frames=5)
    api_maker.chunk(job, 1, frames=8)
    shown = api.http.get(url).json()
    assert shown["codecs"].startswith("avc1.")
    assert len(shown["codecs"]) == len("avc1.PPCCLL")
    assert [(one["chunk"], one["start"], one["frames"]) for one in shown["data"]] == [
        (0, 0, 5),
        (1, 5 / 16, 8),
    ]
    assert not shown["done"]
    parts = [shown["init"], shown["data"][0]["url"]]
    assert b"".join(api.http.get(part).content for part in parts) == media.video
    api_maker.complete(job)
    assert api.http.get(url).json()["done"]


@pytest.mark.parametrize(
    "name", ["segment-000009.m4s", "segment-0.m4s", "rollout.json", "..%2frollout.json", "init.mp5"]
)
def test_segment_names_are_confined(api: Any, done: str, name: str) -> None:
    assert api.http.get(f"/v1/videos/{done}/segments/{name}").status_code == 404


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("0-0", [(0, 1)]),
        ("0-3,2-5", [(0, 4), (2, 6)]),
        ("0-9,0-9", None),
        ("-0", []),
        ("10-", []),
        ("10-,0-1", [(0, 2)]),
        (",".join(["0-0"] * 17), None),
        ("-99", [(0, 10)]),
        ("1-2-3", None),
        ("٠-١", None),
    ],
)
def test_reading_ranges_of_ten_bytes(text: str, spans: list[tuple[int, int]] | None) -> None:
    assert read_ranges(text, 10) == spans
