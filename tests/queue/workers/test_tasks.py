"""Worker processes for real: Celery on an embedded Valkey, the engine process, the tiny model."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from longtake.queue.app import SETTINGS, TICK, make_app
from longtake.queue.broker import EmbeddedBroker
from longtake.queue.records import Job, JobState
from longtake.queue.tasks import add_tick

if TYPE_CHECKING:
    from tests.queue.workers.conftest import RealWorker, Rig

StartWorker = Callable[..., "RealWorker"]
NEVER = "3600"
STOP_S = 60


@pytest.fixture
def broker(tiny: Rig) -> Iterator[EmbeddedBroker]:
    """The tiny rig's broker."""
    broker = EmbeddedBroker(tiny.settings.data_dir, tiny.settings.broker_socket)
    broker.start()
    yield broker
    broker.stop()


def finished(rig: Rig, job: Job) -> Job | None:
    now = rig.job(job.id)
    return now if now.finished else None


def outcomes(rig: Rig, job: Job) -> list[str | None]:
    return [attempt.outcome for attempt in rig.store.listings.attempts(job.id)]


def test_a_killed_engine_and_a_full_memory_cost_what_they_must(
    tiny: Rig, broker: EmbeddedBroker, start_worker: StartWorker, tmp_path: Path
) -> None:
    """Ticks alone wake the worker: it never polls. Step 3 hangs and its engine is killed by hand;
    then the VAE decode of chunk 2 runs out of memory. The video is as if nothing had happened.
    """
    hung, starved = tmp_path / "hung", tmp_path / "starved"
    fault = f"hang-step:3@{hung},oom-decode:2@{starved}"
    worker = start_worker(tiny, fault=fault, poll_s=NEVER, models=models(tiny))
    job = tiny.ask()
    tiny.until(hung.exists, worker.process)
    engine = worker.engine()
    engine.kill()
    done = tiny.until(lambda: finished(tiny, job), worker.process)
    assert (done.state, done.error) == (JobState.COMPLETED, None)
    assert outcomes(tiny, job) == ["engine_killed", "out_of_memory", "completed"]
    assert starved.exists()
    assert not engine.is_running()
    assert worker.process.poll() is None
    fences = [
        (str(chunk.latents_key).split("/")[2], str(chunk.segment_key).split("/")[2])
        for chunk in tiny.store.listings.chunks(job.id)
    ]
    assert fences[:3] == [("1", "1"), ("2", "2"), ("2", "3")]

    undisturbed = tiny.ask()
    tiny.until(lambda: finished(tiny, undisturbed), worker.process)
    assert outcomes(tiny, undisturbed) == ["completed"]
    assert tiny.pixels(job) == tiny.pixels(undisturbed)


def test_a_stopped_and_then_killed_worker_lose_nothing(
    tiny: Rig, broker: EmbeddedBroker, start_worker: StartWorker
) -> None:
    """SIGTERM gives the job back within a step; SIGKILL takes the engine along; each next worker
    goes on at once, though the lease would have lasted.
    """
    first = start_worker(tiny, models=models(tiny), poll_s="0.2")
    job = tiny.ask(num_frames=97)
    tiny.until(lambda: tiny.job(job.id).chunks_done >= 1, first.process)
    engine = first.engine()
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(STOP_S) == 0
    stopped = tiny.job(job.id)
    assert (stopped.state, stopped.attempt) == (JobState.QUEUED, 0)
    assert not engine.is_running()
    assert tiny.store.workers.list() == []

    second = start_worker(tiny, models=models(tiny), poll_s="0.2")
    tiny.until(lambda: tiny.job(job.id).chunks_done > stopped.chunks_done, second.process)
    engine = second.engine()
    second.process.kill()
    second.process.wait()
    psutil.wait_procs([engine], timeout=STOP_S)
    assert not engine.is_running()
    assert tiny.job(job.id).state is JobState.RUNNING

    third = start_worker(tiny, models=models(tiny), poll_s="0.2", reconcile_s="0.2")
    done = tiny.until(lambda: finished(tiny, job), third.process)
    assert done.state is JobState.COMPLETED
    assert outcomes(tiny, job) == ["preempted", "lost", "completed"]
    undisturbed = tiny.ask(num_frames=97)
    tiny.until(lambda: finished(tiny, undisturbed), third.process)
    assert tiny.pixels(job) == tiny.pixels(undisturbed)


def test_cancel_and_an_absent_broker(tiny: Rig, start_worker: StartWorker) -> None:
    """Without a broker a job is found by polling and cancelled by the row; the worker stops."""
    worker = start_worker(tiny, models=models(tiny), poll_s="0.2")
    [job] = [tiny.submit(**new(tiny))]
    tiny.until(lambda: tiny.job(job.id).chunks_done >= 1, worker.process)
    tiny.store.submissions.cancel(job.id, "local", keep_chunks=True)
    done = tiny.until(lambda: finished(tiny, job), worker.process)
    assert (done.state, done.chunks_done > 0) == (JobState.CANCELLED, True)
    assert len(tiny.pixels(job)) > 0
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(STOP_S) == 0


def test_the_settings_that_matter(rig: Rig) -> None:
    app = make_app(rig.settings.broker)
    add_tick(app, None)  # type: ignore[arg-type]
    assert TICK in app.tasks
    conf = app.conf
    assert (conf.worker_pool, conf.worker_concurrency) == ("threads", 1)
    assert (conf.task_acks_late, conf.worker_disable_prefetch) == (False, True)
    assert (conf.result_backend, conf.task_ignore_result) == (None, True)
    assert conf.accept_content == ["json"]
    assert conf.broker_transport_options["visibility_timeout"] == 86_400
    assert conf.broker_transport_options["global_keyprefix"] == "longtake:"
    assert set(SETTINGS) <= set(dict(conf.items()))


def models(rig: Rig) -> str:
    """The variable that names the rig's models."""
    return '["' + '", "'.join(rig.settings.models) + '"]'


def new(rig: Rig) -> dict[str, object]:
    """A long job of the tiny model, made without a tick."""
    from longtake.queue.client import Client

    made = Client(rig.store, rig.settings).new_job(
        {"prompt": "a red ball", "seed": 7, "num_frames": 193}
    )
    return {"request": made.request, "plan": made.plan, "model": made.model}
