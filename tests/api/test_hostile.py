"""What an attacker sends: every answer is a refusal in the usual form, and nothing breaks."""

from __future__ import annotations

import http.client
import json
import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import httpx
import pytest
from fastapi.routing import APIRoute

from longtake.settings import MIB

if TYPE_CHECKING:
    from tests.api.conftest import Maker, MakeSite, Site

VIDEO = {"prompt": "a red ball", "num_frames": 9}
IDS = [
    *("../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "....//"),
    *("..", ".", "%00", "video_%00", "video_" + "a" * 24 + "%00.mp4", "video_" + "a" * 5000),
    *("video_" + quote("ａ" * 24), "video_" + quote("é" * 24), "%ff%fe", "%c0%ae%c0%ae%c0%af"),
    *("' OR 1=1 --", "video_%", "video_________________________", "*", "%0d%0ax-evil:%201"),
    *("file:///etc/passwd", "http://169.254.169.254/", "jobs", "a/../../b", "-1", "{}"),
]
# the other names of this machine and of a cloud's metadata service
SSRF = [
    *("http://127.0.0.1", "http://127.1", "http://2130706433", "http://0x7f000001", "http://0"),
    *("http://017700000001", "http://0x7f.0x0.0x0.0x1", "http://127.0.0.1.", "http://localhost"),
    *("http://localhost.", "http://LOCALHOST", "http://[::1]", "http://[::]", "http://0.0.0.0"),
    *("http://[::ffff:127.0.0.1]", "http://[::ffff:7f00:1]", "http://[64:ff9b::7f00:1]"),
    *("http://[2002:7f00:1::]", "http://[2001:0:7f00:1::]", "http://[fe80::1]", "http://[fc00::]"),
    *("http://169.254.169.254/latest/meta-data", "http://2852039166/", "http://0xa9fea9fe/"),
    *("http://[::ffff:a9fe:a9fe]/", "http://[fd00:ec2::254]/", "http://100.100.100.200/"),
    *("http://10.0.0.1", "http://172.16.0.1", "http://192.168.0.1", "http://192.0.0.192"),
    *("http://①②⑦.⓪.⓪.①", "http://127。0。0。1", "http://%31%32%37.0.0.1", "http://127.0.0.1%2f"),
    *("http://user@127.0.0.1", "http://example.com@127.0.0.1", "http://127.0.0.1#@example.com"),
    *("http://127.0.0.1\\@example.com", "http://example.com\\.127.0.0.1", "http:127.0.0.1"),
    *("ftp://127.0.0.1", "gopher://127.0.0.1:6379/_FLUSHALL", "file:///etc/passwd", "dict://a"),
    *("unix:///run/valkey.sock", "jar:http://127.0.0.1!/", "netdoc:///etc/passwd", "//127.0.0.1"),
    *("http://127.0.0.1:6379/", "http://example.com:6380\r\nSLAVEOF", "http://\t127.0.0.1"),
]
EVIL = 'a"\r\nSet-Cookie: stolen=1\r\n\r\n<script>alert(1)</script>'


def refused(answer: httpx.Response) -> None:
    """A refusal of the client's doing, as a problem, that tells nothing of the server."""
    assert 400 <= answer.status_code < 500, (str(answer.request.url)[:200], answer.text[:500])
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["error"]["message"]
    assert "root:" not in answer.text
    assert "Traceback" not in answer.text
    assert "x-evil" not in answer.headers
    assert "set-cookie" not in answer.headers


def routes_with_ids(site: Site) -> Iterator[tuple[str, str]]:
    """Method and path of every route that takes an id, from the OpenAPI document."""
    for path, operations in site.app.openapi()["paths"].items():
        if "{" in path:
            for method in operations:
                yield method.upper(), path


def send_raw(site: Site, method: str, path: str) -> httpx.Response:
    """A request for exactly that path: a usual client would tidy up its dots and slashes."""
    connection = http.client.HTTPConnection(httpx.URL(site.url).netloc.decode(), timeout=20)
    body = json.dumps({"prompt": "a", "event_type": "a"})
    connection.request(method, path, body, {"content-type": "application/json"})
    got = connection.getresponse()
    answer = httpx.Response(
        got.status,
        headers=got.getheaders(),
        content=got.read(),
        request=httpx.Request(method, f"{site.url}/?{path[:200]}"),
    )
    connection.close()
    return answer


def test_no_route_takes_what_is_not_an_id(api: Site) -> None:
    routes = list(routes_with_ids(api))
    assert len(routes) > 20
    for method, path in routes:
        start, _, rest = path.partition("{")
        end = rest.partition("}")[2]
        for hostile in IDS:
            asked = f"{start}{quote(hostile, '%')}{end}"
            answer = send_raw(api, method, asked)
            if answer.status_code == 307:
                # it only takes slashes away from the end
                shown = unquote(asked).rstrip("/")
                assert answer.headers["location"] == f"{api.url}{shown}"
            else:
                refused(answer)


def test_every_route_stands_in_the_document(api: Site) -> None:
    """So that the test above, and the fuzzer, see all of them."""
    documented = set(api.app.openapi()["paths"])
    for route in api.app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            assert route.path in documented


@pytest.mark.parametrize(
    "path",
    ["/v1/videos", "/v1/videos/plan", "/v1/batches", "/v1/webhooks", "/v1/videos/edits"],
)
def test_ten_megabytes_of_json_are_not_read(api: Site, path: str) -> None:
    body = json.dumps({"prompt": "a" * 10 * MIB}).encode()
    answer = api.http.post(path, content=body, headers={"content-type": "application/json"})
    refused(answer)
    assert answer.status_code == 413

    def parts() -> Iterator[bytes]:
        # chunked, so that no header tells how much comes
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    try:
        answer = api.http.post(path, content=parts(), headers={"content-type": "application/json"})
    except (httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):
        return  # answered and closed while the rest was still being sent
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"prompt":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"prompt": "a", "prompts": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "seed": 1' + b"0" * 5_000 + b"}",
        b'{"prompt": "a", "seed": 1e999}',
        b'{"prompt": "a", "seed": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a\\u0000b"}',
        b"\xff\xfe{\x00}\x00",
        b'{"prompt": "a", "prompt": {}}',
        b"null",
        b"",
    ],
    ids=range(12),
)
def test_json_that_breaks_readers_is_refused(api: Site, body: bytes) -> None:
    for path in ("/v1/videos", "/v1/batches", "/v1/webhooks", "/v1/videos/plan"):
        refused(api.http.post(path, content=body, headers={"content-type": "application/json"}))
    assert api.http.get("/v1/videos").json()["data"] == []


def test_a_form_of_too_many_parts_is_refused(api: Site) -> None:
    many = {f"field{k}": "a" for k in range(2_000)}
    refused(api.http.post("/v1/videos", data={**many, "prompt": "a"}, files={"a": ("a", b"")}))
    files = [("input_reference", (f"{k}.png", b"a")) for k in range(50)]
    refused(api.http.post("/v1/videos", data={"prompt": "a"}, files=files))


def bomb() -> bytes:
    """A PNG of a few hundred bytes that would be 10 GB of pixels."""
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(4000))), (b"IEND", b""))
    )
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("bomb.png", bomb()),
        ("list.m3u8", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"),
        (
            "page.svg",
            b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        ),
        ("run.png", b"push graphic-context\nfill 'url(https://example.com)'\n"),
        ("a.zip", b"PK\x03\x04" + bytes(100)),
    ],
    ids=["bomb", "playlist", "page", "script", "archive"],
)
def test_a_hostile_upload_is_refused_and_not_kept(api: Site, name: str, data: bytes) -> None:
    form = {"prompt": "a red ball"}
    refused(api.http.post("/v1/videos", data=form, files={"input_reference": (name, data)}))
    assert api.service.store.files.stored_bytes() == 0


def test_nothing_a_client_sends_becomes_a_header(site: Site, maker: Maker) -> None:
    """Prompt, tag, file name and model, on every answer that tells of them."""
    body = {**VIDEO, "prompt": EVIL}
    made = site.http.post("/v1/videos", json=body)
    assert made.status_code == 200
    assert made.json()["prompt"] == EVIL
    maker.make_all()
    path = f"/v1/videos/{made.json()['id']}"
    answers = [made, site.http.get(path), site.http.get(f"{path}/content")]
    answers += [site.http.get(f"{path}/content", params={"variant": EVIL})]
    answers += [site.http.get("/v1/videos", params={"q": EVIL, "tag": EVIL[:60]})]
    answers += [site.http.get(path, headers={"x-request-id": "a b; c"})]
    answers += [site.http.post("/v1/videos", json={**VIDEO, "model": EVIL})]
    for answer in answers:
        assert answer.status_code < 500
        assert "set-cookie" not in answer.headers
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not any("stolen" in value for value in answer.headers.values())
    # control characters in a header are no HTTP
    assert site.http.get(path, headers={"x-request-id": "a b\x7f"}).status_code == 400


def test_no_spelling_of_a_private_address_is_a_webhook(api: Site) -> None:
    for url in SSRF:
        body = {"name": "a", "url": url, "event_types": ["video.failed"]}
        answer = api.http.post("/v1/webhooks", json=body)
        refused(answer)
        assert answer.json()["error"]["param"] == "url", url
    assert api.service.store.webhooks.list(None) == []


def test_no_spelling_of_a_private_address_is_fetched(make_site: MakeSite) -> None:
    site = make_site(allow_remote_references=True)
    for url in SSRF:
        body = {**VIDEO, "input_reference": {"image_url": url}}
        answer = site.http.post("/v1/videos", json=body)
        refused(answer)
        assert answer.json()["error"]["param"] == "input_reference", url
    for path in ("/v1/videos/edits", "/v1/videos/extensions"):
        body = {"prompt": "a", "video": {"video_url": "http://127.0.0.1/"}}
        refused(site.http.post(path, json=body))
    assert site.http.get("/v1/videos").json()["data"] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"output_path": "/etc/passwd"},
        {"input_reference": "/etc/passwd"},
        {"input_reference": "file:///etc/passwd"},
        {"input_reference": {"file_id": "../../etc/passwd"}},
        {"input_reference": {"id": "../../etc/passwd"}},
        {"image": "/etc/passwd"},
        {"video": "/etc/passwd"},
        {"model": "/etc"},
        {"model": "../../etc"},
        {"model": "http://127.0.0.1/model.json"},
        {"lora": [{"path": "/etc/passwd"}]},
        {"device": "cuda:0"},
    ],
)
def test_no_field_names_a_path_of_the_server(api: Site, fields: dict[str, Any]) -> None:
    refused(api.http.post("/v1/videos", json={**VIDEO, **fields}))
    batch = api.http.post("/v1/batches", json={"items": [{**VIDEO, **fields}]}).json()
    assert batch["request_counts"]["invalid"] == 1
