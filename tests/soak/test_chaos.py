"""Everything is killed at random while videos are made; each is made once, as if nothing had been.

Here 8 videos on SQLite, and each part once. ``make soak`` asks for more: ``LONGTAKE_SOAK_JOBS``,
``LONGTAKE_SOAK_KINDS`` (sqlite and postgresql, with commas) and ``LONGTAKE_SOAK_SEED``.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from longtake.queue.records import JobState

if TYPE_CHECKING:
    from tests.queue.conftest import PostgresServer
    from tests.soak.conftest import Served

JOBS = int(os.environ.get("LONGTAKE_SOAK_JOBS", "8"))
KINDS = os.environ.get("LONGTAKE_SOAK_KINDS", "sqlite").split(",")
SEED = int(os.environ.get("LONGTAKE_SOAK_SEED", "1"))
PARTS = ("engine", "worker", "api", "broker")
ROUND = 2
LIMIT_S = 150 + 30 * JOBS
# of 2 to 4 chunks
REQUESTS: tuple[dict[str, Any], ...] = tuple(
    {"prompt": prompt, "seed": seed, "num_frames": frames, "num_inference_steps": 10}
    for prompt, seed, frames in (
        ("a red ball bouncing over a meadow", 7, 25),
        ("a blue boat in the rain", 8, 17),
        ("a yellow kite at night", 9, 9),
    )
)


class Chaos:
    """Asks for videos a few at a time, and kills one part of the service while they are made.

    Between two kills at least one video is completed, so that no job is ever killed so often that
    its tries are used up.
    """

    def __init__(self, service: Served, seed: int) -> None:
        self._service = service
        self._random = random.Random(seed)
        self._parts: list[str] = []
        self.killed: list[str] = []
        self.at_work = 0  # kills while a video was being made

    def run(self, jobs: int, restart_database: Callable[[], None] | None = None) -> list[str]:
        """Ask for ``jobs`` videos, kill once in every ``ROUND``; the database once, half way."""
        videos: list[str] = []
        others = self._service.completed()
        while len(videos) < jobs:
            completed = self._service.completed()
            first, last = len(videos), min(jobs, len(videos) + ROUND)
            videos += [self._service.submit(i, **request_of(i)) for i in range(first, last)]
            self._await_work(completed + 1, others + last)
            if restart_database is not None and last >= jobs / 2:
                restart_database()
                self.killed.append("database")
                restart_database = None
            else:
                self.kill(self._next_part())
        return videos

    def kill(self, kind: str) -> None:
        """SIGKILL one process of a kind; returns once there is another in its place."""
        before = self._service.until(f"a running {kind}", lambda: self._service.part(kind))
        victim = self._random.choice(before)
        self.at_work += bool(self._service.running())
        victim.kill()
        self.killed.append(kind)

        def back() -> bool:
            now = self._service.part(kind)
            return len(now) >= len(before) and victim not in now

        self._service.until(f"another {kind}", back)

    def _next_part(self) -> str:
        """All parts once, in random order, before any comes again."""
        if not self._parts:
            self._parts = self._random.sample(PARTS, len(PARTS))
        return self._parts.pop()

    def _await_work(self, completed: int, asked: int) -> None:
        """Wait until so many videos are there and another is begun, or all that were asked for."""

        def ready() -> bool:
            now = self._service.completed()
            begun = any(job.progress for job in self._service.running())
            return now >= completed and (begun or now >= asked)

        self._service.until(f"{completed} videos and another begun", ready)


def request_of(number: int) -> dict[str, Any]:
    return REQUESTS[number % len(REQUESTS)]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("kind", KINDS)
def test_every_video_is_made_once_and_as_if_undisturbed(
    kind: str,
    make_service: Callable[..., Served],
    request: pytest.FixtureRequest,
) -> None:
    restart = None
    changes: dict[str, Any] = {}
    if kind == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        changes = {"database_url": server.url("longtake"), "workers": 2}

        def restart() -> None:
            server.stop("immediate")
            server.start()

    service = make_service(**changes)
    undisturbed = [service.submit(-1 - i, **asked) for i, asked in enumerate(REQUESTS)]
    service.until("undisturbed videos", lambda: service.finished(undisturbed))
    pixels = [service.pixels(video) for video in undisturbed]
    assert len(set(pixels)) == len(pixels)

    chaos = Chaos(service, SEED)
    videos = chaos.run(JOBS, restart)
    sys.stdout.write(f"\n{kind}: {JOBS} videos, killed {' '.join(chaos.killed)}\n")
    assert len(chaos.killed) == math.ceil(JOBS / ROUND)
    assert chaos.at_work > 0

    jobs = service.until("the end", lambda: service.finished(videos))
    assert {job.state for job in jobs} == {JobState.COMPLETED}
    assert len(set(videos)) == JOBS
    counts = service.store.listings.counts()
    assert sum(counts.values()) == counts[JobState.COMPLETED] == len(REQUESTS) + JOBS
    for number, video in enumerate(videos):
        told = [event.type for event in service.store.events.read(0, job_id=video)]
        assert told.count("video.completed") == 1, told
        outcomes = [a.outcome for a in service.store.listings.attempts(video)]
        assert outcomes.count("completed") == 1, outcomes
        assert service.pixels(video) == pixels[number % len(REQUESTS)], outcomes
    service.until("no process that nobody looks after", lambda: not service.strangers())
    left = service.stop()
    assert left == []
