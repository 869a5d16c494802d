"""The files of one attempt: their names, and writing them so that what is reported is whole.

They are put on the disk by the worker that publishes them: the engine waits for no disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtake.queue.messages import File
from longtake.queue.records import ArtifactKind
from longtake.video.latents import ROLLOUT_NAME, LatentFolder
from longtake.video.partfile import PartFile, output_error

CONTENT_TYPES: Mapping[ArtifactKind, str] = {
    ArtifactKind.VIDEO: "video/mp4",
    ArtifactKind.THUMBNAIL: "image/webp",
    ArtifactKind.SPRITESHEET: "image/webp",
    ArtifactKind.PREVIEW: "image/webp",
    ArtifactKind.RECEIPT: "application/json",
    ArtifactKind.ROLLOUT: "application/json",
    ArtifactKind.INIT: "video/mp4",
    ArtifactKind.SEGMENT: "video/iso.segment",
    ArtifactKind.LATENTS: "application/octet-stream",
}


class AttemptFolder:
    """An attempt's folder, which is its own; see ``messages.Work`` for what may be there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.latents = root / "latents"
        self.header = root / "segments" / "init.mp4"
        self.video = root / "video.mp4"
        self.thumbnail = root / "thumbnail.webp"
        self.sheet = root / "spritesheet.webp"
        self.receipt = root / "receipt.json"

    def segment(self, index: int) -> Path:
        """A chunk's segment."""
        return self.header.with_name(f"segment-{index:06d}.m4s")

    def preview(self, index: int) -> Path:
        """Picture of a chunk."""
        return self.root / "previews" / f"preview-{index:06d}.webp"

    @property
    def stored(self) -> int:
        """Chunks whose latents an earlier attempt left, without a gap from the first."""
        described = (self.latents / ROLLOUT_NAME).is_file()
        return LatentFolder(self.latents).count if described else 0

    def clear_chunks(self) -> None:
        """Forget what earlier attempts left."""
        for folder in (self.latents, self.header.parent):
            shutil.rmtree(folder, ignore_errors=True)

    def latent_files(self, index: int) -> tuple[File, ...]:
        """Reports a chunk's latents, with the first chunk's the rollout, once they are written."""
        name = LatentFolder.file_name(index)
        files = [self.report(ArtifactKind.LATENTS, self.latents / name, index=index)]
        if index == 0:
            files.append(self.report(ArtifactKind.ROLLOUT, self.latents / ROLLOUT_NAME))
        return tuple(files)

    def write(self, kind: ArtifactKind, path: Path, data: bytes, **details: Any) -> File:
        """Write a file of this folder whole.

        Raises:
            OutputError: it cannot be written.
        """
        part: PartFile | None = None
        try:
            path.parent.mkdir(exist_ok=True)
            part = PartFile(path)
            part.path.write_bytes(data)
            part.commit(sync=False)
        except OSError as error:
            raise output_error("output", path, error) from error
        finally:
            if part is not None:
                part.discard()
        return self.report(kind, path, **details)

    def write_json(self, kind: ArtifactKind, path: Path, data: Mapping[str, Any]) -> File:
        """Write JSON as people can read it."""
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        return self.write(kind, path, text.encode())

    def report(self, kind: ArtifactKind, path: Path, **details: Any) -> File:
        """A file that is whole."""
        return File(kind, path, CONTENT_TYPES[kind], details)
