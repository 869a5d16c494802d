"""Chromium, a served application, and a director who makes its videos chunk by chunk on cue.

Nothing of the service is replaced but the model: the director claims jobs as a worker does and
writes real segments, pictures and receipts of drawn frames, so a test decides what happens when.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from longtake.api.app import create_app
from longtake.api.events import close_streams
from longtake.queue.artifacts import Artifacts, open_artifacts
from longtake.queue.attempt_folder import AttemptFolder
from longtake.queue.database import upgrade
from longtake.queue.messages import File
from longtake.queue.records import LOCAL_OWNER, Artifact, ArtifactKind, ChunkRecord, Job
from longtake.queue.store import Store, open_store
from longtake.settings import Settings
from longtake.video.fragments import FragmentEncoder, join_segments
from longtake.video.posters import Posters, preview

LAUNCH = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
WIDTH, HEIGHT, FPS = 128, 80, 16
WAIT_MS = 20_000  # longest wait for anything on a busy machine; nothing waits without a condition
expect.set_options(timeout=WAIT_MS)
AXE = Path(__file__).with_name("vendor") / "axe.min.js"


def chromium_path() -> str | None:
    """Debian's Chromium, or another one on the path."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for a file's tests, closed after them; none skips, but not in CI."""
    path = chromium_path()
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("Chromium is needed in CI and is not installed")
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(LAUNCH))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: LONGTAKE_SCREENSHOTS, or a folder of this run."""
    named = os.environ.get("LONGTAKE_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Site:
    """The application on a port, which it keeps over a restart."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def store(self) -> Store:
        store: Store = self.app.state.service.store
        return store

    def start(self) -> None:
        self.app = create_app(self.settings)
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        config = uvicorn.Config(self.app, log_config=None, access_log=False, lifespan="on")
        self._server = uvicorn.Server(config)
        ready = threading.Event()
        startup = self._server.startup

        async def told(sockets: list[socket.socket] | None = None) -> None:
            await startup(sockets)
            ready.set()

        self._server.startup = told  # type: ignore[method-assign]
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )
        self._thread.start()
        if not ready.wait(WAIT_MS / 1000):
            raise TimeoutError("the application did not start")

    def stop(self) -> None:
        close_streams(self.app)
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    def submit(self, owner: str = LOCAL_OWNER, **fields: Any) -> Job:
        """A queued job, past HTTP."""
        length = {} if "seconds" in fields else {"num_frames": 33}
        request = {"prompt": "a red ball bouncing over a green meadow", **length, **fields}
        job: Job = self.app.state.service.client.submit(request, owner)
        return job


@dataclass
class Take:
    """One job in the director's hands."""

    store: Store
    artifacts: Artifacts
    job: Job
    folder: AttemptFolder
    encoder: FragmentEncoder = field(init=False)
    done: int = 0
    frames: int = 0

    def __post_init__(self) -> None:
        self.encoder = FragmentEncoder((WIDTH, HEIGHT), FPS)
        self.posters = Posters(self.job.plan["num_frames"], FPS)
        self.sizes = _chunk_frames(self.job)

    def say(self, step: int, phase: str = "generating", eta_s: float = 12.0) -> Any:
        """Report progress, and hear whether to stop."""
        return self.store.held.renew(
            self.job.id, self.job.fence, 60, self._progress(step, phase, eta_s)
        )

    def chunk(self) -> None:
        """Store the next chunk: its segment, preview and record."""
        count = self.sizes[self.done]
        frames = drawn(self.frames, count, self.job.request["seed"], self.job.plan["num_frames"])
        files: list[File] = []
        if self.done == 0:
            files.append(
                self.folder.write(ArtifactKind.INIT, self.folder.header, self.encoder.header)
            )
        data = self.encoder.encode(frames, self.frames, self.done)
        segment = self.folder.segment(self.done)
        files.append(self.folder.write(ArtifactKind.SEGMENT, segment, data))
        picture = self.folder.preview(self.done)
        files.append(self.folder.write(ArtifactKind.PREVIEW, picture, preview(frames)))
        self.posters.add(frames)
        self.frames += count
        published = [self._published(file) for file in files]
        segment_key = next(a.key for a in published if a.kind is ArtifactKind.SEGMENT)
        times = {"denoise": 0.4, "clean": 0.1, "decode": 0.1, "encode": 0.02}
        record = ChunkRecord(
            self.job.id, self.done, self.job.fence, count, None, segment_key, times
        )
        self.done += 1
        progress = self._progress(0, "generating", 2.0 * (len(self.sizes) - self.done))
        self.store.held.record_chunk(self.job.id, self.job.fence, record, published, progress)

    def picture(self, step: int) -> None:
        """Show a picture of a clip, as the engine does between two steps."""
        frames = drawn(step, 1, self.job.request["seed"], self.job.plan["num_frames"])
        file = self.folder.write(ArtifactKind.PREVIEW, self.folder.preview(step), preview(frames))
        said = (self._progress(step, "generating", 3.0), [self._published(file)])
        self.store.held.renew(self.job.id, self.job.fence, 60, *said)

    def finish(self, **receipt: Any) -> Job:
        """Store what is left, and complete the job."""
        while self.done < len(self.sizes):
            self.chunk()
        return self.store.leases.complete(self.job.id, self.job.fence, self._results(receipt))

    def stop(self) -> Job:
        """What a worker does when its owner stops the job and keeps what is made."""
        return self.store.leases.cancelled(self.job.id, self.job.fence, self._results({}))

    def fail(self, message: str) -> Job:
        error = {"code": "internal_error", "message": message}
        return self.store.leases.fail(self.job.id, self.job.fence, error)

    def _results(self, receipt: dict[str, Any]) -> list[Artifact]:
        folder = self.folder
        segments = [folder.segment(k) for k in range(self.done)]
        join_segments(folder.video, folder.header, segments, frames=self.frames, metadata={})
        sheet, geometry = self.posters.sheet()
        known = {
            "longtake": "test",
            "seed": self.job.request["seed"],
            "timings": {"load": 0.6, "denoise": 3.1, "clean": 0.7, "decode": 0.5, "total": 5.2},
        }
        kinds = ArtifactKind
        files = (
            folder.report(kinds.VIDEO, folder.video, frames=self.frames),
            folder.write(kinds.THUMBNAIL, folder.thumbnail, self.posters.thumbnail()),
            folder.write(kinds.SPRITESHEET, folder.sheet, sheet, **geometry.as_dict()),
            folder.write(kinds.RECEIPT, folder.receipt, json.dumps(known | receipt).encode()),
        )
        return [self._published(file) for file in files]

    def _published(self, file: File) -> Artifact:
        return self.artifacts.publish(self.folder.root, [file], self.job.owner)[0]

    def _progress(self, step: int, phase: str, eta_s: float) -> dict[str, Any]:
        return {
            "phase": phase,
            "chunk": self.done,
            "chunks": len(self.sizes),
            "step": step,
            "steps": self.job.plan["steps"],
            "fps": 14.2,
            "eta_seconds": eta_s,
        }


class Director:
    """Plays the worker: takes jobs in the queue's order."""

    def __init__(self, settings: Settings) -> None:
        self.store = open_store(settings)
        self.artifacts = open_artifacts(settings)

    def take(self) -> Take:
        """Claim the next job."""
        job = self.store.leases.claim("director", "default", lease_s=600)
        if job is None:
            raise LookupError("no job waits")
        folder = self.artifacts.attempt_folder(job.id, job.fence)
        return Take(self.store, self.artifacts, job, AttemptFolder(folder))

    def make(self, **receipt: Any) -> Job:
        """Claim the next job and make it."""
        return self.take().finish(**receipt)

    def close(self) -> None:
        self.store.close()


def drawn(start: int, count: int, seed: int, total: int) -> np.ndarray[Any, Any]:
    """Frames of a disc that goes over a landscape; colours by seed."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    sky, land, disc = np.random.default_rng(seed).uniform(64, 255, (3, 3)).astype(np.float32)
    frames = np.empty((count, HEIGHT, WIDTH, 3), np.uint8)
    for k in range(count):
        at = (start + k) / max(1, total - 1)
        horizon = HEIGHT * (0.62 + 0.05 * np.sin(x[0] / 21 + 3 * at))
        light = (0.45 + 0.55 * (1 - y / HEIGHT))[..., None]
        frame = np.where((y > horizon)[..., None], land * 0.6, sky * light)
        centre = (16 + at * (WIDTH - 32), 44 - 26 * abs(np.sin(7 * at)))
        near = (x - centre[0]) ** 2 + (y - centre[1]) ** 2 < 11**2
        frames[k] = np.clip(np.where(near[..., None], disc, frame), 0, 255)
    return frames


def _chunk_frames(job: Job) -> list[int]:
    """Pixel frames of each chunk, the first one's first latent frame being a single one."""
    left, sizes = int(job.plan["num_frames"]), list[int]()
    layout = job.plan.get("layout", {"chunk": 1, "stride": left + 3})  # a clip is one chunk
    chunk = int(layout["chunk"]) * int(layout["stride"])
    while left > 0:
        size = min(left, chunk - 3 if not sizes else chunk)
        sizes.append(size)
        left -= size
    return sizes


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of the newest schema, to be copied."""
    path = tmp_path_factory.mktemp("database") / "longtake.sqlite3"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def settings(tmp_path: Path, migrated: Path) -> Settings:
    """A data folder of the test's own."""
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(migrated, data / "longtake.sqlite3")
    return Settings(data_dir=data, min_free_bytes=0)


@pytest.fixture
def make_site() -> Iterator[Callable[[Settings], Site]]:
    """Serves the application with given settings."""
    sites: list[Site] = []

    def make(settings: Settings) -> Site:
        sites.append(Site(settings))
        return sites[-1]

    yield make
    for site in sites:
        site.stop()


@pytest.fixture
def site(settings: Settings, make_site: Callable[[Settings], Site]) -> Site:
    """The application, served."""
    return make_site(settings)


@pytest.fixture
def director(settings: Settings) -> Iterator[Director]:
    """Who makes the videos."""
    director = Director(settings)
    yield director
    director.close()


class Visitor:
    """Opens pages, and minds what the browser complains about."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.complaints: list[str] = []
        self.expected: list[str] = []  # what a test breaks on purpose makes the browser say

    def open(
        self,
        url: str,
        width: int = 1280,
        height: int = 800,
        *,
        started: bool = True,
        **options: Any,
    ) -> Page:
        """A page in a browser window of its own, by default once its scripts have started."""
        context = self._browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(WAIT_MS)
        self._contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: self._hear(message.type, message.text))
        page.on("pageerror", lambda error: self._hear("error", str(error)))
        if started:
            self.go(page, url)
        else:
            page.goto(url)
        return page

    def go(self, page: Page, url: str) -> None:
        """Go to another page."""
        page.goto(url, wait_until="domcontentloaded")
        page.locator("html[data-ready]").wait_for(state="attached")

    def close(self) -> None:
        for context in self._contexts:
            context.close()

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not any(word in text for word in self.expected):
            self.complaints.append(f"{kind}: {text}")


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    """A visitor; the test fails if any page made the browser complain."""
    visitor = Visitor(browser)
    yield visitor
    visitor.close()
    assert visitor.complaints == []


@pytest.fixture
def check_access() -> Callable[[Page], list[str]]:
    """What axe-core finds on a page that is serious or worse."""

    def check(page: Page) -> list[str]:
        # past the page's own policy, as the browser's tools are
        if page.evaluate("typeof axe === 'undefined'"):
            page.evaluate(AXE.read_text(encoding="utf-8"))
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{one['id']} ({one['impact']}): {node['html'][:160]} {node['failureSummary'][:200]}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]

    return check
