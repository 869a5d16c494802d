"""Clients as people have them: the openai SDK, a replicate-style poll loop, plain curl."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


@pytest.fixture
def client(api: Any) -> Iterator[Any]:
    """OpenAI's client of the shared application."""
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="unused", max_retries=2) as made:
        yield made


@pytest.fixture
def busy(api: Any, api_maker: Any) -> Any:
    """The application with a worker that completes what comes."""
    api_maker.run()
    return api


def test_create_and_poll(busy: Any, client: Any, media: Any) -> None:
    video = client.videos.create_and_poll(
        prompt="a red ball", model="papercut", seconds="2", size="128x80"
    )
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    assert (video.seconds, video.size, video.model) == ("2", "128x80", "papercut")
    assert video.x_progress["phase"] == "completed"
    assert client.videos.download_content(video.id).read() == media.video


def test_failure_ends_the_poll(api: Any, api_maker: Any, client: Any) -> None:
    video = client.videos.create(prompt="a red ball")
    job = api_maker.claim()
    error = {"code": "out_of_memory", "message": "the device is full"}
    api.service.store.leases.fail(job.id, job.fence, error)
    ended = client.videos.poll(video.id)
    assert (ended.status, ended.error.code) == ("failed", "out_of_memory")


def test_cancelled_ends_the_poll(api: Any, client: Any) -> None:
    video = client.videos.create(prompt="a red ball")
    api.http.post(f"/v1/videos/{video.id}/cancel")
    assert client.videos.poll(video.id).status == "cancelled"


def test_paging_over_250_videos(api: Any, client: Any) -> None:
    job = api.service.client.new_job({"prompt": "a red ball", "num_frames": 9})
    made = [api.service.client.submit_jobs([job], limits={})[0].id for _ in range(250)]
    assert [video.id for video in client.videos.list(limit=100, order="asc")] == made
    assert [video.id for video in client.videos.list()] == made[::-1]
    first = client.videos.list(limit=7)
    assert (len(first.data), first.has_more) == (7, True)
    assert [v.id for v in first.get_next_page().data] == made[::-1][7:14]


def test_download_of_each_variant(busy: Any, client: Any, media: Any, tmp_path: Path) -> None:
    video = client.videos.create_and_poll(prompt="a red ball")
    for variant, data in [
        ("video", media.video),
        ("thumbnail", media.picture),
        ("spritesheet", media.picture),
    ]:
        got = client.videos.download_content(video.id, variant=variant)
        got.write_to_file(tmp_path / variant)
        assert (tmp_path / variant).read_bytes() == data


def test_content_before_its_time_is_told_once(api: Any, client: Any) -> None:
    video = client.videos.create(prompt="a red ball")
    with pytest.raises(openai.ConflictError) as caught:
        client.videos.download_content(video.id)
    assert caught.value.code == "video_not_ready"
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


def test_remix_extend_edit_delete(busy: Any, client: Any, media: Any) -> None:
    source = client.videos.create_and_poll(prompt="a red ball", extra_body={"num_frames": 9})
    remix = client.videos.remix(source.id, prompt="a blue ball")
    assert remix.remixed_from_video_id == source.id
    longer = client.videos.extend(
        prompt="it rolls away", seconds="4", video=b"", extra_body={"video": {"id": source.id}}
    )
    assert (longer.extended_from_video_id, longer.seconds) == (source.id, "4")
    edited = client.videos.edit(prompt="snow", video=("clip.mp4", media.video, "video/mp4"))
    for video in (remix, longer, edited):
        assert client.videos.poll(video.id).status == "completed"
    deleted = client.videos.delete(source.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (source.id, True, "video.deleted")
    with pytest.raises(openai.NotFoundError) as caught:
        client.videos.retrieve(source.id)
    assert caught.value.code == "video_not_found"


def test_errors_reach_the_caller(api: Any, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.videos.create(prompt="a red ball", extra_body={"num_frames": 20})
    assert caught.value.param == "num_frames"
    assert caught.value.type == "invalid_request_error"
    assert "17 or 21" in caught.value.message
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        client.videos.create_character(name="x", video=b"x")
    assert missing.value.code == "unsupported"


def test_a_create_whose_answer_was_lost_makes_one_video(api: Any) -> None:
    """The first answer is dropped on its way, as a proxy that dies would; the SDK tries again."""

    class Lossy(httpx.HTTPTransport):
        lost = 0

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            answer = super().handle_request(request)
            if request.method == "POST" and not self.lost:
                answer.read()
                self.lost += 1
                raise httpx.ReadError("lost")
            return answer

    import httpx2

    class Adapter(httpx2.BaseTransport):
        """OpenAI's SDK brings its own httpx; send through the tests' one."""

        def __init__(self) -> None:
            self.inner = Lossy()

        def handle_request(self, request: Any) -> Any:
            plain = httpx.Request(
                request.method,
                str(request.url),
                headers=request.headers.raw,
                content=request.read(),
            )
            try:
                answer = self.inner.handle_request(plain)
            except httpx.ReadError as error:
                raise httpx2.ReadError(str(error)) from error
            return httpx2.Response(
                answer.status_code, headers=answer.headers.raw, content=answer.read()
            )

        def close(self) -> None:
            self.inner.close()

    adapter = Adapter()
    http = httpx2.Client(transport=adapter)
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="unused", http_client=http) as client:
        video = client.videos.create(prompt="a red ball")
    assert adapter.inner.lost == 1
    assert [one["id"] for one in api.http.get("/v1/videos").json()["data"]] == [video.id]


def test_models(api: Any, client: Any) -> None:
    assert next(iter(client.models.list())).id == "papercut"
    assert client.models.retrieve("papercut").capabilities["fps"] == 16


def test_replicate_style_loop(busy: Any, media: Any) -> None:
    """Create, look until a terminal word, fetch; no SDK."""
    made = busy.http.post("/v1/videos", json={"prompt": "a red ball", "seconds": 1}).json()
    deadline = time.monotonic() + 60
    while made["status"] not in ("completed", "failed", "cancelled"):
        assert time.monotonic() < deadline
        time.sleep(int(busy.http.get("/v1/videos").headers.get("x-none", 50)) / 1000)
        made = busy.http.get(f"/v1/videos/{made['id']}").json()
    assert made["status"] == "completed"
    assert busy.http.get(f"/v1/videos/{made['id']}/content").content == media.video


def _curl(*arguments: str) -> bytes:
    done = subprocess.run(("curl", "-sS", *arguments), capture_output=True, check=True)
    return done.stdout


def test_curl(api: Any, api_maker: Any, media: Any, tmp_path: Path) -> None:
    url = f"{api.url}/v1/videos"
    picture = tmp_path / "start.webp"
    picture.write_bytes(media.picture)
    form = ("-F", "prompt=a red ball", "-F", "seconds=1", "-F", f"input_reference=@{picture}")
    video = json.loads(_curl(url, *form))
    assert video["plan"]["input"]["kind"] == "image"
    body = '{"prompt": "a red ball", "num_frames": 9}'
    plain = json.loads(_curl(url, "-H", "content-type: application/json", "-d", body))
    encoded = json.loads(_curl(url, "-d", "prompt=a red ball", "-d", "num_frames=9"))
    assert plain["plan"] == encoded["plan"]
    api_maker.make_all()
    saved = tmp_path / "video.mp4"
    saved.write_bytes(media.video[:1000])
    _curl("-C", "-", "-o", str(saved), f"{url}/{plain['id']}/content")
    assert saved.read_bytes() == media.video
    head = _curl("-I", f"{url}/{plain['id']}/content").decode().lower()
    assert f"content-length: {len(media.video)}" in head
    etag = json.loads(_curl(f"{url}/{plain['id']}"))["id"]
    assert etag == plain["id"]
    gone = json.loads(_curl("-X", "DELETE", f"{url}/{plain['id']}"))
    assert gone["deleted"]
