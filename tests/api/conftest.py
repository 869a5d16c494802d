"""A real server of the application on a free port, with a migrated database of its own."""

from __future__ import annotations

import io
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from PIL import Image

from longtake.api.app import create_app
from longtake.api.events import close_streams
from longtake.api.service import Service
from longtake.queue.database import upgrade
from longtake.queue.messages import File
from longtake.queue.records import LOCAL_OWNER, Artifact, ArtifactKind, ChunkRecord, Job
from longtake.queue.tables import METADATA
from longtake.settings import Settings


class Site:
    """An application that listens; ``http`` is a client of it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.app: FastAPI = create_app(settings)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(self.app, log_config=None, access_log=False, lifespan="on")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=20, trust_env=False)
        self.http.get("/healthz")  # answered once the application has started

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    def submit(self, owner: str = LOCAL_OWNER, **fields: Any) -> Job:
        """A queued job, past HTTP."""
        request = {"prompt": "a red ball", "num_frames": 9, **fields}
        return self.service.client.submit(request, owner)

    def close(self) -> None:
        self.http.close()
        close_streams(self.app)
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


MakeSite = Callable[..., Site]


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of the newest schema, to be copied."""
    path = tmp_path_factory.mktemp("database") / "longtake.sqlite3"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def make_site(tmp_path: Path, migrated: Path) -> Iterator[MakeSite]:
    """Start an application with changed settings; several of one test share their data."""
    sites: list[Site] = []
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(migrated, data / "longtake.sqlite3")

    def make(**changes: Any) -> Site:
        settings = Settings(**{"data_dir": data, "min_free_bytes": 0, **changes})
        sites.append(Site(settings))
        return sites[-1]

    yield make
    for site in sites:
        site.close()


@pytest.fixture
def site(make_site: MakeSite) -> Site:
    """An application with the settings as they come."""
    return make_site()


@dataclass(frozen=True)
class Media:
    """Real files, as an engine leaves them: a fragmented mp4, its parts, pictures, a receipt."""

    video: bytes
    init: bytes
    segment: bytes
    picture: bytes
    receipt: bytes


@pytest.fixture(scope="session")
def media() -> Media:
    """Nine frames of 128x80, made once."""
    buffer = io.BytesIO()
    flags = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    with av.open(buffer, "w", format="mp4", options=flags) as container:
        stream = container.add_stream("libx264", rate=16, options={"threads": "1"})
        stream.width, stream.height, stream.pix_fmt = 128, 80, "yuv420p"
        for value in range(0, 225, 25):
            pixels = np.full((80, 128, 3), value, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    video = buffer.getvalue()
    cut = video.index(b"moof") - 4
    picture = io.BytesIO()
    Image.new("RGB", (128, 80), (200, 30, 30)).save(picture, "WEBP")
    receipt = json.dumps({"longtake": "0", "seed": 7}).encode()
    return Media(video, video[:cut], video[cut:], picture.getvalue(), receipt)


class Maker:
    """Stands in for a worker: claims from the store and stores real files, step by step."""

    def __init__(self, site: Site, media: Media) -> None:
        self._service = site.service
        self._media = media
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self) -> Job | None:
        """The next job, as a worker gets it."""
        return self._service.store.leases.claim("maker", "default", lease_s=60)

    def progress(self, job: Job, chunk: int, step: int) -> None:
        """Tell where the job is."""
        data = {"phase": "generating", "chunk": chunk, "chunks": job.plan["chunks"], "step": step}
        data |= {"steps": job.plan["steps"], "fps": 8.0, "eta_seconds": 1.5}
        self._service.store.held.renew(job.id, job.fence, 60, data)

    def chunk(self, job: Job, index: int, frames: int = 9) -> None:
        """Store a chunk: latents, segment and preview, with the first one the headers."""
        files = [
            self._file(job, ArtifactKind.LATENTS, f"latents/chunk-{index:06d}.safetensors", b"l"),
            self._file(
                job,
                ArtifactKind.SEGMENT,
                f"segments/segment-{index:06d}.m4s",
                self._media.segment,
                "video/mp4",
            ),
            self._file(
                job,
                ArtifactKind.PREVIEW,
                f"preview-{index}.webp",
                self._media.picture,
                "image/webp",
            ),
        ]
        if index == 0:
            files += [
                self._file(job, ArtifactKind.ROLLOUT, "latents/rollout.json", b"{}"),
                self._file(job, ArtifactKind.INIT, "init.mp4", self._media.init, "video/mp4"),
            ]
        keys = {one.kind: one.key for one in files}
        record = ChunkRecord(
            job.id,
            index,
            job.fence,
            frames,
            keys[ArtifactKind.LATENTS],
            keys[ArtifactKind.SEGMENT],
            {},
        )
        self._service.store.held.record_chunk(job.id, job.fence, record, files)

    def results(self, job: Job, frames: int | None = None) -> list[Artifact]:
        """The files of a whole video, or of its first ``frames``."""
        media = self._media
        return [
            self._file(
                job,
                ArtifactKind.VIDEO,
                "video.mp4",
                media.video,
                "video/mp4",
                frames=frames or job.plan["num_frames"],
            ),
            self._file(job, ArtifactKind.THUMBNAIL, "thumb.webp", media.picture, "image/webp"),
            self._file(job, ArtifactKind.SPRITESHEET, "sheet.webp", media.picture, "image/webp"),
            self._file(
                job, ArtifactKind.RECEIPT, "receipt.json", media.receipt, "application/json"
            ),
        ]

    def complete(self, job: Job) -> Job:
        """Make the whole video."""
        for index in range(job.plan["chunks"]):
            self.chunk(job, index)
        return self._service.store.leases.complete(job.id, job.fence, self.results(job))

    def make_all(self) -> None:
        """Complete whatever is queued."""
        while (job := self.claim()) is not None:
            self.complete(job)

    def run(self) -> None:
        """Complete what comes, in a thread, until the fixture ends."""
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        while not self._stopping.wait(0.05):
            self.make_all()

    def _file(
        self,
        job: Job,
        kind: ArtifactKind,
        name: str,
        data: bytes,
        content_type: str = "x/y",
        **details: Any,
    ) -> Artifact:
        folder = self._service.artifacts.attempt_folder(job.id, job.fence)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        file = File(kind, path, content_type, details)
        return self._service.artifacts.publish(folder, [file], job.owner)[0]


MakeMaker = Callable[[Site], Maker]


@pytest.fixture
def make_maker(make_site: MakeSite, media: Media) -> Iterator[MakeMaker]:
    """A stand-in worker of a site; it is stopped before the site is."""
    makers: list[Maker] = []

    def make(site: Site) -> Maker:
        makers.append(Maker(site, media))
        return makers[-1]

    yield make
    for maker in makers:
        maker.stop()


@pytest.fixture
def maker(site: Site, make_maker: MakeMaker) -> Maker:
    """The stand-in worker of ``site``."""
    return make_maker(site)


@pytest.fixture(scope="session")
def shared_site(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Iterator[Site]:
    """One application for all tests that need no settings of their own."""
    data = tmp_path_factory.mktemp("shared")
    shutil.copy(migrated, data / "longtake.sqlite3")
    site = Site(Settings(data_dir=data, min_free_bytes=0))
    yield site
    site.close()


@pytest.fixture
def api(shared_site: Site) -> Site:
    """The shared application with empty tables."""
    with shared_site.service.store.db.write() as conn:
        for table in reversed(METADATA.sorted_tables):
            if table.name != "owners":  # the store remembers whom it has written there
                conn.execute(table.delete())
    return shared_site


@pytest.fixture
def api_maker(api: Site, media: Media) -> Iterator[Maker]:
    """The stand-in worker of ``api``."""
    maker = Maker(api, media)
    yield maker
    maker.stop()
