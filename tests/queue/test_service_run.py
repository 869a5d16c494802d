"""One attempt, in this process: what is told in what order, and what lies on the disk by then."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file

from longtake.queue.faults import Faults
from longtake.queue.messages import (
    ChunkDone,
    EngineMessage,
    Failed,
    File,
    Finished,
    LatentsStored,
    Pictured,
    Planned,
    Stage,
    StepDone,
    StepStarted,
    Stopped,
    Work,
)
from longtake.queue.records import ArtifactKind, ErrorCode
from longtake.queue.service_run import Engine, Outcome, run_work
from longtake.video.codec import StreamingDecoder
from longtake.video.generate import Target, generate
from longtake.video.model_cache import ModelCache
from longtake.video.options import EngineOptions
from longtake.video.request import request_from_mapping

MakeModel = Callable[..., Path]
Pixels = NDArray[np.uint8]
BALL = "a red ball bouncing over a green meadow"
STAR = "a blue star moving left over dark hills at night"
CHUNKS, STEPS = 5, 2
FILES = [ArtifactKind.VIDEO, ArtifactKind.THUMBNAIL, ArtifactKind.SPRITESHEET, ArtifactKind.RECEIPT]


class Worker:
    """The other end: keeps what it is told, and raises the stop flag at a given message."""

    def __init__(self, stop_at: Any = None, *, keep: bool = False) -> None:
        self.told: list[EngineMessage] = []
        self.stop = False
        self.keep = False
        self._stop_at = stop_at
        self._keep = keep
        if stop_at == "start":
            self.stop, self.keep = True, keep

    def send(self, message: EngineMessage, *, more: bool = False) -> None:
        """Check that every file told of is there, whole, before anything else happens."""
        del more
        for file in getattr(message, "files", ()):
            assert file.path.stat().st_size > 0
            assert not list(file.path.parent.glob(".*part*"))
        self.told.append(message)
        if message == self._stop_at:
            self.stop, self.keep = True, self._keep

    def of(self, kind: type[Any]) -> list[Any]:
        """Messages of a kind."""
        return [message for message in self.told if isinstance(message, kind)]


@pytest.fixture
def model(make_model: MakeModel) -> Path:
    """The tiny model: 33 frames in 5 chunks of 2 steps."""
    return make_model()


@pytest.fixture
def request_of(model: Path) -> dict[str, Any]:
    """A request with a prompt switch."""
    prompts = [{"at": 2.0, "prompt": STAR}]
    return {"prompt": BALL, "prompts": prompts, "seed": 5, "num_frames": 33, "model": str(model)}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine without faults; what faults change of the decoder is undone."""
    monkeypatch.setattr(StreamingDecoder, "decode", StreamingDecoder.decode)
    return Engine(EngineOptions(device="cpu"), ModelCache(), Faults(""))


def faulty(engine: Engine, faults: str) -> Engine:
    """The engine with faults."""
    return Engine(engine.options, engine.models, Faults(faults))


def attempt(
    engine: Engine, folder: Path, request: dict[str, Any], worker: Worker | None = None
) -> tuple[Outcome, Worker]:
    """Do one attempt in a folder."""
    worker = worker or Worker()
    folder.mkdir(exist_ok=True)
    work = Work("video_a", 1, request, folder, {"job": "video_a"})
    return run_work(work, engine, worker), worker


def handed_on(source: Path, target: Path, *worker: Worker) -> Path:
    """What a worker brings into the next attempt's folder: every file told of so far."""
    for message in (m for w in worker for m in w.told):
        for file in getattr(message, "files", ()):
            place = target / file.path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            place.hardlink_to(file.path)
    return target


def decoded(path: Path) -> Pixels:
    """All frames of a video file."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack(frames).astype(np.uint8)


def undisturbed(request: dict[str, Any], folder: Path) -> Pixels:
    """What ``longtake generate`` makes of the request."""
    target = folder / "undisturbed.mp4"
    generate(request_from_mapping(request), Target(target), EngineOptions(device="cpu"))
    return decoded(target)


def file_of(files: tuple[File, ...], kind: ArtifactKind) -> File:
    """The file of a kind."""
    return next(file for file in files if file.kind is kind)


def test_everything_is_told_in_order(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    outcome, worker = attempt(engine, tmp_path / "a", request_of)
    assert isinstance(outcome, Finished), outcome
    kinds = [type(message) for message in worker.told if not isinstance(message, Stage)]
    chunk = [StepStarted, StepDone] * STEPS + [LatentsStored, ChunkDone]
    assert kinds == [Planned, *chunk * CHUNKS]
    stages = [(s.name, s.chunk) for s in worker.of(Stage)]
    decodes = [("decoding", index) for index in range(CHUNKS)]
    assert stages == [("loading", None), ("generating", None), *decodes, ("finishing", None)]
    planned = worker.of(Planned)[0]
    assert (planned.chunks, planned.steps, planned.plan["num_frames"]) == (CHUNKS, STEPS, 33)
    steps = [(s.chunk, s.step) for s in worker.of(StepStarted)]
    assert steps == [(c, s) for c in range(CHUNKS) for s in range(STEPS)]
    done = worker.of(ChunkDone)
    assert [d.frames_done for d in done] == [5, 13, 21, 29, 33]
    assert {d.reused for d in done} == {False}
    assert set(done[0].timings) == {"denoise", "clean", "decode", "encode"}
    assert outcome.memory_bytes > 10**8


def test_every_file_is_told_of_once(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    outcome, worker = attempt(engine, tmp_path / "a", request_of)
    assert isinstance(outcome, Finished)
    stored = [[f.kind.value for f in m.files] for m in worker.of(LatentsStored)]
    assert stored == [["latents", "rollout"], *[["latents"]] * 4]
    done = [[f.kind.value for f in m.files] for m in worker.of(ChunkDone)]
    assert done == [["init", "segment", "preview"], *[["segment", "preview"]] * 4]
    assert [f.kind for f in outcome.files] == FILES
    told = {f.path for m in [*worker.told, outcome] for f in getattr(m, "files", ())}
    assert told == {path for path in (tmp_path / "a").rglob("*") if path.is_file()}


def test_details_of_files(engine: Engine, tmp_path: Path, request_of: dict[str, Any]) -> None:
    outcome, worker = attempt(engine, tmp_path / "a", request_of)
    assert isinstance(outcome, Finished)
    first, second = worker.of(ChunkDone)[:2]
    init = file_of(first.files, ArtifactKind.INIT)
    assert init.details == {"codecs": "avc1.64000a", "width": 32, "height": 16, "fps": 8.0}
    segment = file_of(second.files, ArtifactKind.SEGMENT)
    expected = {"index": 1, "start_frame": 5, "frames": 8, "start_s": 0.625, "seconds": 1.0}
    assert segment.details == expected
    video = file_of(outcome.files, ArtifactKind.VIDEO)
    assert video.details == {"frames": 33, "width": 32, "height": 16, "fps": 8.0}
    sheet = file_of(outcome.files, ArtifactKind.SPRITESHEET)
    with Image.open(sheet.path) as picture:
        assert picture.size == (sheet.details["columns"] * 32, sheet.details["rows"] * 16)
    for file in (*first.files, *outcome.files):
        if file.content_type == "image/webp":
            with Image.open(file.path, formats=["WEBP"]) as picture:
                picture.load()


def test_the_video_is_that_of_generate(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    outcome, _ = attempt(engine, tmp_path / "a", request_of)
    assert isinstance(outcome, Finished)
    pixels = undisturbed(request_of, tmp_path)
    assert np.array_equal(decoded(tmp_path / "a" / "video.mp4"), pixels)
    joined = tmp_path / "joined.mp4"
    segments = sorted((tmp_path / "a" / "segments").glob("*.m4s"))
    whole = [tmp_path / "a" / "segments" / "init.mp4", *segments]
    joined.write_bytes(b"".join(path.read_bytes() for path in whole))
    assert np.array_equal(decoded(joined), pixels)
    with av.open(str(tmp_path / "a" / "video.mp4")) as container:
        said = container.metadata
    assert (said["prompt"], said["seed"], said["job"]) == (BALL, "5", "video_a")
    receipt = json.loads((tmp_path / "a" / "receipt.json").read_text())
    assert (receipt["state"], receipt["num_frames"]) == ("done", 33)
    assert receipt["timings"] == outcome.timings


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_stopped_attempt_goes_on_in_another_folder(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any], chunk: int
) -> None:
    first = Worker(StepStarted(chunk, 0))
    stopped, _ = attempt(engine, tmp_path / "a", request_of, first)
    assert isinstance(stopped, Stopped)
    assert (stopped.files, stopped.frames) == ((), [5, 13, 21][chunk - 1])
    # the step in flight is the last: no other one begins
    assert first.of(StepStarted)[-1] == StepStarted(chunk, 0)
    folder = handed_on(tmp_path / "a", tmp_path / "b", first)
    kept = {p: p.read_bytes() for p in (folder / "segments").iterdir()}
    outcome, second = attempt(engine, folder, request_of)
    assert isinstance(outcome, Finished)
    assert [d.reused for d in second.of(ChunkDone)] == [i < chunk for i in range(CHUNKS)]
    assert [d.files for d in second.of(ChunkDone)[:chunk]] == [()] * chunk
    assert [m.chunk for m in second.of(LatentsStored)] == list(range(chunk, CHUNKS))
    assert second.of(StepStarted)[0] == StepStarted(chunk, 0)
    assert all(path.read_bytes() == data for path, data in kept.items())
    shutil.rmtree(tmp_path / "a")
    assert np.array_equal(decoded(folder / "video.mp4"), undisturbed(request_of, tmp_path))


def test_latents_survive_a_decode_without_memory(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    outcome, first = attempt(faulty(engine, "oom-decode:2"), tmp_path / "a", request_of)
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.stage, outcome.chunk) == (ErrorCode.OUT_OF_MEMORY, "decoding", 2)
    assert not outcome.broken
    assert [m.chunk for m in first.of(LatentsStored)] == [0, 1, 2]
    folder = handed_on(tmp_path / "a", tmp_path / "b", first)
    done, second = attempt(engine, folder, request_of)
    assert isinstance(done, Finished)
    assert second.of(StepStarted)[0] == StepStarted(3, 0)
    kinds = [[f.kind.value for f in d.files] for d in second.of(ChunkDone)[:3]]
    assert kinds == [[], [], ["segment", "preview"]]
    assert np.array_equal(decoded(folder / "video.mp4"), undisturbed(request_of, tmp_path))


def test_after_a_step_without_memory_the_next_attempt_runs(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    broken = faulty(engine, "oom-step:3")
    outcome, worker = attempt(broken, tmp_path / "a", request_of)
    assert isinstance(outcome, Failed)
    code, stage = ErrorCode.OUT_OF_MEMORY, "generating"
    assert (outcome.code, outcome.stage, outcome.chunk) == (code, stage, 1)
    assert worker.of(StepStarted)[-1] == StepStarted(1, 1)
    again, _ = attempt(broken, tmp_path / "b", request_of)
    assert isinstance(again, Finished)


def test_a_stop_during_the_last_step_saves_the_decode(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    worker = Worker(StepStarted(1, STEPS - 1))
    stopped, _ = attempt(engine, tmp_path / "a", request_of, worker)
    assert isinstance(stopped, Stopped)
    assert stopped.frames == 5
    assert [m.chunk for m in worker.of(LatentsStored)] == [0, 1]
    assert [m.chunk for m in worker.of(ChunkDone)] == [0]


def test_a_stop_that_keeps_makes_a_video_of_the_finished_chunks(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    worker = Worker(StepStarted(2, 0), keep=True)
    stopped, _ = attempt(engine, tmp_path / "a", request_of, worker)
    assert isinstance(stopped, Stopped)
    assert ([f.kind for f in stopped.files], stopped.frames) == (FILES, 13)
    pixels = undisturbed(request_of, tmp_path)
    assert np.array_equal(decoded(tmp_path / "a" / "video.mp4"), pixels[:13])
    receipt = json.loads((tmp_path / "a" / "receipt.json").read_text())
    assert (receipt["state"], receipt["num_frames"]) == ("stopped", 13)


def test_a_stop_that_keeps_counts_chunks_of_earlier_attempts(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    first = Worker(StepStarted(3, 0))
    attempt(engine, tmp_path / "a", request_of, first)
    folder = handed_on(tmp_path / "a", tmp_path / "b", first)
    stopped, second = attempt(engine, folder, request_of, Worker("start", keep=True))
    assert isinstance(stopped, Stopped)
    assert (stopped.frames, len(stopped.files)) == (21, 4)
    assert second.of(StepStarted) == []
    plain, third = attempt(engine, folder, request_of, Worker("start"))
    assert isinstance(plain, Stopped)
    assert (plain.frames, plain.files, third.of(Stage)) == (0, (), [])


def test_chunks_of_other_weights_are_made_again(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any], model: Path
) -> None:
    first = Worker(StepStarted(2, 0))
    attempt(engine, tmp_path / "a", request_of, first)
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["proj_out.bias"] += 1
    save_file(tensors, weights)
    folder = handed_on(tmp_path / "a", tmp_path / "b", first)
    outcome, second = attempt(engine, folder, request_of)
    assert isinstance(outcome, Finished)
    assert [m.chunk for m in second.of(LatentsStored)] == list(range(CHUNKS))
    assert {d.reused for d in second.of(ChunkDone)} == {False}
    assert len([f for d in second.of(ChunkDone) for f in d.files]) == 1 + 2 * CHUNKS
    assert np.array_equal(decoded(folder / "video.mp4"), undisturbed(request_of, tmp_path))
    receipt = json.loads((folder / "receipt.json").read_text())
    assert any("stored chunks were made again" in w for w in receipt["warnings"])


def test_a_damaged_segment_or_header_is_made_again(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    first = Worker(StepStarted(3, 0))
    attempt(engine, tmp_path / "a", request_of, first)
    folder = handed_on(tmp_path / "a", tmp_path / "b", first)
    segment = folder / "segments" / "segment-000001.m4s"
    whole = segment.read_bytes()
    segment.unlink()
    segment.write_bytes(whole[:-100])
    outcome, second = attempt(engine, folder, request_of)
    assert isinstance(outcome, Finished)
    assert [bool(d.files) for d in second.of(ChunkDone)] == [False, True, False, True, True]
    assert segment.read_bytes() == whole
    folder = handed_on(tmp_path / "a", tmp_path / "c", first)
    (folder / "segments" / "init.mp4").unlink()
    outcome, third = attempt(engine, folder, request_of)
    assert isinstance(outcome, Finished)
    assert [bool(d.files) for d in third.of(ChunkDone)] == [True] * CHUNKS
    assert np.array_equal(decoded(folder / "video.mp4"), undisturbed(request_of, tmp_path))


def test_damaged_latents_start_the_rollout_again(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    first = Worker(StepStarted(2, 0))
    attempt(engine, tmp_path / "a", request_of, first)
    folder = handed_on(tmp_path / "a", tmp_path / "b", first)
    (folder / "latents" / "chunk-000001.safetensors").unlink()
    (folder / "latents" / "chunk-000001.safetensors").write_bytes(b"x" * 100)
    outcome, second = attempt(engine, folder, request_of)
    assert isinstance(outcome, Finished)
    assert [m.chunk for m in second.of(LatentsStored)] == list(range(CHUNKS))
    assert np.array_equal(decoded(folder / "video.mp4"), undisturbed(request_of, tmp_path))
    warnings = json.loads((folder / "receipt.json").read_text())["warnings"]
    assert any("latents/chunk-000001.safetensors" in warning for warning in warnings)
    assert not any(str(tmp_path) in warning for warning in warnings)


def test_a_start_image_is_encoded_and_its_place_is_told_to_nobody(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    image = tmp_path / "inputs" / "start.png"
    image.parent.mkdir()
    Image.new("RGB", (40, 30), (200, 30, 30)).save(image)
    request = {**request_of, "image": str(image)}
    outcome, worker = attempt(engine, tmp_path / "a", request)
    assert isinstance(outcome, Finished)
    assert "encoding" in [stage.name for stage in worker.of(Stage)]
    assert np.array_equal(decoded(tmp_path / "a" / "video.mp4"), undisturbed(request, tmp_path))
    receipt = json.loads((tmp_path / "a" / "receipt.json").read_text())
    assert receipt["input"]["image"] == receipt["plan"]["request"]["image"] == "start.png"
    assert worker.of(Planned)[0].plan["request"]["image"] == "start.png"
    image.write_bytes(b"no picture")
    bad, _ = attempt(engine, tmp_path / "b", request)
    assert isinstance(bad, Failed)
    assert (bad.code, bad.field) == (ErrorCode.INVALID_REQUEST, "image")
    assert str(tmp_path) not in bad.message
    assert "start.png" in bad.message


def test_clip_mode_is_one_chunk(engine: Engine, tmp_path: Path) -> None:
    request = {"prompt": BALL, "seed": 3, "num_frames": 9, "mode": "clip"}
    request["num_inference_steps"] = 2
    outcome, worker = attempt(engine, tmp_path / "a", request)
    assert isinstance(outcome, Finished), outcome
    kinds = [type(message) for message in worker.told if not isinstance(message, Stage)]
    assert kinds == [Planned, StepStarted, StepDone, StepStarted, StepDone, ChunkDone]
    names = [stage.name for stage in worker.of(Stage)]
    assert names == ["loading", "generating", "decoding", "finishing"]
    assert np.array_equal(decoded(tmp_path / "a" / "video.mp4"), undisturbed(request, tmp_path))
    stopped, worker = attempt(engine, tmp_path / "a", request, Worker(StepStarted(0, 0)))
    assert isinstance(stopped, Stopped)
    assert (stopped.frames, worker.of(StepStarted)) == (0, [StepStarted(0, 0)])


def test_a_clip_shows_pictures_and_is_the_same(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtake.queue.service_run.PICTURES_SHARE", 1e9)
    request = {"prompt": BALL, "seed": 3, "num_frames": 9, "mode": "clip"}
    request["num_inference_steps"] = 6
    outcome, worker = attempt(engine, tmp_path / "a", request)
    assert isinstance(outcome, Finished), outcome
    shown = [np.asarray(Image.open(one.file.path), np.float32) for one in worker.of(Pictured)]
    assert len(shown) == 4, "after every step but the first, which has none before, and the last"
    video = decoded(tmp_path / "a" / "video.mp4")
    assert np.array_equal(video, undisturbed(request, tmp_path))
    middle = video[len(video) // 2].astype(np.float32)
    off = [float(np.abs(picture - middle).mean()) for picture in shown]
    # half of the noise is still there after the first two steps, and left out of the picture
    assert off[0] < 25, off
    assert off == sorted(off, reverse=True)


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"num_frames": 34}, ErrorCode.INVALID_REQUEST, "num_frames"),
        ({"strange": 1}, ErrorCode.INVALID_REQUEST, "strange"),
        ({"prompt": "word " * 100}, ErrorCode.INVALID_REQUEST, "prompt"),
        ({"model": "nowhere"}, ErrorCode.MODEL_ERROR, None),
        ({"video": "/nowhere/a.mp4"}, ErrorCode.INVALID_REQUEST, "video"),
    ],
)
def test_bad_requests(
    engine: Engine,
    tmp_path: Path,
    request_of: dict[str, Any],
    changes: dict[str, Any],
    code: ErrorCode,
    field: str | None,
) -> None:
    outcome, worker = attempt(engine, tmp_path / "a", {**request_of, **changes})
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.field, outcome.broken) == (code, field, False)
    assert "Traceback" not in outcome.message
    assert worker.of(StepStarted) == []


def test_a_fault_of_ours_is_logged_and_not_told(
    engine: Engine,
    tmp_path: Path,
    request_of: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_frames: object) -> bytes:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr("longtake.queue.service_run.preview", broken)
    outcome, _ = attempt(engine, tmp_path / "a", request_of)
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.stage) == (ErrorCode.INTERNAL, "decoding")
    assert "secret" not in outcome.message
    assert "a secret" in caplog.text
    monkeypatch.undo()
    assert isinstance(attempt(engine, tmp_path / "b", request_of)[0], Finished)


def test_models_take_turns(
    engine: Engine, tmp_path: Path, request_of: dict[str, Any], make_model: MakeModel
) -> None:
    other = {**request_of, "model": str(make_model("other", sink=0))}
    for index, request in enumerate((request_of, other, request_of)):
        outcome, _ = attempt(engine, tmp_path / str(index), request)
        assert isinstance(outcome, Finished)
        assert engine.models.name == request["model"]
    pixels = [decoded(tmp_path / str(index) / "video.mp4") for index in range(3)]
    assert np.array_equal(pixels[0], pixels[2])
    assert not np.array_equal(pixels[0], pixels[1])
