"""The engine process, for real: started, fed, stopped, killed, and left alone."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import av
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from longtake.errors import ServiceError
from longtake.queue.engine import EngineDied, EngineProcess, EngineSettings
from longtake.queue.engine_process import PipeLink
from longtake.queue.faults import VARIABLE
from longtake.queue.messages import (
    ChunkDone,
    EngineMessage,
    Failed,
    Finished,
    LatentsStored,
    Planned,
    Ready,
    Stage,
    StepDone,
    StepStarted,
    Stopped,
    Work,
)
from longtake.queue.records import ErrorCode
from longtake.settings import Settings
from longtake.video.generate import Target, generate
from longtake.video.options import EngineOptions
from longtake.video.request import request_from_mapping

Kind = TypeVar("Kind")
MakeModel = Callable[..., Path]
Start = Callable[..., EngineProcess]
PATIENCE_S = 120.0
LAST = (Finished, Stopped, Failed)


@pytest.fixture
def request_of(make_model: MakeModel) -> dict[str, Any]:
    """33 frames in 5 chunks of 2 steps by the tiny model."""
    prompt = "a red ball bouncing over a green meadow"
    return {"prompt": prompt, "seed": 5, "num_frames": 33, "model": str(make_model())}


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engine processes with changes to their settings, and ends them."""
    started: list[EngineProcess] = []

    def begin(faults: str = "", **changes: Any) -> EngineProcess:
        environment = {VARIABLE: faults, "OMP_NUM_THREADS": "1"}
        options = EngineSettings(device="cpu", environment=environment, **changes)
        engine = EngineProcess(options)
        started.append(engine)
        engine.start()
        return engine

    yield begin
    for engine in started:
        engine.kill()


def until(engine: EngineProcess, kind: type[Kind]) -> Kind:
    """The next message of a kind."""
    while True:
        message = engine.receive(PATIENCE_S)
        assert message is not None
        if isinstance(message, kind):
            return message
        assert not isinstance(message, LAST), message


def work(folder: Path, request: dict[str, Any]) -> Work:
    """An attempt in a folder."""
    folder.mkdir(exist_ok=True)
    return Work("video_a", 1, request, folder)


def decoded(path: Path) -> NDArray[np.uint8]:
    """All frames of a video file."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack(frames).astype(np.uint8)


def undisturbed(
    request: dict[str, Any], folder: Path, kv_cache: str | None = None
) -> NDArray[np.uint8]:
    """What ``longtake generate`` makes of the request."""
    target = folder / "undisturbed.mp4"
    options = EngineOptions(device="cpu", kv_cache=kv_cache)
    generate(request_from_mapping(request), Target(target), options)
    return decoded(target)


def test_one_process_works_stops_works_again_and_hangs(
    start: Start, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    engine = start("hang-step:9", preload=request_of["model"], kv_cache="int8")
    pid = engine.pid or 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert engine.receive(0) is None
    engine.send(work(tmp_path / "a", request_of))
    planned = until(engine, Planned)
    assert (planned.chunks, planned.plan["kv_cache"]) == (5, "int8")
    while until(engine, StepStarted) != StepStarted(1, 0):
        pass
    engine.ask_stop()
    assert until(engine, Stopped).files == ()
    assert engine.receive(0) is None
    # a stop asked for while idle is no stop of the next attempt
    engine.ask_stop(True)
    engine.send(work(tmp_path / "a", request_of))
    assert until(engine, ChunkDone).reused
    assert until(engine, Finished).memory_bytes > 10**8
    expected = undisturbed(request_of, tmp_path, "int8")
    assert np.array_equal(decoded(tmp_path / "a" / "video.mp4"), expected)
    engine.send(work(tmp_path / "b", {**request_of, "num_frames": 34}))
    assert until(engine, Failed).code is ErrorCode.INVALID_REQUEST
    assert (engine.alive, engine.pid) == (True, pid)
    engine.send(work(tmp_path / "b", request_of))
    while until(engine, StepStarted) != StepStarted(4, 1):
        pass
    engine.ask_stop()
    assert engine.receive(0.2) is None
    assert engine.alive
    killer = threading.Thread(target=engine.kill)
    killer.start()
    with pytest.raises(EngineDied) as died:
        engine.receive(PATIENCE_S)
    killer.join()
    assert died.value.exit_code == -signal.SIGKILL


def test_one_that_dies_is_replaced_and_goes_on(
    start: Start, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    """Killed in a step, then in a VAE decode: only the chunk of that step is denoised again."""
    faults = f"die-step:3@{tmp_path / 'first'},die-decode:1@{tmp_path / 'second'}"
    engine = start(faults)
    pids = {engine.pid}
    job = work(tmp_path / "a", request_of)
    for stored, last in (([0], StepStarted(1, 1)), ([1], Stage("decoding", 1))):
        engine.send(job)
        told = to_its_death(engine)
        assert [m.chunk for m in told if isinstance(m, LatentsStored)] == stored
        # everything it said before its end was heard
        assert told[-1] == last
        assert not engine.alive
        with pytest.raises(EngineDied):
            engine.receive(0)
        with pytest.raises(EngineDied):
            engine.send(job)
        assert isinstance(engine.start(), Ready)
        pids.add(engine.pid)
    engine.send(job)
    assert until(engine, StepStarted) == StepStarted(2, 0)
    until(engine, Finished)
    assert len(pids) == 3
    assert np.array_equal(decoded(tmp_path / "a" / "video.mp4"), undisturbed(request_of, tmp_path))
    engine.close()
    assert not engine.alive


def to_its_death(engine: EngineProcess) -> list[EngineMessage]:
    """All that an engine says before it is killed."""
    told: list[EngineMessage] = []

    def listen() -> None:
        while (message := engine.receive(PATIENCE_S)) is not None:
            told.append(message)

    with pytest.raises(EngineDied) as died:
        listen()
    assert died.value.exit_code == -signal.SIGKILL
    return told


def test_one_that_cannot_work_says_why(caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineProcess(EngineSettings(device="cuda:77"))
    with caplog.at_level(logging.CRITICAL), pytest.raises(ServiceError, match="cuda:77"):
        engine.start()
    assert not engine.alive
    engine = EngineProcess(EngineSettings(device="cpu", profile="nowhere.json"))
    with pytest.raises(ServiceError, match=r"profile='nowhere.json': cannot be read"):
        engine.start()
    never = EngineProcess(EngineSettings(device="cpu", start_limit_s=0.0))
    with pytest.raises(ServiceError, match="not ready in time"):
        never.start()
    assert not never.alive
    assert EngineProcess(EngineSettings()).pid is None


PARENT = """
import sys, time
from longtake.queue.engine import EngineProcess, EngineSettings
if __name__ == "__main__":
    engine = EngineProcess(EngineSettings(device="cpu"))
    engine.start()
    loaded = [name for name in ("torch", "diffusers") if name in sys.modules]
    print(engine.pid, loaded, flush=True)
    time.sleep(600)
"""


def test_it_dies_with_its_worker_which_never_imports_torch(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid, _, loaded = parent.stdout.readline().strip().partition(" ")
        assert loaded == "[]"
        engine = psutil.Process(int(pid))
        assert os.getsid(engine.pid) == engine.pid
        parent.kill()
        engine.wait(PATIENCE_S)
    finally:
        parent.kill()
        parent.communicate()


def test_settings_say_how_it_runs(tmp_path: Path) -> None:
    options = EngineSettings.of(Settings(data_dir=tmp_path, threads=3, device="cpu"))
    assert (options.device, options.threads, options.preload) == ("cpu", 3, "papercut")
    assert EngineSettings.of(Settings(data_dir=tmp_path, preload=False)).preload is None
    # ranks wait for each other longer than the worker waits for any of them
    assert (options.data_limit_s, options.control_limit_s) == (1800, 5400)
    quick = Settings(
        data_dir=tmp_path,
        kv_cache="int8",
        step_limit_s=5,
        decode_limit_s=7,
        load_limit_s=20,
        finish_limit_s=8,
    )
    options = EngineSettings.of(quick)
    assert (options.data_limit_s, options.control_limit_s, options.kv_cache) == (21, 60, "int8")
    assert EngineSettings.of(Settings(data_dir=tmp_path, profile="a.json")).profile == "a.json"


def test_a_message_that_is_not_the_last_wakes_nobody() -> None:
    ours, theirs = multiprocessing.Pipe()
    link = PipeLink(theirs, None)
    link.send(StepDone(0, 2, 1, 4), more=True)
    assert not ours.poll(0)
    link.send(StepStarted(0, 1))
    assert ours.recv() == [StepDone(0, 2, 1, 4), StepStarted(0, 1)]
    link.send(StepStarted(0, 2))
    assert ours.recv() == [StepStarted(0, 2)]
