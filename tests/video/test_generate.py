"""Requests to files: resume, repeatability and receipts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file

from longtake.errors import Interrupted, MediaError, OutputError, ResumeError
from longtake.schedulers.prompts import TimedPrompt
from longtake.video.generate import Result, Target, generate
from longtake.video.latents import LatentFolder
from longtake.video.manifest import BUNDLED
from longtake.video.options import EngineOptions, SilentObserver, Storage
from longtake.video.request import VideoRequest

MakeModel = Callable[..., Path]
Pixels = NDArray[np.uint8]
BALL = "a red ball bouncing over a green meadow"
STAR = "a blue star moving left over dark hills at night"


class StopAfter(SilentObserver):
    """Raises the stop flag once ``chunks`` chunks are written."""

    def __init__(self, chunks: int) -> None:
        self._left = chunks

    def on_chunk(self, frames: int) -> None:
        """Count down."""
        self._left -= frames > 0

    def stopping(self) -> bool:
        """True when enough are done."""
        return self._left <= 0


def decoded(path: Path) -> Pixels:
    """All frames of a video file."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack(frames).astype(np.uint8)


def make(model: Path, out: Path, storage: Storage | None = None, **changes: Any) -> Result:
    """Generate 33 frames with seed 5 and a prompt switch."""
    stop_after = changes.pop("stop_after", None)
    fields: dict[str, Any] = {
        "prompt": BALL,
        "prompts": (TimedPrompt(2.0, STAR),),
        "seed": 5,
        "num_frames": 33,
        "model": str(model),
        **changes,
    }
    observer = StopAfter(stop_after) if stop_after is not None else None
    return generate(VideoRequest(**fields), Target(out), storage=storage, observer=observer)


@pytest.fixture
def start_image(tmp_path: Path) -> str:
    """A picture of another size than the video."""
    path = tmp_path / "start.png"
    ramp = np.linspace(0, 255, 48 * 40 * 3).reshape(40, 48, 3).astype(np.uint8)
    Image.fromarray(ramp).save(path)
    return str(path)


@pytest.mark.parametrize("stopped_after", [1, 2, 3, 4])
@pytest.mark.parametrize("with_image", [False, True])
def test_stopped_and_resumed_equals_undisturbed(
    make_model: MakeModel, tmp_path: Path, start_image: str, stopped_after: int, with_image: bool
) -> None:
    model = make_model(guidance_scale=2.0)
    fields: dict[str, Any] = {"image": start_image} if with_image else {}
    whole = make(model, tmp_path / "whole.mp4", **fields)
    kept = tmp_path / "kept"
    stopped = make(
        model, tmp_path / "part.mp4", Storage(keep=kept), stop_after=stopped_after, **fields
    )
    assert stopped.state == "stopped"
    assert LatentFolder(kept).count == stopped_after
    part = decoded(tmp_path / "part.mp4")
    assert len(part) == stopped.frames < 33
    resumed = generate(None, Target(tmp_path / "resumed.mp4"), storage=Storage(resume=kept))
    assert (whole.state, resumed.state) == ("done", "done")
    undisturbed = decoded(tmp_path / "whole.mp4")
    assert np.array_equal(part, undisturbed[: len(part)])
    assert np.array_equal(decoded(tmp_path / "resumed.mp4"), undisturbed)
    reused = [entry["reused"] for entry in resumed.receipt["chunks"]]
    assert all(reused[:stopped_after])
    assert not any(reused[stopped_after:])


def test_resume_in_a_new_process(make_model: MakeModel, tmp_path: Path, start_image: str) -> None:
    model = make_model()
    make(model, tmp_path / "whole.mp4", image=start_image)
    kept = tmp_path / "kept"
    make(model, tmp_path / "part.mp4", Storage(keep=kept), stop_after=3, image=start_image)
    Path(start_image).unlink()
    command = [sys.executable, "-m", "longtake", "generate", "--resume", str(kept)]
    command += ["-o", str(tmp_path / "resumed.mp4")]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert np.array_equal(decoded(tmp_path / "resumed.mp4"), decoded(tmp_path / "whole.mp4"))


def test_resume_may_ask_for_a_longer_video(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    kept = tmp_path / "kept"
    make(model, tmp_path / "short.mp4", Storage(keep=kept))
    longer = make(model, tmp_path / "long.mp4", Storage(resume=kept), num_frames=49)
    assert longer.frames == 49
    make(model, tmp_path / "whole.mp4", num_frames=49)
    assert np.array_equal(decoded(tmp_path / "long.mp4"), decoded(tmp_path / "whole.mp4"))
    assert LatentFolder(kept).count == 7


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"prompt": STAR}, "prompt"), ({"seed": 6}, "seed"), ({"guidance_scale": 3.0}, "guidance")],
)
def test_resume_refuses_another_request(
    make_model: MakeModel, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    model = make_model()
    kept = tmp_path / "kept"
    make(model, tmp_path / "a.mp4", Storage(keep=kept), stop_after=1)
    with pytest.raises(ResumeError, match=field):
        make(model, tmp_path / "b.mp4", Storage(resume=kept), **changes)
    assert not (tmp_path / "b.mp4").exists()


def test_resume_takes_what_is_left_out_from_the_store(
    make_model: MakeModel, tmp_path: Path
) -> None:
    model = make_model()
    kept = tmp_path / "kept"
    make(model, tmp_path / "a.mp4", Storage(keep=kept), stop_after=1)
    plain = VideoRequest(prompt=BALL, model=str(model), seconds=5.0)
    result = generate(plain, Target(tmp_path / "b.mp4"), storage=Storage(resume=kept))
    assert result.receipt["seed"] == 5
    assert [s["prompt"] for s in result.receipt["plan"]["prompts"]] == [STAR]


def test_a_redraw_resumes(make_model: MakeModel, tmp_path: Path) -> None:
    model, kept = make_model(), tmp_path / "kept"
    make(model, tmp_path / "clip.mp4", prompts=())
    fields: dict[str, Any] = {"video": str(tmp_path / "clip.mp4"), "strength": 0.5, "prompts": ()}
    make(model, tmp_path / "whole.mp4", **fields)
    make(model, tmp_path / "part.mp4", Storage(keep=kept), stop_after=2, **fields)
    generate(None, Target(tmp_path / "resumed.mp4"), storage=Storage(resume=kept))
    assert np.array_equal(decoded(tmp_path / "resumed.mp4"), decoded(tmp_path / "whole.mp4"))
    with pytest.raises(ResumeError, match="keeps its length, 33"):
        make(model, tmp_path / "x.mp4", Storage(resume=kept), **(fields | {"num_frames": 29}))
    (tmp_path / "clip.mp4").write_bytes((tmp_path / "part.mp4").read_bytes())
    with pytest.raises(ResumeError, match="is another file by now"):
        generate(None, Target(tmp_path / "x.mp4"), storage=Storage(resume=kept))


def test_a_run_that_ended_while_its_input_was_committed_resumes(
    make_model: MakeModel, tmp_path: Path
) -> None:
    model, kept = make_model(), tmp_path / "kept"
    make(model, tmp_path / "clip.mp4", prompts=(), num_frames=17)
    fields: dict[str, Any] = {"video": str(tmp_path / "clip.mp4"), "prompts": ()}
    make(model, tmp_path / "whole.mp4", Storage(keep=kept), **fields)
    for index in (1, 2, 3, 4):
        (kept / f"chunk-{index:06d}.safetensors").unlink()
    generate(None, Target(tmp_path / "resumed.mp4"), storage=Storage(resume=kept))
    assert np.array_equal(decoded(tmp_path / "resumed.mp4"), decoded(tmp_path / "whole.mp4"))


def test_a_changed_manifest_is_noticed(make_model: MakeModel, tmp_path: Path) -> None:
    model, kept = make_model(), tmp_path / "kept"
    make(model, tmp_path / "a.mp4", Storage(keep=kept), stop_after=1)
    manifest = model / "longtake.json"
    manifest.write_text(manifest.read_text().replace('"sink": 1', '"sink": 0'))
    with pytest.raises(ResumeError, match="sink=0: the stored rollout has 1"):
        generate(None, Target(tmp_path / "b.mp4"), storage=Storage(resume=kept))


def test_latents_of_another_size_are_refused(make_model: MakeModel, tmp_path: Path) -> None:
    model, kept = make_model(), tmp_path / "kept"
    make(model, tmp_path / "a.mp4", Storage(keep=kept), stop_after=1)
    with pytest.raises(MediaError, match="holds latents of"):
        make(model, tmp_path / "b.mp4", video=str(kept), prompts=(), size=(16, 16))


def test_the_stop_flag_is_read_where_nothing_is_denoised(
    make_model: MakeModel, tmp_path: Path
) -> None:
    model = make_model()
    make(model, tmp_path / "clip.mp4", prompts=())
    fields: dict[str, Any] = {"video": str(tmp_path / "clip.mp4"), "strength": 0.0, "prompts": ()}
    with pytest.raises(Interrupted):
        make(model, tmp_path / "a.mp4", stop_after=0, **fields)


def test_nothing_of_the_callers_own_is_overwritten(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    (tmp_path / "package.json").write_text("{}")
    with pytest.raises(OutputError, match="no receipt of longtake"):
        make(model, tmp_path / "package.mp4")
    make(model, tmp_path / "a.mp4", prompts=())
    with pytest.raises(OutputError, match="is the input"):
        make(model, tmp_path / "a.mp4", video=str(tmp_path / "a.mp4"), prompts=(), num_frames=49)
    with pytest.raises(OutputError, match="keep_latents"):
        generate(
            VideoRequest(prompt=BALL, model=str(model)),
            Target(None, None, tmp_path / "same"),
            storage=Storage(keep=tmp_path / "same"),
        )


def test_resume_refuses_other_weights(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    kept = tmp_path / "kept"
    make(model, tmp_path / "a.mp4", Storage(keep=kept), stop_after=1)
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["proj_out.bias"] += 1
    save_file(tensors, weights)
    with pytest.raises(ResumeError, match="weights"):
        make(model, tmp_path / "b.mp4", Storage(resume=kept))


def test_stop_before_the_first_chunk_leaves_nothing(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(Interrupted):
        make(model, tmp_path / "a.mp4", Storage(keep=tmp_path / "kept"), stop_after=0)
    assert sorted(tmp_path.iterdir()) == before


def test_receipt_says_what_ran(make_model: MakeModel, tmp_path: Path) -> None:
    result = make(make_model(), tmp_path / "a.mp4")
    receipt = json.loads((tmp_path / "a.json").read_text())
    assert receipt == json.loads(json.dumps(result.receipt))
    assert receipt["state"] == "done"
    assert receipt["num_frames"] == 33
    assert receipt["seed"] == 5
    assert receipt["engine"]["guarantee"]["level"] == "L1"
    assert receipt["engine"]["backend"]["self_attention"] == "sdpa"
    assert len(receipt["engine"]["fingerprint"]["operations"]) >= 12
    assert set(receipt["weights"]) == {
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
    }
    assert [entry["prompt"] for entry in receipt["chunks"]] == [0, 0, 0, 1, 1]
    assert receipt["plan"]["prompts"] == [{"at": 2.0, "starts": 21 / 8, "chunk": 3, "prompt": STAR}]


def test_prompt_and_seed_are_in_the_file(make_model: MakeModel, tmp_path: Path) -> None:
    make(make_model(), tmp_path / "a.mp4")
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert container.metadata["prompt"] == BALL
        assert container.metadata["seed"] == "5"


def test_a_drawn_seed_is_recorded_and_repeats(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    first = make(model, tmp_path / "a.mp4", seed=None)
    make(model, tmp_path / "b.mp4", seed=first.receipt["seed"])
    assert np.array_equal(decoded(tmp_path / "a.mp4"), decoded(tmp_path / "b.mp4"))


def test_frames_folder_holds_the_same_video_without_loss(
    make_model: MakeModel, tmp_path: Path
) -> None:
    request = VideoRequest(prompt=BALL, seed=5, num_frames=17, model=str(make_model()))
    result = generate(request, Target(None, None, tmp_path / "frames"))
    assert result.frames == 17
    assert len(list((tmp_path / "frames").glob("*.png"))) == 17
    assert (tmp_path / "frames.json").is_file()


def test_continuing_a_clip_keeps_its_frames(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    make(model, tmp_path / "a.mp4")
    result = make(
        model, tmp_path / "b.mp4", video=str(tmp_path / "a.mp4"), prompts=(), num_frames=49
    )
    assert result.receipt["plan"]["input"] == {"kind": "continue", "frames": 33}
    assert len(decoded(tmp_path / "b.mp4")) == 49


def test_redrawing_takes_the_clips_length(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    make(model, tmp_path / "a.mp4")
    result = make(
        model,
        tmp_path / "b.mp4",
        video=str(tmp_path / "a.mp4"),
        strength=0.5,
        prompts=(),
        num_frames=None,
    )
    assert result.frames == 33
    assert result.receipt["plan"]["input"] == {"kind": "redraw", "frames": 33}


def test_stored_latents_can_be_continued_and_redrawn(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    kept = tmp_path / "kept"
    make(model, tmp_path / "a.mp4", Storage(keep=kept), prompts=())
    longer = make(model, tmp_path / "b.mp4", video=str(kept), prompts=(), num_frames=49)
    assert longer.frames == 49
    assert longer.receipt["plan"]["input"] == {"kind": "continue", "frames": 33}
    assert np.array_equal(decoded(tmp_path / "b.mp4")[:33], decoded(tmp_path / "a.mp4"))
    redrawn = make(
        model, tmp_path / "c.mp4", video=str(kept), strength=0.0, prompts=(), num_frames=None
    )
    assert redrawn.frames == 33
    assert np.array_equal(decoded(tmp_path / "c.mp4"), decoded(tmp_path / "a.mp4"))


def _resaved(folder: Path) -> Path:
    """The bundled model with its weights saved anew: other offsets, other order, float32."""
    for source in BUNDLED.rglob("*"):
        target = folder / source.relative_to(BUNDLED)
        if source.is_dir():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".safetensors":
            tensors = load_file(source)
            turned = dict(sorted(tensors.items(), reverse=True))
            save_file({k: v.float() for k, v in turned.items()}, target, {"note": "x" * 37})
        else:
            target.write_bytes(source.read_bytes())
    return folder


@pytest.fixture(scope="module")
def reference_pixels(tmp_path_factory: pytest.TempPathFactory) -> Pixels:
    """25 frames of the bundled model, made in this process."""
    out = tmp_path_factory.mktemp("reference") / "a.mp4"
    request = VideoRequest(prompt=BALL, seed=3, num_frames=25)
    generate(request, Target(out), EngineOptions())
    return decoded(out)


@pytest.mark.parametrize("threads", [1, 2])
def test_new_process_and_thread_count_do_not_matter(
    reference_pixels: Pixels, tmp_path: Path, threads: int
) -> None:
    out = tmp_path / "a.mp4"
    command = [sys.executable, "-m", "longtake", "generate", BALL, "--seed", "3"]
    command += ["--num-frames", "25", "--threads", str(threads), "-o", str(out)]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(out.with_suffix(".json").read_text())["engine"]["threads"] == threads
    assert np.array_equal(decoded(out), reference_pixels)


def test_a_saved_copy_of_the_weights_does_not_matter(
    reference_pixels: Pixels, tmp_path: Path
) -> None:
    copy = _resaved(tmp_path / "copy")
    request = VideoRequest(prompt=BALL, seed=3, num_frames=25, model=str(copy))
    generate(request, Target(tmp_path / "a.mp4"))
    assert np.array_equal(decoded(tmp_path / "a.mp4"), reference_pixels)
    other = VideoRequest(prompt=BALL, seed=4, num_frames=25)
    generate(other, Target(tmp_path / "b.mp4"))
    assert not np.array_equal(decoded(tmp_path / "b.mp4"), reference_pixels)


def test_where_it_was_interrupted_does_not_matter(reference_pixels: Pixels, tmp_path: Path) -> None:
    request = VideoRequest(prompt=BALL, seed=3, num_frames=25)
    kept = tmp_path / "kept"
    for index, stop_after in enumerate((1, 3)):
        storage = Storage(resume=kept) if index else Storage(keep=kept)
        generate(
            request,
            Target(tmp_path / f"{index}.mp4"),
            storage=storage,
            observer=StopAfter(stop_after),
        )
    generate(request, Target(tmp_path / "a.mp4"), storage=Storage(resume=kept))
    assert np.array_equal(decoded(tmp_path / "a.mp4"), reference_pixels)
