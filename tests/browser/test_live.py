"""A video plays while it is made, and the finished file takes over where the picture is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import expect

STATE = """video => ({
    ready: video.readyState, at: video.currentTime, gaps: video.buffered.length - 1,
    until: video.buffered.length ? video.buffered.end(0) : 0,
})"""


def test_plays_while_made(site: Any, director: Any, visitor: Any) -> None:
    job = site.submit(seconds=20, seed=5)
    take = director.take()
    page = visitor.open(f"{site.url}/videos/{job.id}")
    take.chunk()
    live = page.locator("video.live")
    live.wait_for()
    for _ in range(11):
        take.chunk()
    page.wait_for_function("() => document.querySelector('video.live').currentTime > 1.5")
    made = take.frames / 16
    page.wait_for_function(
        "end => document.querySelector('video.live').buffered.end(0) > end", arg=made - 0.1
    )
    state = live.evaluate(STATE)
    assert state["ready"] >= 2
    assert state["gaps"] == 0, "there is a gap at a chunk's border"
    assert state["until"] == pytest.approx(made, abs=0.01)
    assert site.store.listings.get(job.id).state == "running"

    take.finish()
    finished = page.locator("video[data-took-over]")
    finished.wait_for()
    before, after = json.loads(finished.get_attribute("data-took-over") or "")
    assert before > 1.5
    assert after == pytest.approx(before, abs=1 / 16)
    assert "/content" in finished.evaluate("video => video.src")
    expect(page.locator("video")).to_have_count(1)
    page.wait_for_function(
        "at => document.querySelector('video').currentTime > at", arg=min(after + 0.3, 19.9)
    )
    assert finished.evaluate("video => video.duration") == pytest.approx(20, abs=0.3)


def test_plays_on_the_card_and_after_a_reload(site: Any, director: Any, visitor: Any) -> None:
    job = site.submit(seconds=6, seed=6)
    take = director.take()
    for _ in range(4):
        take.chunk()
    page = visitor.open(site.url)
    live = page.locator(f"#card-{job.id} video.live")
    live.wait_for()
    page.wait_for_function("() => document.querySelector('video.live').readyState >= 2")
    assert live.evaluate("video => video.currentTime") > 0.3, "a card joins near the newest picture"
    live.evaluate("video => { video.kept = true; }")
    take.chunk()
    expect(page.locator(f"#card-{job.id}")).to_contain_text("chunk 6 of")
    assert live.evaluate("video => video.kept"), "the card's player was replaced"
    take.finish()
    expect(page.locator(f"#card-{job.id}")).to_have_attribute("data-state", "completed")
    expect(page.locator(f"#card-{job.id} video.live")).to_have_count(0)
    # once it has played to its end, the picture is back
    expect(page.locator(f"#card-{job.id} video")).to_have_count(0)


def test_stop_keeps_what_is_made(site: Any, director: Any, visitor: Any) -> None:
    job = site.submit(seconds=10, seed=7)
    take = director.take()
    for _ in range(4):
        take.chunk()
    page = visitor.open(f"{site.url}/videos/{job.id}")
    page.locator("video.live").wait_for()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".about > .state")).to_have_text("Stopping")
    heard = take.say(1)
    assert heard.cancel_requested
    assert heard.keep_chunks
    take.stop()
    expect(page.locator("article.video")).to_have_attribute("data-state", "cancelled")
    page.wait_for_function(
        "() => document.querySelector('[data-player] video:not(.live)')?.readyState >= 1"
    )
    length = page.locator("[data-player] video").evaluate("video => video.duration")
    assert length == pytest.approx(take.frames / 16, abs=0.1)
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("article.video")).to_have_attribute("data-state", "queued")


def test_still_for_those_who_want_it(site: Any, director: Any, visitor: Any) -> None:
    job = site.submit(seconds=6, seed=8)
    take = director.take()
    for _ in range(3):
        take.chunk()
    page = visitor.open(site.url, reduced_motion="reduce")
    picture = page.locator("article.card img.preview")
    picture.wait_for()
    before = picture.get_attribute("src")
    take.chunk()
    expect(page.locator("article.card")).to_contain_text("chunk 5 of")
    expect(picture).not_to_have_attribute("src", before)
    expect(page.locator("video")).to_have_count(0)

    # on its own page it can be played, and does not by itself
    visitor.go(page, f"{site.url}/videos/{job.id}")
    live = page.locator("video.live")
    live.wait_for()
    page.wait_for_function("() => document.querySelector('video.live').readyState >= 2")
    assert live.evaluate("video => video.paused && video.controls")
    take.finish()
    site.submit(seed=9)
    other = director.make()
    visitor.go(page, f"{site.url}/compare?ids={job.id},{other.id}")
    page.locator("#compare[data-ready]").wait_for()
    assert page.locator("video").evaluate_all("videos => videos.every(video => video.paused)")
    assert page.get_by_role("button", name="Play").is_visible()


def test_a_clip_shows_its_newest_picture(site: Any, director: Any, visitor: Any) -> None:
    job = site.submit(seed=10, mode="clip", num_frames=17)
    take = director.take()
    page = visitor.open(site.url)
    take.say(1)
    expect(page.locator(".cover .word")).to_have_text("Making")
    take.picture(2)
    picture = page.locator(f"#card-{job.id} img.preview")
    picture.wait_for()
    before = picture.get_attribute("src")
    take.picture(3)
    expect(picture).not_to_have_attribute("src", before)
    expect(page.locator(f"#card-{job.id}")).to_contain_text("step 3 of")
    assert picture.evaluate("picture => picture.decode().then(() => picture.naturalWidth)") == 128
    page.reload()
    expect(picture).to_be_visible()
    visitor.go(page, f"{site.url}/videos/{job.id}")
    expect(page.locator("[data-player] img.preview")).to_be_visible()
    take.finish()
    expect(page.locator("article.video")).to_have_attribute("data-state", "completed")
    page.locator("[data-player] video").wait_for()
