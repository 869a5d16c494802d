"""A card follows its job: queued, making, done, without reload, and after one."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page, expect

from longtake.queue.records import WorkerRecord

# the browser itself says that a connection was refused while the server was away
CUT = ["ERR_CONNECTION", "ERR_INCOMPLETE", "htmx:sse:error"]


def card(page: Page, job_id: str) -> Any:
    return page.locator(f"#card-{job_id}")


def test_queued_making_done(site: Any, director: Any, visitor: Any) -> None:
    page = visitor.open(site.url)
    page.get_by_label("Prompt", exact=True).fill("a red ball bouncing over a green meadow")
    page.get_by_label("Seconds").fill("2")
    page.get_by_role("button", name="Generate").click()
    only = page.locator("article.card")
    expect(only).to_have_attribute("data-state", "queued")
    expect(only).to_contain_text("next")
    page.evaluate("window.stayed = true")

    take = director.take()
    expect(only).to_have_attribute("data-state", "in_progress")
    take.say(2)
    expect(only).to_contain_text("step 2 of 4")
    expect(only).to_contain_text("12 s left")
    take.chunk()
    expect(only).to_contain_text("chunk 2 of")
    expect(only).to_contain_text("step 0 of 4")
    expect(page.locator("#summary [data-n=making]")).to_have_text("1")
    assert page.evaluate("window.stayed"), "the page was loaded anew"

    page.reload()
    expect(only).to_have_attribute("data-state", "in_progress")
    expect(only).to_contain_text("chunk 2 of")
    other = visitor.open(site.url)
    expect(card(other, take.job.id)).to_contain_text("chunk 2 of")

    visitor.expected = CUT
    site.stop()
    site.start()
    take.say(3)
    for each in (page, other):
        expect(card(each, take.job.id)).to_contain_text("step 3 of 4")
        expect(each.locator("#away")).to_be_hidden()
        expect(each.locator("article.card")).to_have_count(1)

    take.finish()
    for each in (page, other):
        expect(card(each, take.job.id)).to_have_attribute("data-state", "completed")
        expect(card(each, take.job.id).locator("img.poster")).to_be_visible()
        expect(each.locator("#summary [data-n=making]")).to_have_text("0")


def test_stream_cut_and_restored(site: Any, director: Any, visitor: Any) -> None:
    running, waiting = site.submit(seed=1), site.submit(seed=2)
    take = director.take()
    take.chunk()
    page = visitor.open(site.url)
    expect(card(page, running.id)).to_contain_text("chunk 2 of")

    visitor.expected = CUT
    site.stop()
    # what happens while nobody is told
    take.say(3)
    take.finish()
    second = director.take()
    assert second.job.id == waiting.id
    second.chunk()
    second.say(1)
    expect(page.locator("#away")).to_be_visible()
    site.start()
    late = site.submit(seed=3)

    expect(card(page, running.id)).to_have_attribute("data-state", "completed")
    expect(card(page, waiting.id)).to_contain_text("step 1 of 4")
    expect(card(page, late.id)).to_have_attribute("data-state", "queued")
    ids = page.locator("article.card").evaluate_all("cards => cards.map(card => card.dataset.id)")
    assert ids == [late.id, waiting.id, running.id]
    # an old event told again must not take the card back
    page.evaluate(
        """([id, data]) => {
            const detail = {id: "1", data: JSON.stringify(data)};
            const told = new CustomEvent("video.progress", {detail});
            document.getElementById("stream").dispatchEvent(told);
        }""",
        ["1", {"id": waiting.id, "type": "video.progress", "seq": 1, "x_progress": {"step": 0}}],
    )
    expect(card(page, waiting.id)).to_contain_text("step 1 of 4")


def test_worker_lost_shows_no_stale_progress(site: Any, director: Any, visitor: Any) -> None:
    job = site.submit(seed=4)
    take = director.take()
    take.chunk()
    take.say(3)
    page = visitor.open(site.url)
    expect(card(page, job.id)).to_contain_text("step 3 of 4")
    director.store.leases.release(job.id, take.job.fence, counts=False, outcome="preempted")
    expect(card(page, job.id)).to_have_attribute("data-state", "queued")
    expect(card(page, job.id)).not_to_contain_text("step 3")


def test_nobody_is_there_to_make_it(site: Any, director: Any, visitor: Any) -> None:
    site.submit(seed=5)
    page = visitor.open(site.url)
    expect(page.locator("#summary")).to_contain_text("no worker is up")
    director.store.workers.beat(WorkerRecord("late", "attic", 1, "1@0", "default", "idle"))
    expect(page.locator("#summary .stuck")).to_have_count(0)
