"""Files and references that come with a request, through the real check and the real store."""

from __future__ import annotations

import base64
import errno
import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_from_bytes

import httpx
import pytest
from PIL import Image

from longtake.api import uploads
from longtake.api.uploads import accept_reference, accept_upload, clean_name
from longtake.errors import RequestError, ServiceError, TooLargeError
from longtake.queue.records import ArtifactKind

if TYPE_CHECKING:
    from tests.api.conftest import MakeSite, Media, Site


def picture(width: int = 8, height: int = 6) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(file, "PNG")
    return file.getvalue()


def post(site: Site, data: bytes, name: str = "a.png", **fields: str) -> httpx.Response:
    form = {"prompt": "a red ball", **fields}
    return site.http.post("/v1/videos", data=form, files={"input_reference": (name, data)})


def is_clean(site: Site) -> bool:
    """Nothing stored, nothing left in the scratch folder."""
    folder = site.settings.scratch / "uploads"
    left = list(folder.iterdir()) if folder.exists() else []
    return site.service.store.files.stored_bytes() == 0 and not left


def test_an_image_is_stored_with_what_it_is(site: Site) -> None:
    data = picture()

    artifact = accept_upload(site.service, "local", io.BytesIO(data), "image", "image", "a b.png")

    assert artifact.kind is ArtifactKind.INPUT
    assert artifact.content_type == "image/png"
    expected = {"kind": "image", "width": 8, "height": 6, "frames": 1, "name": "a b.png"}
    assert {name: artifact.details[name] for name in expected} == expected
    assert site.service.store.files.get(artifact.id, "local") == artifact
    with site.service.artifacts.open(artifact.key) as file:
        assert file.read() == data
    assert not list((site.settings.scratch / "uploads").iterdir())


def test_a_clip_is_stored_with_its_length(site: Site, media: Media) -> None:
    artifact = accept_upload(site.service, "local", io.BytesIO(media.video), "video", "video")

    expected = {"kind": "video", "frames": 9, "fps": 16.0, "seconds": 9 / 16, "name": "upload"}
    assert {name: artifact.details[name] for name in expected} == expected


def test_an_uploaded_image_starts_a_video_and_no_path_is_told(site: Site) -> None:
    answer = post(site, picture(), "../../etc/passwd\r\nx-evil: 1")

    assert answer.status_code == 200, answer.text
    job = site.service.store.listings.get(answer.json()["id"])
    [artifact] = site.service.store.files.of_job(job.id, ArtifactKind.INPUT)
    assert job.request["image"] == f"input:{artifact.id}"
    assert "etc" not in artifact.key
    assert "/" not in artifact.details["name"]
    assert str(site.settings.data_dir) not in answer.text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"no picture", "neither an image nor a video"),
        (picture()[:50], "truncated or damaged"),
        (b"GIF89a%PDF-1.4" + bytes(200), "is a PDF too"),
        (picture(1200, 1000), "at most 1000000 pixels"),
    ],
    ids=["text", "short", "pdf", "large"],
)
def test_what_is_no_image_or_too_large_a_one_is_refused(
    make_site: MakeSite, data: bytes, reason: str
) -> None:
    site = make_site(max_upload_pixels=1_000_000)

    answer = post(site, data, "mine.png")

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input_reference"
    message = answer.json()["error"]["message"]
    assert message.startswith("input_reference='mine.png': ")
    assert reason in message
    assert str(site.settings.data_dir) not in answer.text
    assert is_clean(site)


def test_too_many_bytes_are_refused_before_they_are_decoded(make_site: MakeSite) -> None:
    site = make_site(max_upload_bytes=1000)

    answer = post(site, bytes(1001))

    assert answer.status_code == 413
    assert "larger than 1000 bytes" in answer.json()["error"]["message"]
    assert is_clean(site)


def test_a_full_disk_refuses_uploads(make_site: MakeSite) -> None:
    site = make_site(min_free_bytes=2**62)
    with pytest.raises(ServiceError, match="disk is full"):
        accept_upload(site.service, "local", io.BytesIO(picture()), "image")
    site = make_site()

    class Full(io.BytesIO):
        def read(self, _: int | None = -1) -> bytes:
            raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(ServiceError, match="disk is full"):
        accept_upload(site.service, "local", Full(), "image")
    assert is_clean(site)


def test_only_so_many_are_decoded_at_once(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(upload_decode_s=0.01)
    none_left = threading.BoundedSemaphore(1)
    none_left.acquire()
    monkeypatch.setattr(uploads, "_CHECKS", none_left)

    with pytest.raises(ServiceError, match="Too many uploads"):
        accept_upload(site.service, "local", io.BytesIO(picture()), "image")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (None, ""),
        ("a.png", "a.png"),
        ("../../etc/passwd", "passwd"),
        ("C:\\Users\\me\\a b.png", "a b.png"),
        ("a\r\nSet-Cookie: b\x00.png", "aSet-Cookie: b.png"),
        ("\u202egnp.exe", "gnp.exe"),
        ("..", ""),
        ("/", ""),
        ("ü" * 500, "ü" * 120),
    ],
)
def test_a_file_name_is_for_people_only(name: str | None, shown: str) -> None:
    assert clean_name(name) == shown


@pytest.mark.parametrize("base64_coded", [True, False])
def test_a_data_url_is_taken(api: Site, base64_coded: bool) -> None:
    data = picture()
    coded = base64.b64encode(data).decode() if base64_coded else quote_from_bytes(data)
    url = f"data:image/png{';base64' if base64_coded else ''},{coded}"

    answer = api.http.post(
        "/v1/videos", json={"prompt": "a red ball", "input_reference": {"image_url": url}}
    )

    assert answer.status_code == 200, answer.text
    [artifact] = api.service.store.files.of_job(answer.json()["id"], ArtifactKind.INPUT)
    with api.service.artifacts.open(artifact.key) as file:
        assert file.read() == data


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,@@@@", "is not base64"),
        ("data:image/png;base64,ü", "is not base64"),
        ("data:image/png", "is not a data URL"),
        ("data:text/html,<script>alert(1)</script>", "is a page or a script too"),
        ("https://example.com/a.png", "remote references are not fetched"),
        ("file:///etc/passwd", "remote references are not fetched"),
        ("/etc/passwd", "remote references are not fetched"),
    ],
)
def test_other_references_are_refused_as_the_service_comes(
    api: Site, url: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        accept_reference(api.service, "local", url, "input_reference")
    assert api.service.store.files.stored_bytes() == 0


def test_a_data_url_is_bounded(make_site: MakeSite) -> None:
    site = make_site(max_upload_bytes=100)
    with pytest.raises(TooLargeError):
        accept_reference(site.service, "local", "data:," + "a" * 101, "input_reference")


Answer = Callable[[BaseHTTPRequestHandler], None]


class Host(ThreadingHTTPServer):
    """Serves ``files`` by path; a text is where to go instead."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes | str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = files[self.path]
                self.send_response(302 if isinstance(found, str) else 200)
                if isinstance(found, str):
                    self.send_header("Location", found)
                self.end_headers()
                if isinstance(found, bytes):
                    self.wfile.write(found)

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def host() -> Iterator[Host]:
    files: dict[str, bytes | str] = {
        "/a%20b.png": picture(),
        "/moved": "/a%20b.png",
        "/page": b"<html>no picture</html>",
        "/long": bytes(5000),
        "/out": "http://169.254.169.254/latest/meta-data",
    }
    server = Host(files)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_remote_reference_is_fetched_where_that_is_allowed(
    make_site: MakeSite, host: Host
) -> None:
    changes: dict[str, Any] = {"allow_remote_references": True, "max_upload_bytes": 4000}
    site = make_site(allow_private_addresses=True, **changes)

    for path in ("/a%20b.png", "/moved"):
        artifact = accept_reference(site.service, "local", host.url + path, "image", "image")
        assert artifact.details["name"] in ("a b.png", "moved")
    with pytest.raises(RequestError, match="is a page or a script too"):
        accept_reference(site.service, "local", f"{host.url}/page", "image")
    with pytest.raises(TooLargeError, match="larger than 4000 bytes"):
        accept_reference(site.service, "local", f"{host.url}/long", "image")

    closed = make_site(**changes)
    with pytest.raises(RequestError, match="is not a public address"):
        accept_reference(closed.service, "local", f"{host.url}/a%20b.png", "image")
    answer = closed.http.post(
        "/v1/videos",
        json={"prompt": "a", "input_reference": {"image_url": f"{host.url}/a%20b.png"}},
    )
    assert answer.status_code == 400
    assert "not a public address" in json.dumps(answer.json())


def test_what_cannot_be_recorded_is_not_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no database")

    monkeypatch.setattr(site.service.store.files, "add", fail)
    with pytest.raises(RuntimeError):
        accept_upload(site.service, "local", io.BytesIO(picture()), "image")
    root = site.settings.data_dir / "artifacts"
    assert not [path for path in root.rglob("*") if path.is_file()]
