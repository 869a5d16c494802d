"""``longtake worker`` that also writes down when its engine begins the first step of each job.

Run ``python benchmarks/service_worker.py FILE`` with the service's settings in the environment: as
a file and not as a module, since the package imports torch, which no worker process does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from longtake.logs import set_up
from longtake.queue.engine import EngineProcess
from longtake.queue.messages import ChunkDone, EngineMessage, StepStarted, Work
from longtake.queue.processes import end_with_parent
from longtake.queue.tasks import run_worker
from longtake.settings import Settings

STARTED, DECODED = "started", "decoded"


class Notes:
    """One line of JSON for each thing noted; times are seconds since 1970 of this machine."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._job = ""
        self._seen: set[str] = set()

    def begin(self, work: Work) -> None:
        """The messages that follow are of this job."""
        self._job = work.job_id
        self._seen.clear()

    def see(self, message: EngineMessage | None) -> None:
        """Note the first step and the first decoded chunk."""
        match message:
            case StepStarted():
                self._note(STARTED)
            case ChunkDone():
                self._note(DECODED)
            case _:
                pass

    def _note(self, what: str) -> None:
        if what not in self._seen:
            self._seen.add(what)
            line = json.dumps({"job": self._job, "what": what, "at": time.time()})
            self._file.write(f"{line}\n")


def observe(notes: Notes) -> None:
    """Have every engine process of this worker tell ``notes`` what it sends and receives."""
    send, receive = EngineProcess.send, EngineProcess.receive

    def noted_send(self: EngineProcess, work: Work) -> None:
        notes.begin(work)
        send(self, work)

    def noted_receive(self: EngineProcess, timeout_s: float | None) -> EngineMessage | None:
        message = receive(self, timeout_s)
        notes.see(message)
        return message

    EngineProcess.send = noted_send  # type: ignore[method-assign]
    EngineProcess.receive = noted_receive  # type: ignore[method-assign]


if __name__ == "__main__":
    end_with_parent(os.getppid(), signal.SIGTERM)
    set_up("warning")
    observe(Notes(Path(sys.argv[1])))
    run_worker(Settings())
    os._exit(0)
