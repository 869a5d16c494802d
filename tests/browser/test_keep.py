"""Finding, keeping, throwing away and asking again."""

from __future__ import annotations

import json
from typing import Any

import httpx
from playwright.sync_api import Page, expect

NOTES = """() => {
    window.notes = [];
    window.Notification = class extends EventTarget {
        constructor(title, options) { super(); window.notes.push([title, options.body]); }
        static permission = "granted";
        static requestPermission() { return Promise.resolve("granted"); }
    };
}"""


def expect_cards(page: Page, *ids: str) -> None:
    """The grid shows these videos, in this order, or will in a moment."""
    page.wait_for_function(
        """ids => ids.join() ===
        [...document.querySelectorAll("#grid > article.card")].map(card => card.dataset.id).join()
        """,
        arg=list(ids),
    )


def test_several_seeds_and_a_notice(site: Any, director: Any, visitor: Any) -> None:
    page = visitor.open(site.url)
    page.evaluate(NOTES)
    page.get_by_role("button", name="Tell me when a video is done").click()
    page.get_by_label("Prompt", exact=True).fill("a blue star over the sea")
    page.get_by_label("Seconds").fill("1")
    page.get_by_label("Seed", exact=True).first.fill("40")
    page.get_by_label("Takes").fill("3")
    page.keyboard.press("Control+Enter")
    expect(page.locator("article.card")).to_have_count(3)
    seeds = {job.request["seed"] for job in site.store.listings.page("local").jobs}
    assert seeds == {40, 41, 42}
    expect(page.locator("article.card").nth(0)).to_contain_text("2 before it")
    director.make()
    page.wait_for_function("() => window.notes.length === 1")
    assert page.evaluate("window.notes[0]") == ["Your video is done", "a blue star over the sea"]
    expect(page.locator("article.card").nth(0)).to_contain_text("1 before it")


def test_star_tag_search_filter(site: Any, director: Any, visitor: Any) -> None:
    ball, star = site.submit(seed=1), site.submit(prompt="a blue star over the sea", seed=2)
    director.make()
    page = visitor.open(site.url)
    page.locator(f"#card-{star.id}").get_by_role("button", name="Star").click()
    expect(page.locator(f"#card-{star.id} .star")).to_have_attribute("aria-pressed", "true")
    page.locator(f"#card-{star.id} .pick input").check()
    page.get_by_role("button", name="Tag").click()
    page.get_by_label("Tags, with commas between").fill("sea, best <b>")
    page.get_by_role("button", name="Set").click()
    expect(page.locator(f"#card-{star.id} .tag")).to_have_text(["sea", "best <b>"])
    page.keyboard.press("Escape")
    expect(page.locator("#pickbar")).to_be_hidden()

    page.keyboard.press("/")
    page.keyboard.type("RED BALL")
    expect_cards(page, ball.id)
    assert "q=RED" in page.url
    page.get_by_role("searchbox").fill("")
    expect(page.locator("#grid > article.card")).to_have_count(2)
    page.get_by_label("Starred").check()
    expect_cards(page, star.id)
    page.reload()
    expect_cards(page, star.id)  # a link shows what it showed
    page.get_by_label("Starred").uncheck()
    page.locator(".filters summary").click()
    page.get_by_label("State").select_option("completed")
    expect_cards(page, ball.id)
    page.get_by_label("State").select_option("")
    page.locator("#f-seed").fill("2")
    page.locator("#f-seed").press("Enter")
    expect_cards(page, star.id)
    # what does not match stays out, what does comes in
    site.submit(seed=5)
    twin = site.submit(seed=2)
    expect_cards(page, twin.id, star.id)


def test_trash_undo_delete_retry_cancel(site: Any, director: Any, visitor: Any) -> None:
    first, second = site.submit(seed=1), site.submit(seed=2)
    director.make()
    director.take().fail("the tape ran out")
    page = visitor.open(site.url)
    failed = page.locator(f"#card-{second.id}")
    expect(failed).to_contain_text("the tape ran out")
    failed.get_by_role("button", name="Try again").click()
    expect(failed).to_have_attribute("data-state", "queued")
    failed.get_by_role("button", name="Cancel").click()
    expect(failed).to_have_attribute("data-state", "cancelled")

    page.locator(f"#card-{first.id}").get_by_role("button", name="Into the trash").click()
    expect(page.locator(f"#card-{first.id}")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(f"#card-{first.id}")).to_be_visible()
    expect_cards(page, second.id, first.id)  # it is back in its place

    page.locator(f"#card-{first.id} h3 a").focus()
    page.keyboard.press("Delete")
    expect(page.locator(f"#card-{first.id}")).to_have_count(0)
    page.get_by_label("Trash", exact=True).check()
    expect(page.locator("#grid > article.card")).to_have_count(1)
    page.locator(f"#card-{first.id}").get_by_role("button", name="Delete for good").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("#grid > article.card")).to_have_count(0)
    assert httpx.get(f"{site.url}/v1/videos/{first.id}").status_code == 404


def test_several_at_once(site: Any, director: Any, visitor: Any) -> None:
    jobs = [site.submit(seed=seed) for seed in (1, 2, 3)]
    for _ in jobs:
        director.make()
    page = visitor.open(site.url)
    chosen = jobs[:2]
    for job in chosen:
        page.locator(f"#card-{job.id} .pick input").check()
    bar = page.get_by_role("toolbar", name="Selected videos")
    expect(bar).to_contain_text("2 selected")
    bar.get_by_role("button", name="Star").click()
    expect(page.locator("article.card[data-starred]")).to_have_count(2)
    bar.get_by_role("button", name="Trash").click()
    expect(page.locator("#grid > article.card")).to_have_count(1)
    expect(bar).to_be_hidden()
    page.get_by_role("button", name="Undo").click()
    expect_cards(page, *(job.id for job in reversed(jobs)))
    trashed = [site.store.listings.get(job.id).trashed_at for job in jobs]
    assert trashed == [None] * 3


def test_copied_json_makes_the_same_job(site: Any, director: Any, visitor: Any) -> None:
    job = site.submit(
        prompt='a red ball, it\'s "bouncing"',
        prompts=[{"at": 1.0, "prompt": "a blue star"}],
        seed=7_000_000_000,
        guidance_scale=2.5,
    )
    director.make()
    page = visitor.open(
        f"{site.url}/videos/{job.id}", permissions=["clipboard-read", "clipboard-write"]
    )
    page.get_by_role("button", name="Copy as JSON").click()
    expect(page.locator("#toasts")).to_contain_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    made = httpx.post(f"{site.url}/v1/videos", json=json.loads(copied)).json()
    same = site.store.listings.get(made["id"])
    original = site.store.listings.get(job.id)
    assert (same.request, same.plan, same.model, same.mode) == (
        original.request,
        original.plan,
        original.model,
        original.mode,
    )
    for name in ("curl", "Python", "CLI"):
        page.get_by_role("button", name=f"Copy as {name}").click()
        page.wait_for_function(
            "before => navigator.clipboard.readText().then(t => t !== before)", arg=copied
        )
        copied = page.evaluate("navigator.clipboard.readText()")
        assert "7000000000" in copied


def test_again_new_seed_extend_remix(site: Any, director: Any, visitor: Any) -> None:
    job = site.submit(seed=11)
    director.make()
    page = visitor.open(f"{site.url}/videos/{job.id}")
    page.get_by_role("button", name="Same again").click()
    page.wait_for_url(lambda url: job.id not in url)
    again = site.store.listings.get(page.url.rsplit("/", 1)[1])
    assert again.request == job.request
    visitor.go(page, f"{site.url}/videos/{job.id}")
    page.get_by_role("button", name="New seed").click()
    page.wait_for_url(lambda url: job.id not in url)
    other = site.store.listings.get(page.url.rsplit("/", 1)[1])
    assert other.request["seed"] != 11
    assert {**other.request, "seed": 11} == job.request

    visitor.go(page, f"{site.url}/videos/{job.id}")
    page.get_by_role("button", name="Extend").click()
    page.locator("#ask").get_by_label("Prompt").fill("a red ball spinning")
    page.get_by_label("Seconds of the whole").fill("5")
    page.locator("#ask").get_by_role("button", name="Extend").click()
    page.wait_for_url(lambda url: job.id not in url)
    expect(page.locator(".family")).to_contain_text("extends")
    longer = site.store.listings.get(page.url.rsplit("/", 1)[1])
    assert (longer.parent_id, longer.relation) == (job.id, "extend")
    assert longer.plan["seconds"] >= 5

    visitor.go(page, f"{site.url}/videos/{job.id}")
    expect(page.locator(".family")).to_contain_text("extended by")
    page.get_by_role("link", name="Remix").click()
    prompt = page.get_by_label("Prompt", exact=True)
    expect(prompt).to_have_value(job.prompt)
    expect(page.locator("#plan")).to_contain_text("33 frames")
    prompt.fill("a green heart over the desert")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("article.card").first).to_contain_text("a green heart")
    remixed = site.store.listings.page("local").jobs[0]
    assert (remixed.parent_id, remixed.relation) == (job.id, "remix")


def test_compare(site: Any, director: Any, visitor: Any) -> None:
    jobs = [site.submit(seed=1), site.submit(seed=2)]
    director.make()
    director.make()
    page = visitor.open(site.url)
    for job in jobs:
        page.locator(f"#card-{job.id} h3 a").focus()
        page.keyboard.press("x")
    page.get_by_role("button", name="Compare").click()
    page.locator("#compare[data-ready]").wait_for()
    times = "() => [...document.querySelectorAll('video')].map(video => video.currentTime)"
    page.wait_for_function(f"{times}.every(time => time > 0.3)")
    page.get_by_role("button", name="Pause").click()
    at = page.evaluate(times)
    assert abs(at[0] - at[1]) < 2 / 16
    page.get_by_label("Time").evaluate(
        "slider => { slider.value = 1; slider.dispatchEvent(new Event('input')); }"
    )
    page.wait_for_function(f"{times}.every(time => Math.abs(time - 1) < 0.01)")
    marked = page.locator("tr[data-differs] th").all_inner_texts()
    assert [text.split()[0] for text in marked] == ["seed"]


def test_queue_page(site: Any, director: Any, visitor: Any) -> None:
    jobs = [site.submit(seed=seed) for seed in (1, 2, 3)]
    take = director.take()
    page = visitor.open(f"{site.url}/queue")
    waiting = page.locator("ol.lines > li")
    order = "items => items.map(item => item.dataset.id)"
    assert waiting.evaluate_all(order) == [jobs[1].id, jobs[2].id]
    take.say(2)
    expect(page.locator(f"#card-{jobs[0].id}")).to_contain_text("step 2 of 4")
    waiting.nth(1).get_by_role("button", name="To the front").click()
    page.wait_for_function(
        "id => document.querySelector('ol.lines > li').dataset.id === id", arg=jobs[2].id
    )
    waiting.nth(0).get_by_role("button", name="One down").click()
    page.wait_for_function(
        "id => document.querySelector('ol.lines > li').dataset.id === id", arg=jobs[1].id
    )
    waiting.nth(0).get_by_role("button", name="Pause it").click()
    expect(page.locator("li[data-paused]")).to_have_attribute("data-id", jobs[1].id)
    line = page.locator(f"#card-{jobs[1].id}")
    line.get_by_role("button", name="Edit it").click()
    page.locator("#ask").get_by_label("Prompt").fill("a pink square on the snow")
    page.get_by_role("button", name="Change", exact=True).click()
    expect(line).to_contain_text("a pink square on the snow")
    assert site.store.listings.get(jobs[1].id).request["prompt"] == "a pink square on the snow"
    line.get_by_role("button", name="Cancel it").click()
    expect(waiting).to_have_count(1)
    line.get_by_role("button", name="Try again").click()
    expect(waiting).to_have_count(2)
