"""One video through ``longtake.video.generate`` in a process of its own; its peak memory as JSON.

Run ``python -m benchmarks.memory_child FRAMES FILE``.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from time import perf_counter

from benchmarks.bundled import request
from longtake.video.generate import Target, generate
from longtake.video.options import SilentObserver

STATUS = Path("/proc/self/status")


class Clock(SilentObserver):
    """Notes when each chunk was made and written."""

    def __init__(self) -> None:
        self._last = perf_counter()
        self.seconds: list[float] = []

    def on_stage(self, stage: str) -> None:
        """Start over when the first chunk begins."""
        del stage
        self._last = perf_counter()

    def on_chunk(self, frames: int) -> None:
        """One more chunk."""
        del frames
        now = perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def peak_bytes() -> int:
    """Peak resident memory of this process.

    Linux hands a child its parent's ``ru_maxrss``, and a benchmark's parent is large; ``VmHWM``
    starts anew with the program.
    """
    if STATUS.is_file():
        fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> int:
    """Make the video; print peak memory and seconds of each chunk."""
    frames, path = int(sys.argv[1]), Path(sys.argv[2])
    clock = Clock()
    generate(request(frames), Target(path), observer=clock)
    sys.stdout.write(json.dumps({"peak_bytes": peak_bytes(), "chunk_s": clock.seconds}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
