"""The gallery's pages as they come over the wire: headers, escaping, login, parts."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from longtake.api.sessions import COOKIE, Sessions

HOSTILE = "<script>alert(1)</script> <img src=x onerror=alert(2)> \"'`{{7*7}} &amp;"
PAGES = ("/", "/queue", "/workers", "/batches", "/compare")


@pytest.fixture
def gallery(make_site: Any) -> Any:
    """A site, with the pages of browsers."""
    return make_site()


@pytest.fixture
def keyed(make_site: Any) -> Any:
    """A site that needs keys, and one of them."""
    site = make_site(require_keys=True)
    site.key, site.secret = site.service.store.keys.create("Ada")
    return site


def browse(site: Any) -> httpx.Client:
    """A client that behaves as a browser that opens pages."""
    headers = {"accept": "text/html,application/xhtml+xml", "sec-fetch-site": "same-origin"}
    return httpx.Client(base_url=site.url, headers=headers, trust_env=False, timeout=20)


def test_policy_allows_nothing_inline(gallery: Any) -> None:
    job = gallery.submit()
    with browse(gallery) as client:
        for path in (*PAGES, f"/videos/{job.id}", "/login"):
            answer = client.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", answer.text), (
                path
            )
            assert answer.headers["x-frame-options"] == "DENY"


def test_prompt_is_text_everywhere(gallery: Any) -> None:
    job = gallery.submit(prompt=HOSTILE)
    gallery.service.store.submissions.edit(job.id, "local", {"tags": [HOSTILE[:40]]})
    with browse(gallery) as client:
        paths = ("/", "/queue", f"/videos/{job.id}", f"/?from={job.id}", f"/?q={HOSTILE}")
        for path in (*paths, f"/compare?ids={job.id},{job.id}", f"/gallery/cards?ids={job.id}"):
            text = client.get(path).text
            assert "<script>alert" not in text, path
            assert "<img src=x" not in text, path
            assert "`49`" not in text


def test_parts_are_the_page(gallery: Any) -> None:
    job = gallery.submit()
    with browse(gallery) as client:
        page, part = client.get("/").text, client.get(f"/gallery/cards?ids={job.id}").text
        article = re.search(r"<article.*?</article>", page, re.DOTALL)
        assert article is not None
        assert article[0] in part
        found = client.get("/", headers={"hx-request": "true"}).text
        assert article[0] in found
        assert "<html" not in found


def test_unknown_ids_and_odd_queries(gallery: Any) -> None:
    with browse(gallery) as client:
        assert client.get("/videos/video_nothere").status_code == 404
        assert client.get("/videos/..%2f..%2fetc").status_code == 404
        odd = "/?seed=%00&since=2026-99-99&state=nothing&after=video_gone&tag=%F0%9F%8E%9E"
        assert client.get(odd).status_code == 200
        assert client.get("/gallery/cards?ids=a,b,../c").text.strip() == ""
        assert client.get("/gallery/static/x/../../pages.py").status_code == 404


def test_pages_lead_to_the_login(keyed: Any) -> None:
    with browse(keyed) as client:
        answer = client.get("/queue?x=1")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/login?next=/queue%3Fx%3D1"
        assert client.get("/v1/videos", headers={"accept": "application/json"}).status_code == 401
        page = client.get("/login")
        assert 'name="key"' in page.text
        style = re.search(r'href="([^"]+base\.css)"', page.text)
        assert style is not None
        assert client.get(style[1]).headers["cache-control"].endswith("immutable")


def test_login_trades_a_key_for_a_session(keyed: Any) -> None:
    with browse(keyed) as client:
        assert client.post("/login", data={"key": "lt_wrong_key"}).status_code == 401
        assert COOKIE not in client.cookies
        answer = client.post("/login?next=/queue", data={"key": keyed.secret})
        assert (answer.status_code, answer.headers["location"]) == (303, "/queue")
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert keyed.secret not in answer.headers["set-cookie"]
        assert client.get("/").status_code == 200
        made = client.post("/v1/videos", json={"prompt": "a red ball", "num_frames": 9})
        assert made.status_code == 200
        assert keyed.service.store.listings.get(made.json()["id"]).owner == keyed.key.id
        client.post("/logout")
        assert client.get("/").status_code == 303


def test_session_ends_with_its_key_and_cannot_be_forged(
    keyed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: Sessions = keyed.service.sessions
    value = sessions.sign_in(keyed.secret)
    assert value is not None

    def who(text: str) -> Any:
        return sessions.principal(f"{COOKIE}={text}".encode())

    assert who(value).id == keyed.key.id
    key_id, made, mark = value.split(".")
    for forged in (
        f"{key_id}.{int(made) + 1}.{mark}",
        f"key_{'a' * 24}.{made}.{mark}",
        f"{key_id}.{made}.{mark[:-1]}",
        f"{key_id}.{made}.",
        "",
        "x" * 5000,
        f"{key_id}.{made}.{mark}é",
    ):
        assert who(forged) is None, forged
    other = Sessions(keyed.service.store, keyed.settings)
    assert other.principal(f"{COOKIE}={value}".encode()) is not None, "another process agrees"
    keyed.service.store.keys.revoke(keyed.key.id)
    monkeypatch.setattr(sessions, "_read_at", -1e9)
    assert who(value) is None


def test_writes_of_another_origin_are_refused(keyed: Any) -> None:
    with browse(keyed) as client:
        client.post("/login", data={"key": keyed.secret})
        job_id = client.post("/v1/videos", json={"prompt": "a red ball", "num_frames": 9}).json()[
            "id"
        ]
        evil = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
        for method, path in (
            ("POST", f"/v1/videos/{job_id}/trash"),
            ("DELETE", f"/v1/videos/{job_id}"),
            ("PATCH", f"/v1/videos/{job_id}"),
            ("POST", "/v1/videos"),
            ("POST", "/logout"),
            ("POST", "/login"),
        ):
            assert client.request(method, path, headers=evil).status_code == 403, path
            assert client.request(method, path, headers={"origin": "null"}).status_code == 403
        assert client.get("/").status_code == 200


def test_login_leads_nowhere_else(keyed: Any) -> None:
    with browse(keyed) as client:
        for target in ("//evil.example", "https://evil.example", "/\\evil.example", "/%0d%0aX: y"):
            answer = client.post("/login", params={"next": target}, data={"key": keyed.secret})
            assert answer.headers["location"] in ("/", "/%0d%0aX:%20y", "/%250d%250aX:%20y"), target


def test_each_key_sees_its_own(keyed: Any) -> None:
    other, secret = keyed.service.store.keys.create("Bo")
    job = keyed.submit(owner=other.id)
    with browse(keyed) as client:
        client.post("/login", data={"key": keyed.secret})
        assert job.id not in client.get("/").text
        assert client.get(f"/videos/{job.id}").status_code == 404
        assert client.get(f"/gallery/cards?ids={job.id}").text.strip() == ""
    with browse(keyed) as client:
        client.post("/login", data={"key": secret})
        assert job.id in client.get("/").text


@pytest.mark.filterwarnings("ignore:The `root_path` parameter")
def test_served_below_a_path(make_site: Any) -> None:
    site = make_site(base_path="/films")
    job = site.submit()
    with browse(site) as client:
        page = client.get("/films/").text
        links = re.findall(r'(?:href|src|hx-get|action)="(/[^"]*)"', page)
        assert links
        assert all(link.startswith("/films/") for link in links), links
        assert f"/films/videos/{job.id}" in page
        for link in links:
            if "static" in link:
                assert client.get(link).status_code == 200, link


def test_sheet_says_where_its_moments_are(gallery: Any) -> None:
    job = gallery.submit()
    with browse(gallery) as client:
        answer = client.get(f"/gallery/sheets/{job.id}")
        assert answer.status_code == 404


def test_scripts_stay_small() -> None:
    from longtake.api.gallery.render import STATIC

    total = sum(path.stat().st_size for path in STATIC.rglob("*.js"))
    assert total < 150_000
    assert (STATIC / "vendor" / "LICENSE-htmx.txt").is_file()
