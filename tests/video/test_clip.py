"""Clip mode on tiny random pipelines of six families, built and loaded through the real classes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, T5Config, T5EncoderModel

from longtake.errors import LongtakeError, ModelError, RequestError, WeightsError
from longtake.video.clip import ClipModel, ClipPlan, clip_rollout, load_pipeline, make_clip_plan
from longtake.video.manifest import BUNDLED
from longtake.video.numerics import file_hash
from longtake.video.request import VideoRequest
from longtake.video.rollout import StepEvent
from longtake.video.source import find_model

# Mochi turns autocast off for its rotary tables in a way that the CPU does not know
pytestmark = pytest.mark.filterwarnings(
    "ignore:In CPU autocast, but the target dtype is not supported:UserWarning"
)
IMAGE = np.random.default_rng(5).integers(0, 256, (16, 32, 3), np.uint8)
HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
FLOW = diffusers.FlowMatchEulerDiscreteScheduler
WEIGHTS = ("transformer", "vae", "text_encoder")
Folders = Callable[[str], Path]
Models = Callable[[str], ClipModel]
MakePlan = Callable[..., ClipPlan]


def text(width: int) -> dict[str, Any]:
    config = T5Config(
        vocab_size=51, d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "tokenizer")
    return {"tokenizer": tokenizer, "text_encoder": T5EncoderModel(config).eval()}


def wan_parts(cls: Any, channels: int = 16) -> dict[str, Any]:
    transformer = cls(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    vae = diffusers.AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return {"transformer": transformer, "vae": vae, **text(16)}


def wan() -> Any:
    parts = wan_parts(diffusers.WanTransformer3DModel)
    return diffusers.WanPipeline(**parts, scheduler=FLOW(shift=3.0))


def wan_image() -> Any:
    parts = wan_parts(diffusers.WanTransformer3DModel, 36)
    return diffusers.WanImageToVideoPipeline(**parts, scheduler=FLOW(shift=3.0))


def skyreels() -> Any:
    parts = wan_parts(diffusers.SkyReelsV2Transformer3DModel)
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0
    )
    return diffusers.SkyReelsV2Pipeline(**parts, scheduler=scheduler)


def ltx() -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        **HEADS, in_channels=8, out_channels=8, cross_attention_dim=32, caption_channels=32
    )
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        patch_size=1,
    )
    scheduler = FLOW(use_dynamic_shifting=True)
    return diffusers.LTXPipeline(transformer=transformer, vae=vae, scheduler=scheduler, **text(32))


def cogvideox() -> Any:
    transformer = diffusers.CogVideoXTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, time_embed_dim=2, text_embed_dim=32
    )
    vae = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2
    )
    scheduler = diffusers.CogVideoXDDIMScheduler()
    return diffusers.CogVideoXPipeline(
        transformer=transformer, vae=vae, scheduler=scheduler, **text(32)
    )


def mochi() -> Any:
    transformer = diffusers.MochiTransformer3DModel(
        **HEADS, pooled_projection_dim=16, in_channels=12, text_embed_dim=32, time_embed_dim=4
    )
    vae = diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )
    scheduler = FLOW(invert_sigmas=True)
    return diffusers.MochiPipeline(
        transformer=transformer, vae=vae, scheduler=scheduler, **text(32)
    )


BUILDERS = {f.__name__: f for f in (wan, wan_image, skyreels, ltx, cogvideox, mochi)}
# frames and size of the smallest clip worth looking at
SMALLEST: dict[str, tuple[int, tuple[int, int]]] = {
    "wan": (5, (32, 16)),
    "wan_image": (5, (32, 16)),
    "skyreels": (5, (32, 16)),
    "ltx": (9, (64, 32)),
    "cogvideox": (8, (32, 16)),
    "mochi": (7, (32, 16)),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A saved pipeline of a family, built at first use."""

    @cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp("clip") / family
        torch.manual_seed(3)
        BUILDERS[family]().save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="session")
def models(folders: Folders) -> Models:
    """A loaded pipeline of a family; runs leave it as it is."""
    return cache(lambda family: load_pipeline(find_model(str(folders(family)))))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small cost more to share out than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def plan(folders: Folders) -> MakePlan:
    def make(family: str, **fields: Any) -> ClipPlan:
        frames, size = SMALLEST[family]
        defaults: dict[str, Any] = {
            "prompt": "a red ball",
            "seed": 7,
            "num_inference_steps": 2,
            "num_frames": frames,
            "size": size,
        }
        if family == "skyreels":
            defaults["fps"] = 24.0
        request = VideoRequest(**(defaults | fields))
        source = find_model(str(folders(family)))
        return make_clip_plan(request, source, image_given=family == "wan_image")

    return make


def run(clip_plan: ClipPlan, model: ClipModel, **options: Any) -> torch.Tensor:
    (chunk,) = clip_rollout(clip_plan, model, **options)
    assert chunk.frames.dtype == torch.uint8
    assert set(chunk.timings) == {"denoise", "decode"}
    return chunk.frames


def direct(
    pipeline: Any, frames: int, size: tuple[int, int], seed: int = 7, **extra: Any
) -> torch.Tensor:
    """What a caller of diffusers gets, as uint8."""
    pipeline.set_progress_bar_config(disable=True)
    output = pipeline(
        prompt="a red ball",
        width=size[0],
        height=size[1],
        num_frames=frames,
        num_inference_steps=2,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="np",
        **extra,
    )
    return torch.from_numpy(np.rint(output.frames[0] * 255).astype(np.uint8))


@pytest.mark.parametrize("family", BUILDERS)
def test_pixels_equal_a_direct_call(
    family: str, folders: Folders, models: Models, plan: MakePlan
) -> None:
    frames, size = SMALLEST[family]
    image = IMAGE if family == "wan_image" else None
    made = run(plan(family), models(family), image=image)
    reference = diffusers.DiffusionPipeline.from_pretrained(folders(family))
    extra: dict[str, Any] = {"image": Image.fromarray(IMAGE)} if image is not None else {}
    assert made.shape == (frames, size[1], size[0], 3)
    assert made.float().std() > 1
    assert torch.equal(made, direct(reference, frames, size, **extra))


def test_bundled_model_runs_as_a_clip_at_its_own_size() -> None:
    source = find_model("papercut")
    request = VideoRequest(
        prompt="a red ball", mode="clip", seed=4, num_frames=9, num_inference_steps=2
    )
    clip_plan = make_clip_plan(request, source)
    reference = diffusers.WanPipeline.from_pretrained(BUNDLED, dtype=torch.float32)
    expected = direct(reference, 9, (128, 80), 4)
    assert (clip_plan.model, clip_plan.size, clip_plan.fps) == ("papercut", (128, 80), 16.0)
    assert torch.equal(run(clip_plan, load_pipeline(source)), expected)


def test_progress_is_told_and_stop_is_read_between_steps(models: Models, plan: MakePlan) -> None:
    made, model = plan("wan", num_inference_steps=3), models("wan")
    events: list[StepEvent] = []
    whole = run(made, model, on_step=events.append)
    assert events == [StepEvent(0, 1, step, 3) for step in (1, 2, 3)]

    events.clear()
    stopped = clip_rollout(made, model, stop=lambda: len(events) == 2, on_step=events.append)
    assert list(stopped) == []
    assert [event.step for event in events] == [1, 2]

    events.clear()
    assert list(clip_rollout(made, model, stop=lambda: True, on_step=events.append)) == []
    assert events == []
    # raised during the last step: nothing is left to stop, the clip is whole
    late = run(made, model, stop=lambda: len(events) == 3, on_step=events.append)
    assert torch.equal(late, whole)


def test_seed_decides_the_pixels(models: Models, plan: MakePlan) -> None:
    first = run(plan("wan"), models("wan"))
    assert torch.equal(first, run(plan("wan"), models("wan")))
    assert not torch.equal(first, run(plan("wan", seed=8), models("wan")))


@pytest.mark.parametrize(("family", "name"), [("wan", "shift"), ("skyreels", "flow_shift")])
def test_flow_shift_is_of_one_run_only(
    folders: Folders, models: Models, plan: MakePlan, family: str, name: str
) -> None:
    model = models(family)
    own = model.pipeline.scheduler
    config = dict(own.config)
    before = run(plan(family), model)
    shifted = run(plan(family, flow_shift=1.5), model)
    assert model.pipeline.scheduler is own
    assert dict(own.config) == config
    assert not torch.equal(shifted, before)
    assert torch.equal(run(plan(family), model), before)
    reference = diffusers.DiffusionPipeline.from_pretrained(folders(family))
    scheduler = reference.scheduler
    reference.scheduler = type(scheduler).from_config(scheduler.config, **{name: 1.5})
    assert torch.equal(shifted, direct(reference, *SMALLEST[family]))


def test_unknown_rule_is_checked_by_what_comes_out(models: Models, plan: MakePlan) -> None:
    made = plan("skyreels", num_frames=6)
    assert "frame rule not known" in made.warnings[0]
    with pytest.raises(ModelError, match=r"got 5x16x32x3, asked for 6x16x32x3"):
        run(made, models("skyreels"))


def test_wrong_images_are_refused_before_the_run(models: Models, plan: MakePlan) -> None:
    with pytest.raises(RequestError, match="image=None: WanImageToVideoPipeline starts from an"):
        clip_rollout(plan("wan_image"), models("wan_image"))
    with pytest.raises(RequestError, match="got 16x16x3 uint8; expected 16x32x3 uint8"):
        clip_rollout(plan("wan_image"), models("wan_image"), image=IMAGE[:, :16])
    with pytest.raises(RequestError, match="image='given': the plan was made without one"):
        clip_rollout(plan("wan"), models("wan"), image=IMAGE)
    with pytest.raises(ModelError, match="got a WanPipeline, expected the plan's LTXPipeline"):
        clip_rollout(plan("ltx"), models("wan"))


def test_text_is_not_cut_silently(models: Models, plan: MakePlan) -> None:
    with pytest.raises(RequestError, match=r"prompt=.*has 131 tokens, LTXPipeline reads 128"):
        clip_rollout(plan("ltx", prompt="ball " * 130), models("ltx"))
    with pytest.raises(RequestError, match=r"negative_prompt=.*has 131 tokens"):
        clip_rollout(plan("ltx", negative_prompt="ball " * 130), models("ltx"))


def test_pixels_that_are_no_numbers_are_an_error(folders: Folders, plan: MakePlan) -> None:
    model = load_pipeline(find_model(str(folders("wan"))))
    with torch.no_grad():
        model.pipeline.vae.decoder.conv_out.bias.fill_(float("nan"))
    with pytest.raises(ModelError, match="frame 0 is not finite"):
        run(plan("wan"), model)


def test_hashes_name_every_weight_file(folders: Folders, models: Models) -> None:
    hashes = models("wan").hashes
    assert {name.split("/")[0] for name in hashes} == set(WEIGHTS)
    assert all(file_hash(folders("wan") / name) == found for name, found in hashes.items())


@pytest.mark.parametrize("family", BUILDERS)
def test_dtype_is_that_of_a_direct_load(family: str, folders: Folders) -> None:
    model = load_pipeline(find_model(str(folders(family))), dtype="bf16")
    reference = diffusers.DiffusionPipeline.from_pretrained(folders(family), dtype=torch.bfloat16)
    for name in WEIGHTS:
        ours, theirs = (getattr(p, name).state_dict() for p in (model.pipeline, reference))
        assert {k: v.dtype for k, v in ours.items()} == {k: v.dtype for k, v in theirs.items()}
    assert torch.bfloat16 in {v.dtype for v in model.pipeline.transformer.state_dict().values()}


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def edit(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        weights = load_file(file)
        change(weights)
        save_file(weights, file, metadata={"format": "pt"})

    return apply


FAULTS: dict[str, tuple[Callable[[Path], Any], str, type[LongtakeError]]] = {
    "truncated": (truncate, "cannot be read", ModelError),
    "no weights": (Path.unlink, "does not exist", ModelError),
    "no folder": (lambda file: shutil.rmtree(file.parent), "does not exist", ModelError),
    "no json": (lambda file: (file.parent / "config.json").write_text("{"), "JSON", ModelError),
    "missing": (edit(lambda w: w.pop(min(w))), "1 missing: ", WeightsError),
    "shape": (
        edit(lambda w: w.update({min(w): torch.zeros(3, 5)})),
        r"1 wrong shape: .*got \[3, 5\], expected",
        WeightsError,
    ),
    "unexpected": (
        edit(lambda w: w.update({f"extra{n:02}": torch.zeros(1) for n in range(12)})),
        "12 unexpected: extra00, .*, extra09 and 2 more",
        WeightsError,
    ),
}


@pytest.mark.parametrize("component", WEIGHTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_weights_are_refused_by_component(
    folders: Folders, tmp_path: Path, component: str, fault: str
) -> None:
    damage, message, error = FAULTS[fault]
    folder = shutil.copytree(folders("wan"), tmp_path / "wan")
    damage(next((folder / component).glob("*.safetensors")))
    with pytest.raises(error, match=message) as caught:
        load_pipeline(find_model(str(folder)))
    assert component in str(caught.value)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("model_index.json", "WanTransformer3DModel", "Nope", "transformer: no class 'Nope'"),
        (
            "model_index.json",
            "WanTransformer3DModel",
            "LTXVideoTransformer3DModel",
            "transformer: config.json is of a WanTransformer3DModel, expected LTX",
        ),
        ("tokenizer/tokenizer.json", "{", "", "wan: tokenizer: "),
        ("scheduler/scheduler_config.json", "{", "", "wan: scheduler: "),
    ],
)
def test_other_components_are_named_too(
    folders: Folders, tmp_path: Path, file: str, old: str, new: str, message: str
) -> None:
    path = shutil.copytree(folders("wan"), tmp_path / "wan") / file
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ModelError, match=message):
        load_pipeline(find_model(str(tmp_path / "wan")))
