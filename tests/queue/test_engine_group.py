"""An engine group of real processes: equal to one process, fail-stop, cancel, nothing left over."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from longtake.errors import RequestError
from longtake.queue.admission import check_ranks
from longtake.queue.engine import EngineDied, EngineProcess, EngineSettings
from longtake.queue.engine_group import EngineGroup, group_size, make_engine
from longtake.queue.messages import (
    ChunkDone,
    EngineMessage,
    Failed,
    Finished,
    Planned,
    StepStarted,
    Stopped,
    Work,
)
from longtake.queue.records import ArtifactKind
from longtake.settings import Settings
from longtake.video.options import EngineOptions
from longtake.video.parallel_launch import ranks_for
from longtake.video.parallel_layout import usable_cores
from longtake.video.prepare import plan_request
from longtake.video.request import VideoRequest

MakeModel = Callable[..., Path]
LIMIT_S = 400.0
FRAMES = 33


@pytest.fixture
def group() -> Iterator[EngineGroup]:
    """Two ranks on the CPU; killed whatever happens."""
    settings = EngineSettings(device="cpu", threads=1, start_limit_s=LIMIT_S, kv_cache="bf16")
    made = EngineGroup(settings, "ulysses=2", 2)
    try:
        yield made
    finally:
        made.kill()


def work_for(model: Path, folder: Path, fence: int = 1, **changes: Any) -> Work:
    """A video of five chunks."""
    folder.mkdir(parents=True, exist_ok=True)
    request = {"prompt": "a red ball", "model": str(model), "num_frames": FRAMES, "seed": 3}
    return Work("video_x", fence, {**request, **changes}, folder)


def listen(group: EngineGroup, until: Callable[[EngineMessage], bool]) -> list[EngineMessage]:
    """Messages up to the first that is wanted."""
    heard: list[EngineMessage] = []
    deadline = monotonic() + LIMIT_S
    while monotonic() < deadline:
        message = group.receive(1.0)
        if message is not None:
            heard.append(message)
            if until(message):
                return heard
    pytest.fail(f"not heard; last: {heard[-3:]}")


def ended(message: EngineMessage) -> bool:
    """The last message of an attempt."""
    return isinstance(message, Finished | Stopped | Failed)


def latents_of(folder: Path) -> dict[str, bytes]:
    """Stored latents by name: the numbers, since a file's header has no fixed order."""
    files = sorted((folder / "latents").glob("chunk*"))
    return {file.name: load_file(file)["latents"].numpy().tobytes() for file in files}


def is_step(chunk: int) -> Callable[[EngineMessage], bool]:
    """A step of this chunk begins."""
    return lambda message: isinstance(message, StepStarted) and message.chunk == chunk


@pytest.mark.timeout(1200)
def test_whole_life(group: EngineGroup, make_model: MakeModel, tmp_path: Path) -> None:
    """Done; refused; stopped and kept; killed and resumed; in one go, since starts are slow.

    Each part fails by its own message. A rank that hangs: ``workers/test_ranks.py``.
    """
    model = make_model()
    ready = group.start()
    assert ready.pid == group.pids[0]
    assert len(set(group.pids)) == 2

    whole = tmp_path / "whole"
    group.send(work_for(model, whole))
    heard = listen(group, ended)
    assert isinstance(heard[-1], Finished), heard[-1]
    assert heard[-1].frames == FRAMES
    assert next(m for m in heard if isinstance(m, Planned)).plan["kv_cache"] == "bf16"
    kinds = [file.kind for file in heard[-1].files]
    assert ArtifactKind.VIDEO in kinds
    assert sum(isinstance(message, ChunkDone) for message in heard) == 5
    expected = latents_of(whole)
    assert len(expected) == 5

    _refused_by_name(group, model, tmp_path)
    _all_leave_at_the_same_step(group, model, tmp_path, expected)
    _a_killed_rank_ends_all(group, model, tmp_path, expected)
    _nothing_is_left(group, model, tmp_path)


def _refused_by_name(group: EngineGroup, model: Path, tmp_path: Path) -> None:
    """What a layout cannot do comes from every rank, and the group goes on."""
    pids = group.pids
    group.send(work_for(model, tmp_path / "refused", num_frames=32))
    message = listen(group, ended)[-1]
    assert isinstance(message, Failed)
    assert message.field == "num_frames"
    assert not message.broken
    assert group.alive
    assert group.pids == pids


def _all_leave_at_the_same_step(
    group: EngineGroup, model: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """Asked to stop in a chunk: every rank is through, finished chunks are whole, all still run."""
    folder = tmp_path / "stopped"
    group.send(work_for(model, folder))
    listen(group, is_step(2))
    group.ask_stop(keep=True)
    message = listen(group, ended)[-1]
    assert isinstance(message, Stopped), message
    assert message.frames in (13, 21, 29)
    assert group.alive
    stored = latents_of(folder)
    assert stored == {name: expected[name] for name in stored}


def _a_killed_rank_ends_all(
    group: EngineGroup, model: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """SIGKILL of rank 1 in a step; a new group goes on from what was stored: same bytes."""
    folder = tmp_path / "killed"
    group.send(work_for(model, folder))
    listen(group, is_step(2))
    before = group.pids
    os.kill(before[1], signal.SIGKILL)
    with pytest.raises(EngineDied):
        listen(group, ended)
    assert not group.alive
    assert not any(psutil.pid_exists(pid) for pid in before)
    group.start()
    assert not set(group.pids) & set(before)
    again = tmp_path / "again"
    shutil.copytree(folder / "latents", again / "latents")
    group.send(work_for(model, again, fence=2))
    heard = listen(group, ended)
    assert isinstance(heard[-1], Finished), heard[-1]
    assert any(message.reused for message in heard if isinstance(message, ChunkDone))
    assert latents_of(again) == expected


def _nothing_is_left(group: EngineGroup, model: Path, tmp_path: Path) -> None:
    """Killed in the middle of work, a stopped rank as well."""
    group.send(work_for(model, tmp_path / "hung"))
    listen(group, is_step(1))
    pids = group.pids
    os.kill(pids[1], signal.SIGSTOP)
    assert group.alive
    group.kill()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(EngineDied):
        group.send(work_for(model, tmp_path / "after"))


@pytest.mark.parametrize("parallel", [None, "auto", "ulysses=1"])
def test_one_gpu_that_is_named_is_the_engines_own(parallel: str | None) -> None:
    engine = make_engine(Settings(gpus=("3",), parallel=parallel))
    assert type(engine) is EngineProcess
    assert engine.options.device == "cuda"
    assert engine.options.environment["CUDA_VISIBLE_DEVICES"] == "3"
    with pytest.raises(RequestError, match="device='cpu'"):
        make_engine(Settings(gpus=("3",), parallel=parallel, device="cpu"))


def with_cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A machine with so many cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


@pytest.mark.parametrize(
    ("cores", "changes", "ranks"),
    [
        (1, {}, 1),
        (3, {}, 3),
        (64, {}, 4),  # rows of the latents
        (64, {"size": [40, 24]}, 6),
        (2, {"guidance_scale": 2.0}, 2),
    ],
)
def test_auto_has_as_many_ranks_as_can_share_the_default_model(
    make_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    changes: dict[str, Any],
    ranks: int,
) -> None:
    """Those that ``generate`` takes, and the model's own video is not refused."""
    with_cores(monkeypatch, cores)
    model = str(make_model(**changes))
    settings = Settings(parallel="auto", default_model=model)
    assert group_size(settings) == ranks
    request = VideoRequest(prompt="a red ball", model=model)
    assert ranks_for(EngineOptions("cpu", parallel="auto"), request) == ranks
    check_ranks(plan_request(request, EngineOptions("cpu"), probe=False), settings)
    engine = make_engine(settings)
    assert isinstance(engine, EngineGroup) == (ranks > 1)


def test_gpus_that_cannot_share_the_default_model_stay_idle(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(make_model())
    engine = make_engine(Settings(gpus=tuple("abcdef"), default_model=model))
    assert isinstance(engine, EngineGroup)
    assert (engine._size, engine._gpus) == (4, tuple("abcd"))
    assert "GPUs e, f stay idle: 4 can share the default model" in caplog.text


def test_a_model_that_is_not_there_yet_has_one_rank_a_device(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Asked again once it is."""
    with_cores(monkeypatch, 5)
    assert group_size(Settings(parallel="auto", default_model="nobody/nothing-1.3b")) == 5
    later = Settings(parallel="auto", default_model=str(tmp_path / "later"))
    assert group_size(later) == 5
    make_model("later")
    assert group_size(later) == 4


def test_the_number_of_ranks_takes_no_torch() -> None:
    code = (
        "import sys; from longtake.queue.engine_group import group_size; "
        "from longtake.settings import Settings; group_size(Settings(parallel='auto')); "
        "sys.exit('torch' in sys.modules or 'longtake.queue.catalogue' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cores_are_counted_where_the_system_does_not_say_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_cores(monkeypatch, 7)
    assert usable_cores() == 7
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert usable_cores() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1
