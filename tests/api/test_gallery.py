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


def _row(text: str, name: str) -> re.Match[str] | None:
    pattern = rf"<tr([^>]*)><th scope=\"row\">{name}(?: <em>.*?</em>)?</th>(.*?)</tr>"
    return re.search(pattern, text, re.DOTALL)


def test_later_prompts_and_what_not_to_show_are_told(api: Any) -> None:
    later = [{"at": 1, "prompt": "a blue star"}, {"at": 2.5, "prompt": "a pink fish"}]
    one = api.submit(num_frames=81, seed=1, prompts=later, negative_prompt="grey")
    two = api.submit(num_frames=81, seed=1, prompts=[{"at": 1, "prompt": "a red star"}])
    with browse(api) as client:
        page = client.get(f"/videos/{one.id}").text
        listed = re.findall(r"<li><span>at (.*?) s</span> (.*?)</li>", page)
        assert listed == [("1", "a blue star"), ("2.5", "a pink fish")]
        row = _row(page, "prompts")
        assert row is not None
        assert row[2] == "<td>at 1 s: a blue star\nat 2.5 s: a pink fish</td>"
        row = _row(page, "negative_prompt")
        assert row is not None
        assert row[2] == "<td>grey</td>"
        compared = client.get(f"/compare?ids={one.id},{two.id}").text
        for name, values in (
            (
                "prompts",
                "<td>at 1 s: a blue star\nat 2.5 s: a pink fish</td><td>at 1 s: a red star",
            ),
            ("negative_prompt", "<td>grey</td><td></td>"),
        ):
            row = _row(compared, name)
            assert row is not None, name
            assert "data-differs" in row[1]
            assert row[2].startswith(values)
        row = _row(compared, "seed")
        assert row is not None
        assert "data-differs" not in row[1]


def test_a_stopped_video_is_as_long_as_what_there_is(api: Any, api_maker: Any) -> None:
    api.submit(num_frames=None, seconds=5)
    job = api_maker.claim()
    api_maker.chunk(job, 0)
    api.http.post(f"/v1/videos/{job.id}/cancel", json={"keep": True})
    api.service.store.leases.cancelled(job.id, job.fence, api_maker.results(job, frames=8))
    with browse(api) as client:
        page = client.get(f"/videos/{job.id}").text
    assert "<dd>0.5 s, 8 frames at 16 fps</dd>" in page
    for name, value in (
        ("num_frames", f"8 of {job.plan['num_frames']}"),
        ("seconds", "0.5 of 5"),
        ("chunks", f"1 of {job.plan['chunks']}"),
    ):
        row = _row(page, name)
        assert row is not None, name
        assert row[2] == f"<td>{value}</td>"


def test_a_remix_says_what_it_starts_from(api: Any, api_maker: Any, media: Any) -> None:
    from_image = api.http.post(
        "/v1/videos",
        data={"prompt": "a red ball", "num_frames": 9},
        files={"input_reference": ("start.webp", media.picture, "image/webp")},
    ).json()
    plain = api.submit()
    api_maker.make_all()
    extended = api.http.post(
        "/v1/videos/extensions",
        json={"prompt": "a red ball", "seconds": 5, "video": {"id": plain.id}},
    ).json()
    with browse(api) as client:
        chip = r'<p class="kept" data-kept><span class="tag">(.*?)</span> It stays'
        found = re.search(chip, client.get(f"/?from={from_image['id']}&as=remix").text)
        assert found is not None
        assert found[1] == "starts from the image of the original"
        found = re.search(chip, client.get(f"/?from={extended['id']}&as=remix").text)
        assert found is not None
        assert found[1].startswith(f'starts from video <a href="/videos/{plain.id}">')
        assert re.search(chip, client.get(f"/?from={plain.id}&as=remix").text) is None
        shown = _command(client.get(f"/videos/{from_image['id']}").text)
        assert shown[0] == "# FILE: the image that it starts from, use your own copy of it"
        assert "--image FILE" in shown[1]
        shown = _command(client.get(f"/videos/{extended['id']}").text)
        assert shown[0].endswith(f"download it from {api.url}/v1/videos/{plain.id}/content")
        assert "--video FILE" in shown[1]


def _command(page: str) -> list[str]:
    found = re.search(r'<pre id="copy-CLI" hidden>(.*?)</pre>', page, re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def test_search_takes_words_in_any_order(api: Any) -> None:
    job = api.submit(prompt="a Yellow star")
    api.submit(prompt="a yellow ball")
    with browse(api) as client:
        for path in ("/?q=star+yellow", f"/gallery/cards?q=STAR++yellow&ids={job.id}"):
            assert re.findall(r'<article class="card" id="card-(\w+)"', client.get(path).text) == [
                job.id
            ], path
        other = client.get(f"/gallery/cards?q=star+ball&ids={job.id}").text
        assert job.id not in other


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("seed=abc", "Seed &#34;abc&#34; is not a whole number from 0. It filters nothing."),
        ("state=bogus", "State &#34;bogus&#34; is none of queued, in_progress,"),
        ("since=xx", "From &#34;xx&#34; is not a date such as 2026-11-30. It filters nothing."),
        ("until=2026-13-01&seed=-1", "They filter nothing."),
        ("seed=7&state=queued&since=2026-11-30", None),
    ],
)
def test_a_filter_that_is_not_understood_is_named(api: Any, query: str, words: str | None) -> None:
    with browse(api) as client:
        for headers in ({}, {"hx-request": "true"}):
            page = client.get(f"/?{query}", headers=headers).text
            if words is None:
                assert "filters nothing" not in page
            else:
                assert words in page


def test_lists_tell_takes_apart_and_errors_to_their_end(api: Any, api_maker: Any) -> None:
    message = "size='300x200': " + "a reason that is long " * 12 + "; 128x80 or 256x160"
    for seed in (4711, 4712, 4713):
        api.submit(seed=seed)
    failed = api_maker.claim()
    api.service.store.leases.fail(failed.id, failed.fence, {"code": "x", "message": message})
    api_maker.claim()
    with browse(api) as client:
        queue, wall = client.get("/queue").text, client.get("/").text
    assert re.findall(r"<span>seed (\d+)</span>", queue) == ["4712", "4713", "4711"]
    note = re.search(r'<p class="note wrong">(.*?)</p>', wall)
    assert note is not None
    assert len(note[1]) < 160
    assert note[1].startswith("size=")
    assert note[1].endswith("; 128x80 or 256x160")
    assert 'data-do="compare" title="2 to 4 videos"' in wall
