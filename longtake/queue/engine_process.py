"""The engine process: waits for work, does one attempt after the other, keeps the model loaded."""

from __future__ import annotations

import faulthandler
import logging
import os
from multiprocessing.connection import Connection
from typing import Any

from longtake.errors import LongtakeError
from longtake.queue.engine import RUN, STOP_AND_KEEP, EngineSettings
from longtake.queue.failures import error_code
from longtake.queue.faults import VARIABLE, Faults
from longtake.queue.messages import EngineMessage, Failed, Ready
from longtake.queue.service_run import Engine, run_work
from longtake.video.memory import release_memory, resident_bytes
from longtake.video.model_cache import ModelCache
from longtake.video.numerics import choose_device, choose_dtype, configure
from longtake.video.options import EngineOptions
from longtake.video.profiles import check_named

FORMAT = "%(asctime)s %(levelname)s engine %(process)d: %(message)s"
log = logging.getLogger(__name__)


class PipeLink:
    """``service_run.Link`` over the pipe and the shared stop value."""

    def __init__(self, pipe: Connection, stop: Any) -> None:
        self._pipe = pipe
        self._stop = stop
        self._held: list[EngineMessage] = []

    def send(self, message: EngineMessage, *, more: bool = False) -> None:
        """Tell the worker; with ``more``, together with the next message, which comes at once.

        Waking the worker costs an engine that computes on the same cores more than the message.
        """
        self._held.append(message)
        if not more:
            held, self._held = self._held, []
            self._pipe.send(held)

    @property
    def stop(self) -> bool:
        """True once the worker asks to stop."""
        return bool(self._stop.value != RUN)

    @property
    def keep(self) -> bool:
        """True if what is finished by then should become a video."""
        return bool(self._stop.value == STOP_AND_KEEP)


def serve(options: EngineSettings, pipe: Connection, stop: Any) -> None:
    """Run until told to leave, or until the worker is gone."""
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    faulthandler.enable()
    link = PipeLink(pipe, stop)
    try:
        engine = _start(options, link)
        while engine is not None and (work := pipe.recv()) is not None:
            outcome = run_work(work, engine, link)
            link.send(outcome)
            release_memory()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        log.info("the worker is gone")


def engine_options(settings: EngineSettings, parallel: str | None = None) -> EngineOptions:
    """How this process generates; ``parallel`` as of the group that it is a rank of."""
    return EngineOptions(
        settings.device,
        settings.dtype,
        settings.backend,
        parallel,
        kv_cache=settings.kv_cache,
        profile=settings.profile,
    )


def _start(options: EngineSettings, link: PipeLink) -> Engine | None:
    """Ready for work, or None after saying why not."""
    configure(options.threads)
    chosen = engine_options(options)
    try:
        device = choose_device(options.device)
        check_named(options.profile, device, choose_dtype(options.dtype, device))
        engine = Engine(chosen, ModelCache(settle=True), Faults(os.environ.get(VARIABLE, "")))
    except LongtakeError as error:
        link.send(Failed(error_code(error), str(error), "starting", None, resident_bytes()))
        return None
    if options.preload is not None:
        engine.preload(options.preload)
    link.send(Ready(os.getpid(), str(device), resident_bytes()))
    return engine
