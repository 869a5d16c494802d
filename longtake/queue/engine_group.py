"""An engine of several processes that make one video together, as ``EngineProcess`` is of one.

Every rank has a pipe of its own to the worker: work goes to all, rank 0 tells what happens, the
others only that they are through. Collectives carry no control but rank 0's stop flag, which all
ranks take in at the same step. Fail-stop: a rank that ends or is unfit, or does not come to its end
soon after another did, costs all of them SIGKILL; ``start`` makes new ones that meet elsewhere. A
rank that hangs makes rank 0 silent, and the worker's limit for that stage kills the group.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from longtake.errors import LongtakeError, ModelError, RequestError, ServiceError
from longtake.queue.engine import (
    KILL_WAIT_S,
    RUN,
    STARTER,
    EngineDied,
    EngineProcess,
    EngineSettings,
    be_engine,
)
from longtake.queue.messages import EngineMessage, Failed, Finished, Ready, Stopped, Work
from longtake.video.parallel_layout import (
    Facts,
    facts_of,
    most_ranks,
    parse_layout,
    usable_cores,
)

if TYPE_CHECKING:
    from longtake.settings import Settings

# between the end of an attempt on one rank and on the last
TOGETHER_S = 15.0
LAST = (Finished, Stopped, Failed)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place: which one of how many, the file in which they meet, and their layout."""

    rank: int
    size: int
    place: Path
    parallel: str


@dataclass(frozen=True, slots=True)
class Through:
    """A rank other than 0 has come to the end of an attempt; ``unfit`` says if it alone failed."""

    unfit: str | None = None


class EngineGroup(EngineProcess):
    """Several engine processes behind the interface of one; ``pid`` is rank 0's.

    Args:
        options: of each process; ``threads`` are those of each.
        parallel: layout, or ``auto``.
        size: how many ranks.
        gpus: CUDA devices, one for each rank; none leaves the ranks to the CPU.
    """

    def __init__(
        self, options: EngineSettings, parallel: str, size: int, gpus: Sequence[str] = ()
    ) -> None:
        super().__init__(options)
        self._parallel, self._size, self._gpus = parallel, size, tuple(gpus)
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder: Path | None = None
        self._waiting: set[int] = set()
        self._last: EngineMessage | None = None
        self._until: float | None = None

    @property
    def alive(self) -> bool:
        """True while every rank runs."""
        ranks = self._ranks
        return bool(ranks) and not wait([process.sentinel for process, _ in ranks], 0.0)

    @property
    def pid(self) -> int | None:
        """Rank 0's process id."""
        return self.pids[0] if self._ranks else None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process, _ in self._ranks]

    def start(self) -> Ready:
        """Start all ranks and wait until they have met.

        Raises:
            ServiceError: one says that it cannot work here, or is not ready in time.
            EngineDied: one ended instead.
        """
        self.kill()
        self._stop = self._context.RawValue("i", RUN)
        self._folder = Path(tempfile.mkdtemp(prefix="longtake-ranks-"))
        self._ranks = [self._spawn(rank, self._folder / "store") for rank in range(self._size)]
        self._last = self._until = None
        until = monotonic() + self.options.start_limit_s
        said: list[Ready] = []
        for process, pipe in self._ranks:
            message = _receive(process, pipe, until - monotonic())
            if not isinstance(message, Ready):
                self.kill()
                if isinstance(message, Failed):
                    raise ServiceError(f"the engine does not start: {message.message}")
                if process.exitcode is not None:
                    raise EngineDied(process.exitcode)
                raise ServiceError("the engine does not start: it was not ready in time")
            said.append(message)
        return replace(said[0], memory_bytes=sum(ready.memory_bytes for ready in said))

    def send(self, work: Work) -> None:
        """Give all ranks an attempt to do.

        Raises:
            EngineDied: one is gone; the others are ended.
        """
        self._stop.value = RUN
        self._waiting = set(range(self._size))
        self._last = self._until = None
        self._heard.clear()
        for process, pipe in self._ranks:
            try:
                pipe.send(work)
            except OSError as error:
                self._fail(process, error)
        if not self._ranks:
            raise EngineDied(None)

    def receive(self, timeout_s: float | None) -> EngineMessage | None:
        """Rank 0's next message, its last one only when every rank is through.

        Raises:
            EngineDied: a rank is gone or unfit; by now all are.
        """
        if not self._ranks:
            raise EngineDied(None)
        until = None if timeout_s is None else monotonic() + timeout_s
        while True:
            if self._heard:
                return self._heard.popleft()
            if self._last is not None and not self._waiting:
                last, self._last = self._last, None
                return last
            limits = [at for at in (until, self._until) if at is not None]
            left = max(0.0, min(limits) - monotonic()) if limits else None
            message = self._look(left)
            if message is not None:
                return message
            if self._until is not None and monotonic() >= self._until and self._waiting:
                return self._too_late()
            if until is not None and monotonic() >= until:
                return None

    def close(self, grace_s: float = 5.0) -> None:
        """Let idle ranks end by themselves; kill those left after ``grace_s``."""
        until = monotonic() + grace_s
        for _, pipe in self._ranks:
            try:
                pipe.send(None)
            except OSError:
                continue
        for process, _ in self._ranks:
            wait([process.sentinel], max(0.0, until - monotonic()))
        self.kill()

    def kill(self) -> None:
        """End all ranks at once, stopped ones too, and wait for their end."""
        with self._lock:
            for process, _ in self._ranks:
                if process.exitcode is None:
                    try:
                        os.killpg(process.pid, signal.SIGKILL)
                    except ProcessLookupError:
                        process.kill()  # it has not made its own group yet
            for process, _ in self._ranks:
                process.join(KILL_WAIT_S)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    def _spawn(self, rank: int, place: Path) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        options = self.options
        if self._gpus:
            visible = {"CUDA_VISIBLE_DEVICES": self._gpus[rank]}
            environment = {**options.environment, **visible}
            options = replace(options, device="cuda", environment=environment)
        seat = Seat(rank, self._size, place, self._parallel)
        process = self._context.Process(
            target=_be_rank,
            args=(options, seat, theirs, self._stop, os.getpid()),
            name=f"longtake-rank-{rank}",
        )
        STARTER.submit(process.start).result()
        theirs.close()
        return process, ours

    def _look(self, timeout_s: float | None) -> EngineMessage | None:
        """Take one message of every rank that has one; rank 0's goes to the worker."""
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        sentinels = {process.sentinel: process for process, _ in self._ranks}
        ready = wait([*pipes, *sentinels], timeout_s)
        gone: tuple[Any, BaseException] | None = None
        for pipe in [item for item in ready if item in pipes]:
            rank = pipes[pipe]
            try:
                told = pipe.recv()
            except (EOFError, OSError) as error:
                gone = gone or (self._ranks[rank][0], error)
                continue
            for message in told if isinstance(told, list) else [told]:
                self._take(rank, message)
        if gone is not None and not self._heard:
            self._fail(*gone)
        if not self._heard:
            for sentinel in [item for item in ready if item in sentinels]:
                self._fail(sentinels[sentinel], None)
        return self._heard.popleft() if self._heard else None

    def _take(self, rank: int, message: Any) -> None:
        """What rank 0 tells goes to the worker, its last message when all are through."""
        if isinstance(message, Through) and message.unfit is not None:
            logger.error("rank %d is unfit: %s", rank, message.unfit)
            self.kill()
            raise EngineDied(None)
        if rank == 0 and not isinstance(message, LAST):
            self._heard.append(message)
            return
        if rank == 0:
            self._last = message
        self._waiting.discard(rank)
        self._until = self._until or monotonic() + TOGETHER_S

    def _too_late(self) -> EngineMessage:
        """Some ranks did not come to the end of the attempt with the others."""
        logger.error("ranks %s did not end with the others", sorted(self._waiting))
        self.kill()
        if isinstance(self._last, Failed):
            return replace(self._last, broken=True)
        if self._last is not None:
            return self._last
        raise EngineDied(None)

    def _fail(self, process: Any, error: BaseException | None) -> None:
        """A rank is gone: so are all."""
        with self._lock:
            # its files are closed a moment before it has an exit code
            process.join(KILL_WAIT_S)
        code = process.exitcode
        self.kill()
        raise EngineDied(code) from error


def make_engine(settings: Settings) -> EngineProcess:
    """One engine process, or with ``parallel`` a group of them.

    Raises:
        RequestError: ``parallel``, ``gpus`` and ``device`` do not go together.
    """
    options = EngineSettings.of(settings)
    size = group_size(settings)
    if idle := settings.gpus[size:]:
        logger.warning("GPUs %s stay idle: %d can share the default model", ", ".join(idle), size)
    if size == 1 and settings.gpus:
        alone = {**options.environment, "CUDA_VISIBLE_DEVICES": settings.gpus[0]}
        return EngineProcess(replace(options, device="cuda", environment=alone))
    if size == 1:
        return EngineProcess(options)
    if not settings.gpus:
        options = replace(options, device="cpu")
    return EngineGroup(options, settings.parallel or "auto", size, settings.gpus[:size])


def group_size(settings: Settings) -> int:
    """How many ranks a worker's engine has: what the layout says, which must fit ``gpus``.

    ``auto`` has one for each of ``gpus``, or for each core without them, but no more than can share
    a video of the default model as it is made where a request says nothing.

    Raises:
        RequestError: ``parallel``, ``gpus`` and ``device`` do not go together.
    """
    gpus = settings.gpus
    if len(set(gpus)) != len(gpus):
        raise RequestError("gpus", ",".join(gpus), "names one twice", "one GPU for each rank")
    if settings.parallel is None and not gpus:
        return 1
    if settings.device not in (None, "cpu" if not gpus else "cuda"):
        reason = "is one device, and every rank has its own"
        raise RequestError("device", settings.device, reason, "gpus=0,1 or device=cpu")
    layout = parse_layout(settings.parallel or "auto")
    if layout is None:
        there = len(gpus) or usable_cores()
        try:
            return most_ranks(there, _default_facts(settings))
        except LongtakeError:
            return there  # it says what is wrong when it is loaded
    if gpus and layout.ranks != len(gpus):
        reason = f"is a layout for {layout.ranks} ranks, there are {len(gpus)} GPUs"
        raise RequestError("parallel", settings.parallel, reason, f"a product of {len(gpus)}")
    return layout.ranks


@lru_cache(maxsize=8)  # an API asks at every submission; what was raised is asked again
def _default_facts(settings: Settings) -> Facts:
    """What ranks would share of a video of the default model.

    Raises:
        LongtakeError: it is not here yet, or not made chunk by chunk.
    """
    from longtake.queue.catalogue import Catalogue
    from longtake.video.plan import make_plan
    from longtake.video.request import VideoRequest

    models = Catalogue(settings)
    name = models.default
    if not models.at_hand(name):
        raise ModelError(f"model {name} is not on this machine yet")
    known = models.find(name)
    if known.source.manifest is None or known.shape is None:
        raise ModelError(f"model {name} has no manifest")
    return facts_of(make_plan(VideoRequest(prompt=name), known.source.manifest, known.shape))


def _receive(process: Any, pipe: Connection, timeout_s: float) -> Any:
    """A rank's next message; None if there was none in time, or it ended."""
    ready = wait([pipe, process.sentinel], max(0.0, timeout_s))
    try:
        if pipe in ready or (ready and pipe.poll(0)):
            return pipe.recv()
    except (EOFError, OSError):
        pass  # the end of what it sent
    if ready:
        process.join(KILL_WAIT_S)
    return None


def _be_rank(options: EngineSettings, seat: Seat, pipe: Connection, stop: Any, parent: int) -> None:
    """First function of a rank's process; names the rest, so that importing this takes no torch."""
    be_engine(options, parent)
    importlib.import_module("longtake.queue.engine_rank").serve(options, seat, pipe, stop)
