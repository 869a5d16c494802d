"""Ranks of one command: this process as rank 0 and followers it starts, or those of torchrun.

``longtake generate --parallel`` starts the other ranks on this machine; each gets a CUDA device, or
its share of the CPU's cores. Under torchrun (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT`` are set) every process runs the same command and takes its rank from there, on one
host or several.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import FileStore

from longtake.errors import ParallelError, RequestError
from longtake.video.clip_plan import ClipPlan
from longtake.video.model_cache import ModelCache
from longtake.video.numerics import choose_device, configure
from longtake.video.options import EngineOptions, Storage
from longtake.video.parallel import usable_ranks
from longtake.video.parallel_follow import begin, follow
from longtake.video.parallel_groups import COMMAND_LIMITS, Limits, Ranks, under_launcher
from longtake.video.parallel_layout import (
    LEGAL,
    facts_of,
    most_ranks,
    parse_layout,
    usable_cores,
)
from longtake.video.plan import DRAWN_SEED_LIMIT
from longtake.video.prepare import plan_request, resolve_request
from longtake.video.profiles import NONE
from longtake.video.request import VideoRequest

# how long followers may take to end after rank 0 did
END_S = 10.0
T = TypeVar("T")
Run = Callable[[VideoRequest, EngineOptions], T]


def run_parallel(
    request: VideoRequest, engine: EngineOptions, storage: Storage, threads: int | None, run: Run[T]
) -> T | None:
    """Run one video on the ranks of ``engine.parallel``.

    Args:
        request: its seed is drawn here, once for all ranks, if it has none.
        engine, storage: as of ``generate``.
        threads: CPU threads of each rank; None shares out the cores.
        run: what rank 0 does, with the request and options that it is given.

    Returns:
        What ``run`` gave; None on every rank but 0.

    Raises:
        RequestError: the layout does not fit the devices.
        ParallelError: a rank did not start, or ended before its time.
    """
    resolved = resolve_request(request, storage.resume)
    if resolved.seed is None:
        resolved = replace(resolved, seed=secrets.randbelow(DRAWN_SEED_LIMIT))
    if under_launcher():
        return _under_launcher(resolved, engine, storage, run)
    size = ranks_for(engine, resolved)
    if size == 1:
        return run(resolved, engine)
    each = threads or max(1, usable_cores() // size)
    with _followers(resolved, engine, storage, (size, each)) as shared:
        return _lead(resolved, shared, run)


def ranks_for(engine: EngineOptions, request: VideoRequest) -> int:
    """How many ranks the layout means on this machine: ``auto`` as many as can share the video.

    Raises:
        RequestError: ``parallel`` does not fit the devices.
    """
    text = engine.parallel or "auto"
    layout, there = parse_layout(text), usable_ranks(engine.device)
    if layout is None:
        plan = plan_request(request, replace(engine, parallel=None, profile=NONE), probe=False)
        return there if isinstance(plan, ClipPlan) else most_ranks(there, facts_of(plan))
    if choose_device(engine.device).type == "cuda" and layout.ranks > there:
        reason = f"needs {layout.ranks} CUDA devices, there are {there}"
        raise RequestError("parallel", text, reason, f"a product of at most {there}")
    return layout.ranks


def as_rank(
    engine: EngineOptions,
    rank: int,
    size: int,
    place: Path | None,
    *,
    local: int | None = None,
    limits: Limits = COMMAND_LIMITS,
) -> EngineOptions:
    """Options of this process as one of the ranks; returns when all of them are there.

    Args:
        engine: of the whole.
        rank, size: which one of how many.
        place: a file that does not exist, the same for all; None takes torchrun's variables.
        local: which CUDA device of this machine is its own; ``rank`` if None.
        limits: how long ranks wait for each other.

    Raises:
        RequestError: ``device`` is one that only one rank could have.
    """
    chosen = choose_device(engine.device)
    if chosen.type == "mps" or (chosen.type == "cuda" and chosen.index is not None):
        reason = "is one device, and every rank needs its own"
        raise RequestError("device", engine.device, reason, "cpu or cuda")
    name = "cpu" if chosen.type == "cpu" else f"cuda:{rank if local is None else local}"
    store = None
    if place is not None:
        store = FileStore(str(place), size)
        store.set_timeout(timedelta(seconds=limits.start_s))
    ranks = Ranks(rank, size, store, torch.device(name), limits)
    return replace(engine, device=name, ranks=ranks)


def _under_launcher(
    request: VideoRequest, engine: EngineOptions, storage: Storage, run: Run[T]
) -> T | None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    layout = parse_layout(engine.parallel or "auto")
    if layout is not None and layout.ranks != size:
        reason = f"is a layout for {layout.ranks} ranks, torchrun started {size}"
        raise RequestError("parallel", engine.parallel, reason, LEGAL)
    options = as_rank(engine, rank, size, None, local=int(os.environ.get("LOCAL_RANK", rank)))
    ranks = options.ranks
    if ranks is None:
        return None
    shared = replace(request, seed=ranks.hear(request.seed or 0))
    if ranks.leader:
        return _lead(shared, options, run)
    follow(shared, options, lambda _: storage, ModelCache())
    return None


def _lead(request: VideoRequest, engine: EngineOptions, run: Run[T]) -> T:
    begin(engine.ranks)
    try:
        return run(request, engine)
    finally:
        if engine.ranks is not None:
            engine.ranks.leave()


@contextlib.contextmanager
def _followers(
    request: VideoRequest, engine: EngineOptions, storage: Storage, how: tuple[int, int]
) -> Iterator[EngineOptions]:
    """This process as rank 0 with the others following; ``how`` is (ranks, threads of each)."""
    size, threads = how
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="longtake-ranks-") as folder:
        place = Path(folder) / "store"
        others = [
            context.Process(
                target=_follow,
                args=(rank, size, place, threads, (request, engine, storage)),
                name=f"rank {rank}",
            )
            for rank in range(1, size)
        ]
        watch = _Watch(others)
        try:
            for process in others:
                process.start()
            watch.start()
            configure(threads)
            yield as_rank(engine, 0, size, place)
        except (RuntimeError, ParallelError) as error:
            # a broken connection comes as whatever the exchange trips over
            raise watch.explain(error) from error
        finally:
            watch.close()


class _Watch:
    """Looks after the other ranks: when one fails all are ended, so that no exchange waits."""

    def __init__(self, others: list[Any]) -> None:
        self._others = others
        self._ours, self._theirs = multiprocessing.Pipe()
        self._thread = threading.Thread(target=self._look, name="ranks", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def explain(self, error: Exception) -> Exception:
        """The error, or that a rank is gone where one is."""
        if wait([process.sentinel for process in self._others], 1.0):
            # two threads must not ask for one exit code at once: one of them gets none
            self._thread.join(END_S)
        gone = [f"{p.name} (exit code {p.exitcode})" for p in self._others if p.exitcode]
        return ParallelError(f"{gone[0]} ended before its time") if gone else error

    def close(self) -> None:
        """Give the others a moment to end by themselves, then kill those that are left."""
        self._ours.send(None)
        if self._thread.is_alive():
            self._thread.join()
        until = monotonic() + END_S
        for process in self._others:
            if process.pid is not None:
                process.join(max(0.0, until - monotonic()))
                process.kill()
                process.join()

    def _look(self) -> None:
        waiting = {process.sentinel: process for process in self._others}
        while waiting:
            ready = wait([self._theirs, *waiting])
            if self._theirs in ready:
                return
            ended = [waiting.pop(sentinel) for sentinel in list(waiting) if sentinel in ready]
            for process in ended:
                process.join()  # its files are closed a moment before it has an exit code
            if any(process.exitcode for process in ended):
                for process in self._others:
                    process.kill()


def _follow(
    rank: int,
    size: int,
    place: Path,
    threads: int,
    what: tuple[VideoRequest, EngineOptions, Storage],
) -> None:
    """A follower's process; ends with rank 0's, whatever ends that."""
    request, engine, storage = what
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    configure(threads)
    follow(request, as_rank(engine, rank, size, place), lambda _: storage, ModelCache())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
