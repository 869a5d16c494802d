"""The job service: queueing latency, what it costs, what it bears; asked against measured.

Run ``python -m benchmarks.service [start] [cost] [store] [--quick] [--json] [--threads N]``.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bundled import PROMPT, SEED
from benchmarks.report import Benchmark, Figure, Row, Scale, run
from benchmarks.service_load import store_rows
from benchmarks.service_site import Site, WarmEngine, served, warm_engine
from benchmarks.service_worker import DECODED, STARTED

START_P50_MS, START_P99_MS = 60.0, 200.0
MAX_COST = 1.03
MAX_FIRST_SEGMENT = 1.3
ONE_CHUNK = 9  # frames
PAUSE_S = (0.1, 0.6)  # between a job's end and the next: an idle worker, at no fixed beat
ASK_S = 0.005  # how often the first segment is asked for
FOUND = 200


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        jobs: for the time to the first step.
        frames, turns: of the videos that tell the cost, and how many of each side.
        short, short_turns: the same of those that tell when the first segment is there.
    """

    jobs: int
    frames: int
    turns: int
    short: int
    short_turns: int


SIZES = {
    Scale.FULL: Size(200, 481, 3, 33, 10),
    Scale.QUICK: Size(30, 161, 1, 33, 4),
    Scale.SMALLEST: Size(3, 33, 1, 21, 1),
}


def start(scale: Scale) -> Figure:
    """From a submission to its first step."""
    with _warm_site() as site:
        return _start(site, SIZES[scale])


def cost(scale: Scale) -> Figure:
    """A whole video and its first segment, through the service and without it."""
    with _warm_site() as site:
        return _cost(site, SIZES[scale])


def store(scale: Scale) -> Figure:
    """Submissions, listings and the gallery with many videos stored."""
    rows, method = store_rows(scale)
    return Figure("Service: with many videos stored", rows, method)


PARTS: dict[str, Benchmark] = {"start": start, "cost": cost, "store": store}


def figure(scale: Scale) -> Figure:
    """All parts in one; those that need a worker share it."""
    with _warm_site() as site:
        figures = [_start(site, SIZES[scale]), _cost(site, SIZES[scale])]
    figures.append(store(scale))
    rows = [row for one in figures for row in one.rows]
    return Figure("Service", rows, "\n\n".join(one.method for one in figures))


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that ``part`` of all do not exceed."""
    return sorted(values)[ceil(part * len(values)) - 1]


@contextmanager
def _warm_site() -> Iterator[Site]:
    """A service with one worker, which has made a video."""
    with (
        tempfile.TemporaryDirectory() as name,
        served(Path(name), worker=True, settings={}) as site,
    ):
        _make(site, ONE_CHUNK)
        yield site


def _start(site: Site, size: Size) -> Figure:
    waits = [_wait_for_step(site) for _ in range(size.jobs)]
    rows = [
        Row("submission to first step, p50", 1e3 * median(waits), "ms", START_P50_MS),
        Row("submission to first step, p99", 1e3 * percentile(waits, 0.99), "ms", START_P99_MS),
    ]
    method = (
        f"Start: {size.jobs} videos of {ONE_CHUNK} frames, one after the other, on an idle worker "
        "whose engine is warm. From just before POST is sent until the worker reads from its "
        "engine that the first step begins; both by time.time of this machine."
    )
    return Figure("Service: time to the first step", rows, method)


def _cost(site: Site, size: Size) -> Figure:
    with tempfile.TemporaryDirectory() as name, warm_engine(Path(name)) as alone:
        alone.make(ONE_CHUNK)
        videos = _turns(size.turns, lambda: _make(site, size.frames), alone, size.frames)
        firsts = _turns(
            size.short_turns, lambda: _first_segment(site, size.short), alone, size.short
        )
    rows = _cost_rows(videos, size) + _segment_rows(firsts)
    method = (
        "Cost: the service and the engine alone (same plan, model loaded, mp4 written, no "
        f"receipt) take turns, in who goes first too: {size.turns} of {size.frames} frames, then "
        f"{size.short_turns} of {size.short} frames for the first segment. The service's time "
        "runs from POST until the stream of events tells video.completed. A first segment counts "
        "from its first step (the worker's time.time) to its first 200, asked for every "
        f"{1e3 * ASK_S:.0f} ms from when the worker hears that it is decoded; the engine's from "
        "its first step to the first chunk's frames written. Medians of the turns' ratios."
    )
    return Figure("Service: cost", rows, method)


def _make(site: Site, frames: int) -> float:
    """Seconds of one video, from its submission to the news that it is there."""
    began = time.perf_counter()
    site.http.follow(site.http.submit(_request(frames)))
    return time.perf_counter() - began


def _wait_for_step(site: Site) -> float:
    time.sleep(random.uniform(*PAUSE_S))  # noqa: S311
    body = _request(ONE_CHUNK)
    site.http.get("/healthz")  # the connection is open
    sent = time.time()
    video = site.http.submit(body)
    site.http.follow(video)
    return site.noted(video, STARTED) - sent


def _first_segment(site: Site, frames: int) -> dict[str, float]:
    """Seconds from a video's first step until its first segment can be had, and was decoded."""
    video = site.http.submit(_request(frames))
    path = f"/v1/videos/{video}/segments/segment-000000.m4s"
    site.noted(video, DECODED)  # asking before would only take time from the engine
    while site.http.ask("GET", path)[0] != FOUND:
        time.sleep(ASK_S)
    there = time.time()
    site.http.follow(video)
    began = site.noted(video, STARTED)
    return {"there": there - began, "decoded": site.noted(video, DECODED) - began}


def _turns(
    count: int, make: Callable[[], Any], alone: WarmEngine, frames: int
) -> list[tuple[Any, dict[str, Any]]]:
    """What the service and what the engine alone made, turn by turn."""
    turns = []
    for index in range(count):
        if index % 2:
            engine = alone.make(frames)
            turns.append((make(), engine))
        else:
            served_video = make()
            turns.append((served_video, alone.make(frames)))
    return turns


def _cost_rows(turns: list[tuple[float, dict[str, Any]]], size: Size) -> list[Row]:
    what = f"{size.frames} frames"
    ratio = median(service / alone["seconds"] for service, alone in turns)
    return [
        Row(f"service / engine alone, {what}", ratio, "x", MAX_COST),
        Row(f"service, {what}", median(service for service, _ in turns), "s"),
        Row(f"engine alone, {what}", median(alone["seconds"] for _, alone in turns), "s"),
    ]


def _segment_rows(turns: list[tuple[dict[str, float], dict[str, Any]]]) -> list[Row]:
    ratios = [service["there"] / alone["chunk_s"][0] for service, alone in turns]
    steady = [service["there"] / alone["chunk_s"][-1] for service, alone in turns]
    there, decoded = (
        1e3 * median(service[name] for service, _ in turns) for name in ("there", "decoded")
    )
    first = 1e3 * median(alone["chunk_s"][0] for _, alone in turns)
    name = "first segment over HTTP / first chunk alone"
    return [
        Row(name, median(ratios), "x", MAX_FIRST_SEGMENT),
        Row("first segment over HTTP / last chunk alone", median(steady), "x"),
        Row("first step to first segment over HTTP", there, "ms"),
        Row("first step to first segment told by the engine", decoded, "ms"),
        Row("first chunk of the engine alone", first, "ms"),
    ]


def _request(frames: int) -> bytes:
    return json.dumps({"prompt": PROMPT, "seed": SEED, "num_frames": frames}).encode()


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", PARTS))
