"""A new user's first minutes: the whole service as it is started, with the bundled model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from longtake.queue.store import open_store
from longtake.settings import Settings

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the benchmarks lie beside the package, not in it

from benchmarks import gallery  # noqa: E402
from benchmarks.report import Scale  # noqa: E402
from benchmarks.service_site import Site  # noqa: E402

MADE_MS = 120_000  # longest wait for a short video, its model not loaded yet, on a busy machine
STOP_S = 30
PROMPT = "a red ball bouncing over a green meadow"

# what each card has been, in order, and that it was never another page that said so
WATCH = """() => {
    window.been = {};
    const look = () => {
        for (const { dataset } of document.querySelectorAll("article.card[data-id]")) {
            const been = (window.been[dataset.id] ??= []);
            if (been.at(-1) !== dataset.state) been.push(dataset.state);
        }
    };
    const what = { subtree: true, childList: true, attributeFilter: ["data-state"] };
    new MutationObserver(look).observe(document.body, what);
    look();
}"""

# true once the picture has moved while the job was still being made
PLAYED = """() => {
    const article = document.querySelector("article.video");
    const video = document.querySelector("video.live");
    if (!video || article.dataset.state !== "in_progress") return false;
    return video.readyState >= 2 && video.currentTime > 0.5;
}"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The service's folder, empty at first."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def service(data: Path) -> Iterator[str]:
    """The address of ``longtake serve``."""
    command = [sys.executable, "-P", "-m", "longtake", "serve", "--data", str(data), "--port", "0"]
    told = {"LONGTAKE_MIN_FREE_BYTES": "0", "LONGTAKE_LOG_LEVEL": "warning"}
    with (data / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | told, stdout=subprocess.PIPE, stderr=log, text=True
        )
    output = process.stdout
    assert output is not None
    try:
        line = next((line for line in output if "longtake is at " in line), None)
        assert line is not None, (data / "log").read_text()
        yield line.partition("longtake is at ")[2].strip()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.close()


def made(page: Page, selector: str = "article.video") -> None:
    """Wait until it is done."""
    wanted = expect(page.locator(selector))
    wanted.to_have_attribute("data-state", "completed", timeout=MADE_MS)


def test_type_watch_extend_compare(service: str, visitor: Any, pictures: Path) -> None:
    page = visitor.open(service)
    page.evaluate(WATCH)
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    page.get_by_label("Seconds").fill("2")
    page.get_by_label("Seed", exact=True).first.fill("1")
    page.get_by_label("Takes").fill("2")
    page.get_by_role("button", name="Generate").click()
    cards = page.locator("#grid > article.card")
    expect(cards).to_have_count(2)
    for number in (1, 0):
        made(page, f"#grid > article.card:nth-child({number + 1})")
        expect(cards.nth(number).locator("img.poster")).to_be_visible()
    been = page.evaluate("window.been")
    assert list(been.values()) == [["queued", "in_progress", "completed"]] * 2
    expect(cards.nth(0)).to_contain_text("seed 2")

    first = cards.nth(1).get_attribute("data-id")
    cards.nth(1).locator("h3 a").click()
    page.wait_for_function("() => document.querySelector('[data-player] video')?.readyState >= 1")
    page.get_by_role("button", name="Extend").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Prompt")).to_have_value(PROMPT)
    dialog.get_by_label("Seconds of the whole").fill("3")
    dialog.get_by_role("button", name="Extend").click()
    page.wait_for_url(lambda url: "/videos/" in url and first not in url)
    made(page)
    expect(page.locator(".family")).to_contain_text("extends")
    page.wait_for_function("() => document.querySelector('[data-player] video')?.duration >= 3")
    expect(page.locator("[data-drift]")).to_have_count(0)  # a receipt of today measures none
    page.screenshot(path=pictures / "real-extended.png")

    page.get_by_role("link", name="Gallery", exact=True).click()
    expect(cards).to_have_count(3)
    for number in (1, 2):
        cards.nth(number).locator(".pick input").check()
    page.get_by_role("button", name="Compare").click()
    page.locator("#compare[data-ready]").wait_for()
    page.wait_for_function(
        "() => [...document.querySelectorAll('video')].every(video => video.currentTime > 0.2)"
    )
    assert page.locator("tr[data-differs] th").all_inner_texts() == ["seed differs"]
    page.screenshot(path=pictures / "real-compare.png")


def test_plays_before_it_is_done_and_stops(service: str, visitor: Any) -> None:
    page = visitor.open(service)
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    page.get_by_label("Seconds").fill("20")
    page.get_by_role("button", name="Generate").click()
    card = page.locator("#grid > article.card").first
    expect(card).to_contain_text("20 s long")
    card.locator("h3 a").click()
    page.wait_for_function(PLAYED, timeout=MADE_MS)
    page.get_by_role("button", name="Stop").click()
    about = page.locator("article.video")
    expect(about).to_have_attribute("data-state", "cancelled", timeout=MADE_MS)
    finished = "[data-player] video:not(.live)"
    page.wait_for_function(f"() => document.querySelector('{finished}')?.readyState >= 2")
    length = page.locator(finished).evaluate("video => video.duration")
    assert 0.5 < length < 20


def test_the_benchmark_of_these_pages_runs(browser: Any, service: str, data: Path) -> None:
    site, store = Site(data, service), open_store(Settings(data_dir=data))
    try:
        ids = [job.id for job in store.listings.page("local").jobs]
        rows = gallery.rows_of(browser, site, store, ids, gallery.SIZES[Scale.SMALLEST])
    finally:
        site.http.close()
        store.close()
    assert all(row.value > 0 for row in rows)
    judged = {row.name.partition(" after")[0]: row.target for row in rows if row.target}
    assert judged == {
        "JavaScript heap": 60,
        "first segment to first picture, on the wall": 1000,
        "first segment to first picture, on its page": 1000,
    }
