"""One attempt: what is committed, what ends it, and what is left behind."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from longtake.errors import ServiceError
from longtake.queue.held import Renewal
from longtake.queue.messages import (
    ChunkDone,
    EngineMessage,
    File,
    Finished,
    LatentsStored,
    Pictured,
    Planned,
    Stage,
    StepDone,
    StepStarted,
)
from longtake.queue.outcomes import Outcome, Stop
from longtake.queue.records import Artifact, ArtifactKind, ErrorCode, JobState
from longtake.queue.tracker import Tracker
from longtake.settings import Settings

if TYPE_CHECKING:
    from tests.queue.workers.conftest import Rig, ScriptedEngine

Hook = Callable[[EngineMessage, "ScriptedEngine"], EngineMessage | None]


def at(kind: type, act: Callable[[ScriptedEngine], EngineMessage | None], **fields: int) -> Hook:
    """Act once, before the first message of a kind (and chunk, and step) reaches the runner.

    A message that ``act`` returns takes its place, and ends the script.
    """
    left = [act]

    def hook(message: EngineMessage, engine: ScriptedEngine) -> EngineMessage | None:
        same = all(getattr(message, name, None) == value for name, value in fields.items())
        if left and isinstance(message, kind) and same:
            other = left.pop()(engine)
            if other is not None:
                engine._script = None
                return other
        return message

    return hook


def says(message: EngineMessage, _: ScriptedEngine) -> EngineMessage:
    """The engine's last word."""
    return message


def hanging(kind: type, act: Callable[[], Any] = lambda: None) -> Hook:
    """From the first message of a kind on, no message reaches the runner; ``act`` once."""
    hung: list[bool] = []

    def hook(message: EngineMessage, _: ScriptedEngine) -> EngineMessage | None:
        if isinstance(message, kind) and not hung:
            hung.append(True)
            act()
        return None if hung else message

    return hook


def test_an_attempt_stores_every_chunk_and_one_result(rig: Rig) -> None:
    ran = rig.run()
    job = rig.job()
    assert ran.outcome is Outcome.COMPLETED
    assert (job.state, job.chunks_done, job.attempt) == (JobState.COMPLETED, 3, 1)
    assert job.progress["phase"] == "finishing"
    assert job.progress["chunk"] == job.progress["chunks"] == 3
    root = f"jobs/{job.id}/1"
    assert f"{root}/video.mp4" in rig.keys(job)
    assert rig.files() == rig.keys(job)
    told = rig.told(job)
    assert told[0] == "queued"
    assert told[-1] == "completed"
    assert [one for one in told if one == "chunk"] == ["chunk"] * 3


def test_a_picture_of_an_unfinished_chunk_takes_the_place_of_the_one_before(rig: Rig) -> None:
    def picture(message: EngineMessage, engine: ScriptedEngine) -> EngineMessage:
        if not isinstance(message, StepDone):
            return message
        path = engine.works[-1].folder / "previews" / f"preview-{len(engine.done)}"
        return Pictured(rig.write(path, ArtifactKind.PREVIEW))

    assert rig.run(picture).outcome is Outcome.COMPLETED
    job = rig.job()
    kept = rig.store.files.of_job(job.id, ArtifactKind.PREVIEW)
    assert len(kept) == 1
    assert rig.engine.done.count("Pictured") == 6
    assert kept[0].key in rig.keys(job)


def test_a_stop_releases_the_job_and_the_next_attempt_goes_on(rig: Rig) -> None:
    def shut_down(_: ScriptedEngine) -> None:
        runner.stop(Stop.SHUTDOWN)

    engine = rig.engine
    engine.before = at(StepDone, shut_down, chunk=1, step=1)
    rig.submit()
    runner = rig.runner()
    assert runner.run(rig.claim()).outcome is Outcome.REQUEUED
    assert engine.done[-2:] == ["StepDone 1 1", "Stopped"]
    job = rig.job()
    assert (job.state, job.chunks_done, job.attempt) == (JobState.QUEUED, 1, 0)
    assert rig.files() == rig.keys(job)

    assert rig.run().outcome is Outcome.COMPLETED
    started = [one for one in rig.engine.done if one.startswith("StepStarted")]
    assert started == ["StepStarted 1 0", "StepStarted 1 1", "StepStarted 2 0", "StepStarted 2 1"]
    assert [one for one in rig.engine.done if one.startswith("LatentsStored")] == [
        "LatentsStored 1",
        "LatentsStored 2",
    ]
    done = rig.job()
    assert (done.fence, done.attempt, done.chunks_done) == (2, 1, 3)
    segments = [one.key for one in rig.store.files.of_job(job.id, ArtifactKind.SEGMENT)]
    assert sorted(key.split("/")[2] for key in segments) == ["1", "2", "2"]


def test_decode_out_of_memory_redoes_only_the_decode(rig: Rig) -> None:
    def fail(engine: ScriptedEngine) -> EngineMessage:
        return rig.failed(ErrorCode.OUT_OF_MEMORY, stage="decoding", chunk=1)

    ran = rig.run(at(ChunkDone, fail, chunk=1))
    assert (ran.outcome, ran.replace) == (Outcome.REQUEUED, False)
    rig.after(seconds=5)
    assert rig.run().outcome is Outcome.COMPLETED
    done = rig.engine.done
    assert "StepStarted 1 0" not in done
    assert done.index("ChunkDone 1") < done.index("StepStarted 2 0")


def test_out_of_memory_twice_at_one_chunk_fails_the_job(rig: Rig) -> None:
    def fail(engine: ScriptedEngine) -> EngineMessage:
        return rig.failed(ErrorCode.OUT_OF_MEMORY, stage="decoding", chunk=1)

    assert rig.run(at(ChunkDone, fail, chunk=1)).outcome is Outcome.REQUEUED
    assert rig.run(at(ChunkDone, fail, chunk=1)).outcome is Outcome.FAILED
    job = rig.job()
    assert job.error is not None
    assert job.error["code"] == "out_of_memory"
    rig.store.submissions.retry(job.id, "local")
    assert rig.run().outcome is Outcome.COMPLETED


def test_out_of_memory_at_another_chunk_is_tried_again(rig: Rig) -> None:
    for chunk in (0, 1, 2):
        fail = partial(says, rig.failed(ErrorCode.OUT_OF_MEMORY, stage="decoding", chunk=chunk))
        ran = rig.run(at(ChunkDone, fail, chunk=chunk))
        assert ran.outcome is Outcome.REQUEUED
    assert rig.run().outcome is Outcome.COMPLETED


def test_an_engine_that_dies_in_a_step_again_and_again_is_poison(rig: Rig) -> None:
    rig.submit()
    for outcome in (Outcome.REQUEUED, Outcome.REQUEUED, Outcome.FAILED):
        rig.after(seconds=5)
        ran = rig.run(at(StepDone, lambda engine: engine.die(-signal.SIGSEGV), chunk=1))
        assert (ran.outcome, ran.replace) == (outcome, True)
    job = rig.job()
    assert job.error is not None
    assert job.error["code"] == "poison"
    assert job.strikes == 2


def test_a_chunk_between_deaths_takes_the_strikes_back(rig: Rig) -> None:
    rig.submit()
    for chunk in (1, 1, 2, 2):
        rig.after(seconds=5)
        ran = rig.run(at(StepDone, lambda engine: engine.die(-signal.SIGSEGV), chunk=chunk))
        assert ran.outcome is Outcome.REQUEUED
    rig.after(seconds=5)
    assert rig.run().outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [(StepDone, -signal.SIGKILL), (ChunkDone, -signal.SIGSEGV), (Stage, 1)],
    ids=["killed from outside", "in the decode", "before the first step"],
)
def test_deaths_that_are_no_strikes(rig: Rig, kind: type, exit_code: int) -> None:
    ran = rig.run(at(kind, lambda engine: engine.die(exit_code)))
    assert ran.outcome is Outcome.REQUEUED
    assert (rig.job().strikes, rig.job().attempt) == (0, 1)


def test_tries_without_progress_are_used_up(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_attempts=2, retry_delay_s=0)
    assert rig.run(at(Stage, lambda engine: engine.die(1))).outcome is Outcome.REQUEUED
    assert rig.run(at(Stage, lambda engine: engine.die(1))).outcome is Outcome.FAILED
    error = rig.job().error
    assert error is not None
    assert error["code"] == "internal_error"


def test_tries_that_store_a_chunk_do_not_count(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_attempts=2, retry_delay_s=0)
    for chunk in (1, 2):
        ran = rig.run(at(ChunkDone, lambda engine: engine.die(1), chunk=chunk))
        assert ran.outcome is Outcome.REQUEUED
    assert rig.run().outcome is Outcome.COMPLETED


def test_a_silent_engine_is_killed_and_the_job_tried_again(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(step_limit_s=0.05)

    ran = rig.run(hanging(StepDone))
    assert (ran.outcome, ran.replace, rig.engine.killed) == (Outcome.REQUEUED, True, True)
    [attempt] = rig.store.listings.attempts(rig.job().id)
    assert attempt.outcome == "timeout"
    assert attempt.error is not None
    assert attempt.error["code"] == "timeout"


@pytest.mark.parametrize("code", [ErrorCode.INVALID_REQUEST, ErrorCode.MODEL_ERROR])
def test_what_cannot_succeed_is_not_tried_again(rig: Rig, code: ErrorCode) -> None:
    message = rig.failed(code, "size=3: is too small", stage="planning", field="size")
    ran = rig.run(at(Stage, lambda _: message))
    assert ran.outcome is Outcome.FAILED
    error = rig.job().error
    assert error == {"code": code.value, "message": "size=3: is too small", "param": "size"}


def test_a_worker_without_a_device_burns_no_tries(rig: Rig) -> None:
    message = rig.failed(ErrorCode.MODEL_ERROR, "no device", stage="loading", broken=True)
    ran = rig.run(at(Stage, lambda _: message))
    assert (ran.outcome, ran.broken, ran.replace) == (Outcome.REQUEUED, "no device", True)
    assert (rig.job().attempt, rig.job().state) == (0, JobState.QUEUED)


def test_cancel_stops_before_the_next_step(rig: Rig) -> None:
    def cancel(engine: ScriptedEngine) -> None:
        rig.store.submissions.cancel(rig.job().id, "local")
        runner.nudge(rig.job().id)
        assert engine.stop_asked.wait(10)

    rig.submit()
    rig.engine.before = at(StepDone, cancel, chunk=1, step=1)
    runner = rig.runner()
    assert runner.run(rig.claim()).outcome is Outcome.CANCELLED
    assert rig.engine.done[-2:] == ["StepDone 1 1", "Stopped"]
    job = rig.job()
    assert (job.state, job.chunks_done) == (JobState.CANCELLED, 0)
    assert rig.told(job)[-2:] == ["cancelling", "cancelled"]


def test_cancel_keeps_finished_chunks_if_asked(rig: Rig) -> None:
    def cancel(engine: ScriptedEngine) -> None:
        rig.store.submissions.cancel(rig.job().id, "local", keep_chunks=True)
        assert engine.stop_asked.wait(10)

    assert rig.run(at(StepDone, cancel, chunk=1, step=1)).outcome is Outcome.CANCELLED
    job = rig.job()
    assert (job.state, job.chunks_done) == (JobState.CANCELLED, 1)
    [video] = rig.store.files.of_job(job.id, ArtifactKind.VIDEO)
    assert video.key in rig.files()


@pytest.mark.parametrize("keep", [True, False])
def test_a_chunk_that_was_not_decoded_is_kept_with_the_others(rig: Rig, keep: bool) -> None:
    def cancel(engine: ScriptedEngine) -> None:
        rig.store.submissions.cancel(rig.job().id, "local", keep_chunks=keep)
        assert engine.stop_asked.wait(10)

    assert rig.run(at(LatentsStored, cancel, chunk=1)).outcome is Outcome.CANCELLED
    chunks = rig.store.listings.chunks(rig.job().id)
    assert [(c.index, c.frames) for c in chunks] == ([(0, 12), (1, 0)] if keep else [])
    assert rig.files() == rig.keys(rig.job())
    rig.store.submissions.retry(rig.job().id, "local")
    assert rig.run().outcome is Outcome.COMPLETED
    made = [one for one in rig.engine.done if one.startswith("LatentsStored")]
    assert made == [f"LatentsStored {chunk}" for chunk in range(2 if keep else 0, 3)]


def test_latents_outlive_a_segment_that_cannot_be_stored(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, failures = rig.artifacts.publish, iter([OSError("away for a moment")])

    def fails_once(folder: Path, files: Sequence[File], owner: str) -> list[Artifact]:
        if any(file.path.name == "segment-1" for file in files):
            for error in failures:
                raise error
        return publish(folder, files, owner)

    monkeypatch.setattr(rig.artifacts, "publish", fails_once)
    assert rig.run().outcome is Outcome.REQUEUED
    chunks = rig.store.listings.chunks(rig.job().id)
    assert [(c.index, c.frames) for c in chunks] == [(0, 12), (1, 0)]


def test_what_nobody_foresaw_quiets_the_engine_and_replaces_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("what is this")

    monkeypatch.setattr(rig.artifacts, "publish", broken)
    ran = rig.run()
    assert (ran.outcome, ran.replace) == (Outcome.LOST, True)
    assert rig.engine.stop_asked.is_set()


def test_a_lease_outlives_a_database_that_is_away(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, away = rig.store.held.look, threading.Event()

    def look_once(job_id: str, fence: int) -> Renewal:
        if not away.is_set():
            away.set()
            raise ServiceError("the database does not answer")
        return look(job_id, fence)

    def cancel(engine: ScriptedEngine) -> None:
        assert away.wait(10)
        rig.store.submissions.cancel(rig.job().id, "local")
        assert engine.stop_asked.wait(10)

    monkeypatch.setattr(rig.store.held, "look", look_once)
    assert rig.run(at(StepDone, cancel, chunk=1, step=1)).outcome is Outcome.CANCELLED


def test_an_engine_that_does_not_stop_is_killed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(stop_grace_s=0.05)

    ran = rig.run(hanging(StepDone, lambda: rig.store.submissions.cancel(rig.job().id, "local")))
    assert (ran.outcome, ran.replace, rig.engine.killed) == (Outcome.CANCELLED, True, True)


def test_a_stale_attempt_commits_nothing_and_leaves_nothing(rig: Rig) -> None:
    """Its lease ran out and another worker took over while it made the last chunk."""

    def lose(_: ScriptedEngine) -> None:
        stale = rig.job()
        other = None
        while other is None:  # the attempt's own thread may renew the lease in between
            rig.store.held.renew(stale.id, stale.fence, -1.0)
            other = rig.store.leases.claim("worker-2", "default", lease_s=rig.settings.lease_s)
        assert other.fence == 2

    ran = rig.run(at(Finished, lose))
    assert ran.outcome is Outcome.LOST
    job = rig.job()
    assert (job.state, job.fence, job.lease_owner) == (JobState.RUNNING, 2, "worker-2")
    assert rig.files() == rig.keys(job)
    assert f"jobs/{job.id}/1/video.mp4" not in rig.files()
    assert job.chunks_done == 3


def test_a_deleted_job_leaves_no_file(rig: Rig) -> None:
    def delete(engine: ScriptedEngine) -> None:
        rig.store.submissions.delete(rig.job().id, "local")
        assert engine.stop_asked.wait(10)

    assert rig.run(at(StepDone, delete, chunk=1)).outcome is Outcome.LOST
    assert rig.files() == []


def test_a_full_disk_counts_no_try(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(_: ScriptedEngine) -> None:
        monkeypatch.setattr(rig.artifacts, "publish", no_space)

    ran = rig.run(at(LatentsStored, fill, chunk=1))
    assert (ran.outcome, ran.disk_full) == (Outcome.REQUEUED, True)
    assert (rig.job().attempt, rig.job().chunks_done) == (0, 1)
    assert rig.engine.stop_asked.is_set()
    monkeypatch.undo()
    assert rig.run().outcome is Outcome.COMPLETED


def test_progress_and_lease_go_on_while_steps_do(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(lease_s=0.4, renew_s=0.05)
    leases: list[float] = []

    def wait(message: EngineMessage, _: ScriptedEngine) -> EngineMessage | None:
        if isinstance(message, StepStarted):
            before = rig.job().lease_until or 0.0
            while (rig.job().lease_until or 0.0) <= before:
                pass
            leases.append(rig.job().lease_until or 0.0)
        return message

    assert rig.run(wait).outcome is Outcome.COMPLETED
    assert leases == sorted(set(leases))
    assert len(leases) == 6
    assert len(rig.store.listings.attempts(rig.job().id)) == 1


def test_a_hanging_engine_loses_its_lease_to_another_worker(make_rig: Callable[..., Rig]) -> None:
    """Renewal ends at the limit of the stage, even if the attempt's own thread hangs as well."""
    rig = make_rig(lease_s=1.0, renew_s=0.02, step_limit_s=0.1)
    taken: list[int] = []

    def hang(message: EngineMessage, _: ScriptedEngine) -> EngineMessage | None:
        if isinstance(message, StepStarted) and not taken:
            claim = partial(rig.store.leases.claim, "worker-2", "default", lease_s=60)
            taken.append(rig.until(claim).fence)
        return message

    assert rig.run(hang).outcome is Outcome.LOST
    assert taken == [2]
    assert rig.job().lease_owner == "worker-2"


def test_inputs_are_local_files(rig: Rig, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"pixels")
    artifact = rig.artifacts.put_input(picture, "local", {"name": "picture.png"})
    rig.store.files.add(artifact)
    rig.submit(request={"prompt": "x", "image": f"input:{artifact.id}"}, inputs=(artifact.id,))
    seen: list[bytes] = []

    def read(engine: ScriptedEngine) -> None:
        seen.append(Path(engine.works[0].request["image"]).read_bytes())

    assert rig.run(at(Stage, read)).outcome is Outcome.COMPLETED
    assert seen == [b"pixels"]
    assert rig.files() == sorted([*rig.keys(rig.job())])


def test_another_videos_latents_are_gone_on_from(rig: Rig) -> None:
    rig.run()
    source = rig.job()
    rig.submit(request={"prompt": "x", "video": f"job:{source.id}"})
    seen: list[list[str]] = []

    def read(engine: ScriptedEngine) -> None:
        seen.append(sorted(path.name for path in Path(engine.works[0].request["video"]).iterdir()))

    assert rig.run(at(Stage, read)).outcome is Outcome.COMPLETED
    assert seen == [["chunk-0", "chunk-1", "chunk-2", "rollout.json"]]


@pytest.mark.parametrize("reference", ["input:file_gone", "job:video_gone", "/etc/passwd"])
def test_what_a_request_starts_from_must_be_there(rig: Rig, reference: str) -> None:
    rig.submit(request={"prompt": "x", "image": reference})
    assert rig.run().outcome is Outcome.FAILED
    error = rig.job().error
    assert error is not None
    assert error["code"] == "invalid_request"
    assert rig.engine.works == []


def test_progress_never_goes_back_while_stored_chunks_are_read_again() -> None:
    tracker = Tracker(Settings(), 2)
    shown = []
    for message in (
        Planned({}, 4, 2),
        Stage("loading", None),
        ChunkDone(0, 9, 9, reused=True, timings={}, files=()),
        ChunkDone(1, 9, 18, reused=True, timings={}, files=()),
        StepStarted(2, 0),
        StepDone(2, 4, 1, 2),
    ):
        tracker.see(message)
        shown.append((tracker.progress["chunk"], tracker.progress["step"]))
    assert shown == [(2, 0)] * 5 + [(2, 1)]
