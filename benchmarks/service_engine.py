"""The engine alone in a warm process: makes the videos it is asked for, one JSON line each.

Run ``python -m benchmarks.service_engine``; each line of standard input holds frames and a path.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

from benchmarks.bundled import request
from longtake.video.generate import Target
from longtake.video.model_cache import ModelCache
from longtake.video.options import EngineOptions, SilentObserver, Storage
from longtake.video.prepare import prepare
from longtake.video.rollout import StepEvent


class FirstStep(SilentObserver):
    """Notes when the first denoising step begins."""

    def __init__(self) -> None:
        self.at = 0.0

    def on_start(self, event: StepEvent) -> None:
        """A step begins."""
        del event
        self.at = self.at or perf_counter()


def make(frames: int, path: Path, models: ModelCache) -> dict[str, float | list[float]]:
    """Seconds of one video from its request to its closed mp4, and of its chunks.

    A chunk's seconds end when its frames are written; the first one's begin with the first step.
    """
    observer, target = FirstStep(), Target(path)
    began = perf_counter()
    what = request(frames)
    prepared = prepare(what, EngineOptions(), Storage(), observer, target.check, models)
    chunk_s: list[float] = []
    with ExitStack() as stack:
        writers = [stack.enter_context(writer) for writer in target.open(prepared.plan)]
        last = 0.0
        for piece in prepared.pieces:
            for writer in writers:
                writer.write(piece.frames)
            now = perf_counter()
            chunk_s.append(now - (last or observer.at))
            last = now
        for writer in writers:
            writer.close()
    return {"seconds": perf_counter() - began, "chunk_s": chunk_s}


def main() -> int:
    """Serve standard input to its end."""
    models = ModelCache()
    for line in sys.stdin:
        asked = json.loads(line)
        made = make(int(asked["frames"]), Path(asked["path"]), models)
        sys.stdout.write(json.dumps(made) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
