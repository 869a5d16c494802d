"""A worker whose engine is a group of ranks, for real: killed, stopped, cancelled, and gone."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from longtake.queue.client import Client
from longtake.queue.records import ArtifactKind, Job, JobState
from longtake.video.generate import Target, generate
from longtake.video.options import EngineOptions, Storage
from longtake.video.request import request_from_mapping

if TYPE_CHECKING:
    from tests.queue.workers.conftest import RealWorker, Rig

StartWorker = Callable[..., "RealWorker"]
LIMIT_S = "6"
STOP_S = 60
# 9 chunks of 4 steps: long enough that a rank can be stopped in the middle
REQUEST: dict[str, Any] = {
    "prompt": "a red ball",
    "seed": 7,
    "num_frames": 65,
    "num_inference_steps": 4,
    "attention": "window+chunked:9",
}
# of a video over two ranks against one: most in latents, and the mean of the file's pixels in steps
# of a byte (the encoder enlarges single ones)
LATENTS, PIXELS = 1e-5, 0.05


@pytest.mark.timeout(1200)
def test_ranks_are_lost_and_the_video_is_as_if_nothing_had_been(
    tiny: Rig, start_worker: StartWorker, tmp_path: Path
) -> None:
    """SIGKILL of rank 1 in a step, then SIGSTOP of the next rank 1; then a cancel, and SIGTERM.

    Rank 0 is held in a step for the first, so that nothing is a matter of time.
    """
    hung = tmp_path / "hung"
    worker = start_worker(
        tiny,
        models=json.dumps(tiny.settings.models),
        parallel="ulysses=2",
        threads="1",
        fault=f"hang-step:6@{hung}",
        poll_s="0.1",
        step_limit_s=LIMIT_S,
        decode_limit_s=LIMIT_S,
    )
    job = ask(tiny)
    tiny.until(hung.exists, worker.process)
    first = ranks_of(worker)
    first[1].kill()

    tiny.until(lambda: tiny.job(job.id).chunks_done >= 3, worker.process)
    second = ranks_of(worker)
    second[1].send_signal(signal.SIGSTOP)
    done = tiny.until(lambda: finished(tiny, job), worker.process)
    assert (done.state, done.error) == (JobState.COMPLETED, None)
    attempts = tiny.store.listings.attempts(job.id)
    assert [a.outcome for a in attempts] == ["engine_killed", "timeout", "completed"]
    assert f"took longer than {LIMIT_S} s" in str(attempts[1].error)
    assert not any(rank.is_running() for rank in first + second)
    assert equals_one_rank(tiny, job, tmp_path)

    undisturbed = ask(tiny)
    tiny.until(lambda: finished(tiny, undisturbed), worker.process)
    assert tiny.pixels(job) == tiny.pixels(undisturbed)
    assert latents_of(tiny, job).equal(latents_of(tiny, undisturbed))

    third = ranks_of(worker)
    cancelled = ask(tiny)
    tiny.until(lambda: tiny.job(cancelled.id).chunks_done >= 1, worker.process)
    tiny.store.submissions.cancel(cancelled.id, "local", keep_chunks=True)
    ended = tiny.until(lambda: finished(tiny, cancelled), worker.process)
    assert ended.state is JobState.CANCELLED
    assert tiny.pixels(undisturbed).startswith(tiny.pixels(cancelled))
    # all have left that attempt: the same ranks make the next video
    again = ask(tiny, num_frames=9)
    assert tiny.until(lambda: finished(tiny, again), worker.process).state is JobState.COMPLETED
    assert ranks_of(worker) == third

    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(STOP_S) == 0
    assert not any(rank.is_running() for rank in third)


def ask(rig: Rig, **changes: Any) -> Job:
    """A queued job, found by polling."""
    new = Client(rig.store, rig.settings).new_job(REQUEST | changes)
    [job] = rig.store.submissions.submit([new], {})
    return job


def finished(rig: Rig, job: Job) -> Job | None:
    now = rig.job(job.id)
    return now if now.finished else None


def ranks_of(worker: RealWorker) -> list[psutil.Process]:
    """The group's processes, rank 0 first."""
    leader = worker.engine()
    children = psutil.Process(worker.process.pid).children()
    others = [p for p in children if p != leader and "spawn_main" in " ".join(p.cmdline())]
    assert len(others) == 1
    return [leader, *others]


def latents_of(rig: Rig, job: Job) -> torch.Tensor:
    """All stored latents of a job."""
    paths = [
        rig.artifacts.local_path(file.key)
        for file in rig.store.files.of_job(job.id, ArtifactKind.LATENTS)
    ]
    files = sorted((path for path in paths if path is not None), key=lambda path: path.name)
    return torch.cat([load_file(file)["latents"] for file in files], 2)


def equals_one_rank(rig: Rig, job: Job, folder: Path) -> bool:
    """What ``longtake generate`` makes in this process, within the stated tolerances."""
    request = request_from_mapping(job.request)
    storage, target = Storage(keep=folder / "alone"), folder / "alone.mp4"
    generate(request, Target(target), EngineOptions("cpu"), storage=storage)
    files = sorted((folder / "alone").glob("chunk-*"))
    alone = torch.cat([load_file(file)["latents"] for file in files], 2)
    assert (latents_of(rig, job) - alone).abs().max() <= LATENTS
    with av.open(str(target)) as video:
        expected = b"".join(f.to_ndarray(format="rgb24").tobytes() for f in video.decode(video=0))
    found, alone_pixels = (
        np.frombuffer(data, np.uint8).astype(np.int16) for data in (rig.pixels(job), expected)
    )
    assert np.abs(found - alone_pixels).mean() <= PIXELS
    return True
