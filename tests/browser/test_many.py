"""Ten thousand videos: few elements, little memory, a page that comes at once."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect
from sqlalchemy import insert, select

from longtake.queue.tables import jobs

COUNT = 10_000
SCROLLED = 200
MOST_CARDS = 160
MOST_HEAP_BYTES = 60_000_000


def fill(site: Any, job: Any) -> None:
    """Copies of a job that is done, each a second older."""
    with site.store.db.write() as conn:
        row = dict(conn.execute(select(jobs).where(jobs.c.id == job.id)).mappings().one())
        copies = [
            {
                **row,
                "id": f"video_{number:024d}",
                "created_at": row["created_at"] - number,
                "prompt": f"{row['prompt']} number {number}",
                "request": {**row["request"], "seed": number},
            }
            for number in range(1, COUNT)
        ]
        for start in range(0, len(copies), 500):
            conn.execute(insert(jobs), copies[start : start + 500])


def test_ten_thousand_videos(site: Any, director: Any, visitor: Any) -> None:
    job = site.submit(seed=0)
    director.make()
    fill(site, job)
    visitor.expected = ["status of 404"]  # the copies have no pictures
    page = visitor.open(site.url)
    grid = page.locator("#grid > article.card")
    columns = page.locator("#grid").evaluate(
        "grid => getComputedStyle(grid).gridTemplateColumns.split(' ').length"
    )
    most = 0
    for number in range(0, SCROLLED + columns, columns * 2):
        target = page.locator(f"#card-video_{max(number, 1):024d}")
        target.scroll_into_view_if_needed()
        most = max(most, grid.count())
    assert most < MOST_CARDS
    shown = grid.evaluate_all("cards => cards.map(card => card.dataset.id)")
    numbers = [int(one[6:]) for one in shown]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "in order, none twice"
    assert numbers[0] > 1, "those far above were taken out"

    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    heap = session.send("Runtime.getHeapUsage")["usedSize"]
    assert heap < MOST_HEAP_BYTES

    late = site.submit(seed=1)
    expect(page.locator(".pill")).to_have_text("1 new video")
    page.locator(".pill").click()
    expect(page.locator(f"#card-{late.id}")).to_be_visible()
    expect(page.locator(f"#card-{job.id}")).to_be_visible()
    top = grid.evaluate_all("cards => cards.slice(0, 3).map(card => card.dataset.id)")
    assert top == [late.id, job.id, f"video_{1:024d}"]
    page.locator("#q").fill("number 9876")
    expect(grid).to_have_count(1)
