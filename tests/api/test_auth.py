"""Keys, what each sees, and what a web page must not reach."""

from __future__ import annotations

from typing import Any

import pytest

from longtake.errors import ConflictError, NotFoundError

VIDEO = {"prompt": "a red ball", "num_frames": 9}


@pytest.fixture
def keyed(make_site: Any) -> tuple[Any, str, str]:
    """A site with two keys, and their headers' values."""
    site = make_site(require_keys=True)
    secrets = [site.service.store.keys.create(name)[1] for name in ("one", "two")]
    return site, f"Bearer {secrets[0]}", f"Bearer {secrets[1]}"


def _routes(site: Any) -> list[tuple[str, str]]:
    found = []
    for path, operations in site.app.openapi()["paths"].items():
        filled = path.replace("{video_id}", "video_" + "a" * 24)
        for name in ("{batch_id}", "{webhook_id}", "{name}", "{character_id}"):
            filled = filled.replace(name, "x")
        found += [(method.upper(), filled) for method in operations]
    return found


def test_every_route_needs_a_key(keyed: tuple[Any, str, str]) -> None:
    site, _, _ = keyed
    for method, path in [*_routes(site), ("GET", "/openapi.json"), ("GET", "/nothing")]:
        answer = site.http.request(method, path)
        if path in ("/healthz", "/readyz"):
            assert answer.status_code in (200, 503)
            continue
        assert answer.status_code == 401, (method, path)
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "header",
    ["Bearer", "Bearer lt_x", "Basic abc", "lt_x", "Bearer " + "a" * 500, "Bearer \xe9"],
)
def test_bad_keys(keyed: tuple[Any, str, str], header: str) -> None:
    site, _, _ = keyed
    answer = site.http.get("/v1/videos", headers={"authorization": header.encode("latin-1")})
    assert answer.status_code == 401


def test_each_key_sees_its_own_alone(
    keyed: tuple[Any, str, str], make_maker: Any, media: Any
) -> None:
    site, one, two = keyed
    files = {"input_reference": ("start.webp", media.picture, "image/webp")}
    headers = {"authorization": one}
    made = site.http.post("/v1/videos", data=VIDEO, files=files, headers=headers).json()
    make_maker(site).make_all()
    mine = f"/v1/videos/{made['id']}"
    for method, path in _routes(site):
        if "video_aaaa" not in path:
            continue
        own = path.replace("video_" + "a" * 24, made["id"])
        body = {"json": {"prompt": "x"}} if method in ("POST", "PATCH") else {}
        answer = site.http.request(method, own, headers={"authorization": two}, **body)
        assert answer.status_code == 404, (method, path, answer.text)
    video = {"prompt": "x", "seconds": 5, "video": {"id": made["id"]}}
    file = {**VIDEO, "input_reference": made["request"]["input_reference"]}
    for path, body in [("/extensions", video), ("/edits", video), ("", file)]:
        answer = site.http.post(f"/v1/videos{path}", json=body, headers={"authorization": two})
        assert answer.status_code == 404
    after = {"after": made["id"]}
    listed = site.http.get("/v1/videos", headers={"authorization": two}).json()
    assert listed["data"] == []
    refused = site.http.get("/v1/videos", params=after, headers={"authorization": two})
    assert refused.status_code == 404
    assert site.http.get(mine, headers=headers).status_code == 200


def test_a_key_that_is_made_closes_the_service(make_site: Any) -> None:
    site = make_site()
    assert site.http.get("/v1/videos").status_code == 200
    key, secret = site.service.store.keys.create("first")
    site.service.authenticator._checked_at -= 10  # as if two seconds had passed
    assert site.http.get("/v1/videos").status_code == 401
    header = {"authorization": f"Bearer {secret}"}
    assert site.http.get("/v1/videos", headers=header).status_code == 200
    site.service.store.keys.revoke(key.id)
    site.service.authenticator._found.clear()  # as if two seconds had passed
    assert site.http.get("/v1/videos", headers=header).status_code == 401
    assert site.http.get("/v1/videos").status_code == 401
    again = make_site()
    assert again.http.get("/v1/videos").status_code == 401


def test_what_was_made_without_a_key_is_handed_to_one(make_site: Any, make_maker: Any) -> None:
    site = make_site()
    maker = make_maker(site)
    once = {"idempotency-key": "once"}
    made = site.http.post("/v1/videos", json=VIDEO, headers=once).json()["id"]
    keys = site.service.store.keys
    first, secret = keys.create("first")
    other, _ = keys.create("other")
    site.service.authenticator._checked_at -= 10  # as if two seconds had passed
    header = {"authorization": f"Bearer {secret}"}
    assert site.http.get("/v1/videos", headers=header).json()["data"] == []
    for source, target in (("local", "key_no"), ("key_no", first.id), (first.id, first.id)):
        with pytest.raises(NotFoundError, match="key"):
            keys.move(source, target)
    job = maker.claim()
    with pytest.raises(ConflictError, match="being made"):
        keys.move("local", first.id)
    maker.complete(job)
    assert keys.move("local", first.id) == 1
    listed = site.http.get("/v1/videos", headers=header).json()["data"]
    assert [video["id"] for video in listed] == [made]
    again = site.http.post("/v1/videos", json=VIDEO, headers=once | header)
    assert again.json()["id"] == made
    content = site.http.get(f"/v1/videos/{made}/content", headers=header)
    assert content.status_code == 200
    keys.revoke(first.id)
    with pytest.raises(NotFoundError):
        keys.move(other.id, first.id)
    assert keys.move(first.id, other.id) == 1
    assert site.service.store.listings.get(made, other.id).id == made


def test_a_browser_session_stands_for_its_key(keyed: tuple[Any, str, str]) -> None:
    site, one, _ = keyed
    cookie = site.service.sessions.sign_in(one.removeprefix("Bearer "))
    headers = {"cookie": f"longtake_session={cookie}"}
    assert site.http.get("/v1/videos", headers=headers).status_code == 200
    foreign = {**headers, "origin": "https://evil.example"}
    assert site.http.post("/v1/videos", json=VIDEO, headers=foreign).status_code == 403
    own = {**headers, "origin": site.url}
    assert site.http.post("/v1/videos", json=VIDEO, headers=own).status_code == 200
    wrong = {"cookie": f"longtake_session={cookie}x"}
    assert site.http.get("/v1/videos", headers=wrong).status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("127.0.0.1:1", 200),
        ("127.8.9.1", 200),
        ("[::1]:8000", 200),
        ("longtake.localhost", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("10.0.0.1", 403),
        ("0.0.0.0", 403),  # noqa: S104 - a name, not an address to listen on
        ("", 403),
    ],
)
def test_without_keys_only_own_names_are_answered(api: Any, host: str, status: int) -> None:
    answer = api.http.get("/v1/videos", headers={"host": host})
    assert answer.status_code == status
    assert api.http.get("/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:1"},
        {"origin": "http://127.0.0.1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example", "authorization": "Bearer x"},
    ],
)
def test_other_origins_change_nothing(api: Any, headers: dict[str, str]) -> None:
    text = {"content-type": "text/plain", **headers}
    for sent in ({"json": VIDEO, "headers": headers}, {"content": b"{}", "headers": text}):
        answer = api.http.post("/v1/videos", **sent)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "cross_origin"
    for method in ("DELETE", "PATCH"):
        path = "/v1/videos/video_" + "a" * 24
        assert api.http.request(method, path, headers=headers).status_code == 403
    read = api.http.get("/v1/videos", headers=headers)
    assert "access-control-allow-origin" not in read.headers


def test_the_own_origin_may(api: Any) -> None:
    headers = {"origin": api.url, "sec-fetch-site": "same-origin"}
    assert api.http.post("/v1/videos", json=VIDEO, headers=headers).status_code == 200


def test_with_a_key_the_origin_does_not_matter(keyed: tuple[Any, str, str]) -> None:
    site, one, _ = keyed
    headers = {"authorization": one, "origin": "https://app.example", "host": "video.example"}
    assert site.http.post("/v1/videos", json=VIDEO, headers=headers).status_code == 200


def test_open_to_all_when_said_twice(make_site: Any) -> None:
    site = make_site(allow_open=True)
    headers = {"host": "video.example"}
    assert site.http.get("/v1/videos", headers=headers).status_code == 200
    foreign = {**headers, "origin": "https://evil.example"}
    assert site.http.post("/v1/videos", json=VIDEO, headers=foreign).status_code == 403
    own = {**headers, "origin": "https://video.example"}
    assert site.http.post("/v1/videos", json=VIDEO, headers=own).status_code == 200


def test_cors_is_for_listed_origins(make_site: Any) -> None:
    site = make_site(cors_origins=("https://app.example",))
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    preflight = site.http.options("/v1/videos", headers=asked)
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    headers = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
    made = site.http.post("/v1/videos", json=VIDEO, headers=headers)
    assert made.status_code == 200
    assert made.headers["access-control-allow-origin"] == "https://app.example"
    foreign = {**asked, "origin": "https://evil.example"}
    answer = site.http.options("/v1/videos", headers=foreign)
    assert "access-control-allow-origin" not in answer.headers
    site.service.authenticator.needs_keys = True
    assert site.http.options("/v1/videos", headers=asked).status_code == 200
    assert site.http.get("/v1/videos", headers=headers).status_code == 401


def test_every_answer_has_security_headers(api: Any) -> None:
    for answer in (
        api.http.get("/v1/videos"),
        api.http.get("/healthz"),
        api.http.get("/nothing"),
        api.http.post("/v1/videos", json={}),
        api.http.post("/v1/videos", headers={"origin": "https://evil.example"}),
        api.http.get("/v1/videos", headers={"host": "evil.example"}),
    ):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-request-id"]
