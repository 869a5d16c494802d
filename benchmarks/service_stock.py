"""Ten thousand finished videos in a database: all rows of one, copied; no files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Table, insert, select

from benchmarks.bundled import PROMPT
from longtake.queue.client import Client
from longtake.queue.database import upgrade
from longtake.queue.ids import new_id
from longtake.queue.records import Artifact, ArtifactKind, ChunkRecord, Job
from longtake.queue.store import Store, open_store
from longtake.queue.tables import artifacts, attempts, chunks, events, jobs
from longtake.settings import Settings

ROWS = 2000  # written at once
FRAMES = 33
RESULTS = (
    (ArtifactKind.VIDEO, "video.mp4", "video/mp4"),
    (ArtifactKind.THUMBNAIL, "thumbnail.webp", "image/webp"),
    (ArtifactKind.SPRITESHEET, "sheet.webp", "image/webp"),
    (ArtifactKind.RECEIPT, "receipt.json", "application/json"),
)


def stock(settings: Settings, count: int) -> list[str]:
    """Bring the schema up to date and store ``count`` videos; their ids, the newest first."""
    upgrade(settings.database)
    store = open_store(settings)
    try:
        first = _finished_job(store, settings)
        names = [new_id("video") for _ in range(count - 1)]
        with store.db.write() as conn:
            for table in (jobs, attempts, chunks, artifacts, events):
                owner = table.c.id if table is jobs else table.c.job_id
                rows = [
                    dict(row)
                    for row in conn.execute(select(table).where(owner == first.id)).mappings()
                ]
                copies = _copies(table, rows, names)
                while batch := list(islice(copies, ROWS)):
                    conn.execute(insert(table), batch)
    finally:
        store.close()
    return [first.id, *names]


def _copies(table: Table, rows: list[dict[str, Any]], names: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of one video for others, each a second older than the one before."""
    for age, name in enumerate(names, 1):
        for row in rows:
            copy = dict(row)
            if table is events:
                del copy["seq"]
            if table is artifacts:
                copy |= {"id": new_id("file"), "key": copy["key"].replace(row["job_id"], name)}
            if table is jobs:
                copy |= {"id": name, "prompt": f"{row['prompt']} number {age}"}
                copy |= {
                    "position": row["position"] - age,
                    "completed_at": row["completed_at"] - age,
                }
            else:
                copy["job_id"] = name
            if "created_at" in copy:
                copy["created_at"] = row["created_at"] - age
            yield copy


def _finished_job(store: Store, settings: Settings) -> Job:
    """One video as a worker stores it."""
    request = {"prompt": PROMPT, "seed": 7, "num_frames": FRAMES}
    Client(store, settings).submit(request)
    job = store.leases.claim("benchmark", settings.queue, lease_s=600)
    if job is None:
        raise LookupError("the job that was just stored is not claimable")
    for index in range(int(job.plan["chunks"])):
        latents = _file(job, ArtifactKind.LATENTS, f"latents/chunk-{index:06d}.safetensors")
        segment = _file(job, ArtifactKind.SEGMENT, f"segments/segment-{index:06d}.m4s")
        record = ChunkRecord(
            job.id, index, job.fence, 12, latents.key, segment.key, {"decode": 0.1}
        )
        progress = {"phase": "generating", "chunk": index + 1, "chunks": job.plan["chunks"]}
        store.held.record_chunk(job.id, job.fence, record, [latents, segment], progress)
    files = [_file(job, kind, name, content) for kind, name, content in RESULTS]
    return store.leases.complete(job.id, job.fence, files, {"frames": FRAMES})


def _file(job: Job, kind: ArtifactKind, name: str, content: str = "video/mp4") -> Artifact:
    key = str(Path("jobs") / job.id / str(job.fence) / name)
    return Artifact(
        new_id("file"),
        *(job.id, job.owner, job.fence, kind, key, 1000, None, content, job.created_at),
        {"frames": FRAMES, "width": 128, "height": 80, "fps": 16.0},
    )
