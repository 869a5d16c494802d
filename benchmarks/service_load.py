"""What the API bears with many videos stored: submissions a second, listings, the gallery."""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from math import ceil
from pathlib import Path
from statistics import median

from benchmarks.bundled import PROMPT
from benchmarks.report import Row, Scale
from benchmarks.service_site import Http, Site, postgres, postgres_programs, served
from benchmarks.service_stock import stock
from longtake.settings import Settings

MIN_SUBMISSIONS = 200.0  # a second
MAX_READ_MS = 50.0
MAX_PAGE_MS = 300.0
CLIENTS = 8
WARM_UP = 10


@dataclass(frozen=True, slots=True)
class Size:
    """Videos stored, seconds of submissions, and how often the rest is asked for."""

    stored: int
    seconds: float
    reads: int
    pages: int


SIZES = {
    Scale.FULL: Size(10_000, 20.0, 1000, 50),
    Scale.QUICK: Size(10_000, 5.0, 200, 10),
    Scale.SMALLEST: Size(200, 0.5, 10, 2),
}


def store_rows(scale: Scale) -> tuple[list[Row], str]:
    """The rows of all databases that are there, and how they were measured."""
    size = SIZES[scale]
    rows: list[Row] = []
    missing = ""
    for name in ("SQLite", "PostgreSQL"):
        with _database(name) as url:
            if url is None:
                missing = f" {name} is not installed and was not measured."
                continue
            rows += _rows_of(name, url, size)
    method = (
        f"Store: longtake serve without a worker, {size.stored} finished videos stored (all rows "
        "of one, copied), durable as the service sets it up. First reads one at a time on one "
        f"connection, client included: {size.reads} lists of 20 from anywhere, {size.reads} "
        f"videos, {size.pages} first pages of the gallery (HTML only). Then {CLIENTS} clients of "
        f"one process submit for {size.seconds:g} s; answers counted, each with a stored "
        f"job.{missing}"
    )
    return rows, method


def _rows_of(name: str, url: str, size: Size) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        database = url or f"sqlite:///{data / 'longtake.sqlite3'}"
        told = {"DATABASE_URL": database, "MAX_QUEUED": "1000000", "MIN_FREE_BYTES": "0"}
        ids = stock(Settings(data_dir=data, database_url=database), size.stored)
        with served(data, worker=False, settings=told) as site:
            lists = [f"/v1/videos?after={one}" for one in _some(ids, size.reads)]
            listed = _ask_for(site, lists)
            videos = _ask_for(site, [f"/v1/videos/{one}" for one in _some(ids, size.reads)])
            pages = _ask_for(site, ["/"] * size.pages)
            rate = _submissions(site, size.seconds)
    longest = f"longest {max(pages):.0f} ms"
    return [
        Row(f"submissions, {name}", rate, "1/s", MIN_SUBMISSIONS, at_least=True),
        Row(f"list p99, {name}", _p99(listed), "ms", MAX_READ_MS),
        Row(f"retrieve p99, {name}", _p99(videos), "ms", MAX_READ_MS),
        Row(f"gallery first page, median, {name}", median(pages), "ms", MAX_PAGE_MS, note=longest),
    ]


@contextmanager
def _database(name: str) -> Iterator[str | None]:
    """The URL of a database; empty for SQLite in the data folder, None if there is none."""
    if name == "SQLite":
        yield ""
        return
    programs = postgres_programs()
    if programs is None:
        yield None
        return
    with ExitStack() as stack:
        yield stack.enter_context(postgres(programs))


def _some(ids: list[str], number: int) -> list[str]:
    return random.Random(7).choices(ids, k=number)  # noqa: S311


def _ask_for(site: Site, paths: list[str]) -> list[float]:
    """Milliseconds of each; a few go before, uncounted."""
    times = []
    for path in (*paths[:WARM_UP], *paths):
        began = time.perf_counter()
        site.http.get(path)
        times.append(1e3 * (time.perf_counter() - began))
    return times[len(paths[:WARM_UP]) :]


def _submissions(site: Site, seconds: float) -> float:
    """Answered submissions a second while several clients send them."""
    numbers, answered = count(), []
    errors: list[Exception] = []
    began = time.perf_counter()

    def client() -> None:
        http = Http(site.url)
        try:
            while time.perf_counter() - began < seconds:
                request = {"prompt": PROMPT, "seed": next(numbers), "seconds": 4}
                http.submit(json.dumps(request).encode())
                answered.append(time.perf_counter())
        except Exception as error:  # told below, from the thread that can raise it
            errors.append(error)
        finally:
            http.close()

    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    if errors:
        raise errors[0]
    return len(answered) / (max(answered) - began)


def _p99(values: list[float]) -> float:
    return sorted(values)[ceil(0.99 * len(values)) - 1]
