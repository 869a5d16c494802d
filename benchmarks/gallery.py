"""The gallery in a browser: how soon a video plays while it is made, and what many videos cost.

Run ``python -m benchmarks.gallery [--quick] [--json] [--threads N]``.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.bundled import PROMPT
from benchmarks.report import Figure, Row, Scale, run
from benchmarks.service_site import Site, served
from benchmarks.service_stock import stock
from longtake.queue.store import Store, open_store
from longtake.settings import Settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LAUNCH = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
MAX_PICTURE_MS = 1000.0
MAX_HEAP_MB = 60.0
WAIT_MS = 120_000
SCROLLED = 200
BEFORE = 33  # frames of the video that is made while the next one's page is opened
# notes, by the clock of Date.now(), when the first picture of a video that is made was shown
NOTE = """
    window.pictures = {};
    addEventListener("play", ({ target }) => {
        const id = target.closest("[data-id]")?.dataset.id;
        if (!id || !target.matches(".live") || id in window.pictures) return;
        window.pictures[id] = 0;
        target.requestVideoFrameCallback(() => { window.pictures[id] = Date.now(); });
    }, true);
"""


@dataclass(frozen=True, slots=True)
class Size:
    """Videos stored, and of each kind made: how many, of how many frames."""

    stored: int
    turns: int
    frames: int


SIZES = {
    Scale.FULL: Size(10_000, 10, 97),
    Scale.QUICK: Size(10_000, 3, 65),
    Scale.SMALLEST: Size(250, 1, 33),
}


def figure(scale: Scale) -> Figure:
    """Both parts, on one service."""
    size, program = SIZES[scale], shutil.which("chromium") or shutil.which("chromium-browser")
    title = "Gallery in a browser"
    if program is None:
        return Figure(title, [], "Chromium is not installed: nothing was measured.")
    # of the dev extra: whoever has not installed it can still run the other parts
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name:
        settings = Settings(data_dir=Path(name))
        ids = stock(settings, size.stored)
        store = open_store(settings)
        try:
            with (
                served(Path(name), worker=True, settings={"MIN_FREE_BYTES": "0"}) as site,
                sync_playwright() as playwright,
            ):
                browser = playwright.chromium.launch(executable_path=program, args=list(LAUNCH))
                rows = rows_of(browser, site, store, ids, size)
                browser.close()
        finally:
            store.close()
    method = (
        f"{size.stored} finished videos stored (rows of one, copied, without files), SQLite, one "
        f"worker with papercut, headless Chromium at 1280x800. The wall is scrolled past "
        f"{SCROLLED} cards; the heap is read after a collection. Then "
        f"{size.turns} videos of {size.frames} frames on each of two pages: from the event of the "
        "first segment in the database (stamped before its commit) to the browser's report that "
        "the first picture is on the screen; one machine, one clock. Medians."
    )
    return Figure(title, rows, method)


def rows_of(browser: Browser, site: Site, store: Store, ids: list[str], size: Size) -> list[Row]:
    """The rows of a service that runs; ``ids`` are the videos stored, the newest first."""
    return [*_many(browser, site, ids), *_pictures(browser, site, store, size)]


def _many(browser: Browser, site: Site, ids: list[str]) -> list[Row]:
    """Cards, elements and heap with all videos to be scrolled through."""
    page = _open(browser, site.url)
    grid = page.locator("#grid > article.card")
    most = 0
    for video in ids[:SCROLLED:4]:
        page.locator(f"#card-{video}").scroll_into_view_if_needed()
        most = max(most, grid.count())
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    heap = session.send("Runtime.getHeapUsage")["usedSize"] / 1e6
    elements = page.evaluate("document.querySelectorAll('*').length")
    page.context.close()
    what = f"{len(ids)} videos"
    return [
        Row(f"most cards in the page, {what}", most, "cards"),
        Row(f"elements in the page after {SCROLLED} cards, {what}", elements, "elements"),
        Row(f"JavaScript heap after {SCROLLED} cards, {what}", heap, "MB", MAX_HEAP_MB),
    ]


def _pictures(browser: Browser, site: Site, store: Store, size: Size) -> list[Row]:
    """From a first segment to its first picture, on the video's page and on the wall."""
    page = _open(browser, site.url)

    def shown(video: str) -> float:
        page.wait_for_function("id => window.pictures[id] > 0", arg=video)
        at: float = page.evaluate("id => window.pictures[id]", video)
        site.http.follow(video)
        return at - 1e3 * _segment_at(store, video)

    wall = [shown(site.http.submit(_request(size.frames, turn))) for turn in range(size.turns)]
    own = []
    for turn in range(size.turns):
        site.http.submit(_request(BEFORE, turn))
        video = site.http.submit(_request(size.frames, turn))
        page.goto(f"{site.url}/videos/{video}")
        own.append(shown(video))
    page.context.close()
    return [
        Row(
            f"first segment to first picture, {where}",
            median(times),
            "ms",
            MAX_PICTURE_MS,
            note=f"longest {max(times):.0f} ms of {len(times)}",
        )
        for where, times in (("on the wall", wall), ("on its page", own))
    ]


def _open(browser: Browser, url: str) -> Page:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    page.add_init_script(NOTE)
    page.goto(url)
    page.locator("html[data-ready]").wait_for(state="attached")
    return page


def _segment_at(store: Store, video: str) -> float:
    """When the first segment came into the database, by the database's clock."""
    for event in store.events.read(0, job_id=video):
        if event.type == "video.chunk":
            return event.created_at
    raise LookupError(f"{video} has no segment")


def _request(frames: int, seed: int) -> bytes:
    return json.dumps({"prompt": PROMPT, "seed": seed, "num_frames": frames}).encode()


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", {"gallery": figure}))
