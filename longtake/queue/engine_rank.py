"""One rank's process of an engine group: rank 0 works as an engine does, the others follow."""

from __future__ import annotations

import faulthandler
import logging
import os
from multiprocessing.connection import Connection
from typing import Any

from longtake.errors import LongtakeError
from longtake.queue.attempt_folder import AttemptFolder
from longtake.queue.engine import EngineSettings
from longtake.queue.engine_group import Seat, Through
from longtake.queue.engine_process import FORMAT, PipeLink, engine_options
from longtake.queue.failures import error_code
from longtake.queue.faults import VARIABLE, Faults
from longtake.queue.messages import Failed, Ready, Work
from longtake.queue.service_run import Engine, run_work
from longtake.video.memory import release_memory, resident_bytes
from longtake.video.model_cache import ModelCache
from longtake.video.numerics import configure
from longtake.video.options import Storage
from longtake.video.parallel_follow import follow
from longtake.video.parallel_groups import Limits, Ranks
from longtake.video.parallel_launch import as_rank
from longtake.video.parallel_layout import usable_cores
from longtake.video.request import request_from_mapping

log = logging.getLogger(__name__)


def serve(options: EngineSettings, seat: Seat, pipe: Connection, stop: Any) -> None:
    """Run until told to leave, or until the worker is gone."""
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    faulthandler.enable()
    link = PipeLink(pipe, stop)
    try:
        engine = _start(options, seat, pipe)
        ranks = engine.options.ranks if engine is not None else None
        while engine is not None and ranks is not None and (work := pipe.recv()) is not None:
            if ranks.leader:
                outcome = run_work(work, engine, link)
                release_memory()
                link.send(outcome)
                ranks.leave()
            else:
                pipe.send(_follow(work, engine, ranks))
                release_memory()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        log.info("the worker is gone")
    # no destructors: a group whose other ranks were killed could be waited for
    logging.shutdown()
    os._exit(0)


def _start(options: EngineSettings, seat: Seat, pipe: Connection) -> Engine | None:
    """Ready for work with all the others, or None after saying why not."""
    share = max(1, usable_cores() // seat.size)
    configure(options.threads or share)
    chosen = engine_options(options, seat.parallel)
    limits = Limits(options.start_limit_s, options.data_limit_s, options.control_limit_s)
    # a group's processes each see one CUDA device, or all of them
    local = 0 if "CUDA_VISIBLE_DEVICES" in options.environment else seat.rank
    try:
        joined = as_rank(chosen, seat.rank, seat.size, seat.place, local=local, limits=limits)
        engine = Engine(joined, ModelCache(settle=True), Faults(os.environ.get(VARIABLE, "")))
    except LongtakeError as error:
        pipe.send(Failed(error_code(error), str(error), "starting", None, resident_bytes()))
        return None
    if options.preload is not None:
        engine.preload(options.preload)
    pipe.send(Ready(os.getpid(), str(joined.device), resident_bytes()))
    return engine


def _follow(work: Work, engine: Engine, ranks: Ranks) -> Through:
    latents = AttemptFolder(work.folder).latents

    def storage(stored: int) -> Storage:
        return Storage(resume=latents) if stored else Storage(keep=latents)

    try:
        follow(request_from_mapping(work.request), engine.options, storage, engine.models)
    except Exception as error:  # whatever it is, this rank alone has it: the group is done for
        log.exception("rank %d failed", ranks.rank)
        return Through(f"{type(error).__name__}: {error}")
    return Through()
