"""Plans of clip mode, from the small files of a pipeline alone."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest

from longtake.errors import ModelError, RequestError
from longtake.schedulers.prompts import TimedPrompt
from longtake.video.clip_models import FAMILIES, OPAQUE, FrameRule, call_parameters
from longtake.video.clip_plan import ClipPlan, make_clip_plan
from longtake.video.request import VideoRequest
from longtake.video.source import find_model

FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
WAN = {
    "vae": {"scale_factor_temporal": 4, "scale_factor_spatial": 8},
    "transformer": {"patch_size": [1, 2, 2]},
    "scheduler": FLOW,
}
LTX = {
    "vae": {
        "spatio_temporal_scaling": [True, True, True, False],
        "patch_size": 4,
        "patch_size_t": 1,
    },
    "transformer": {"patch_size": 1},
    "scheduler": FLOW | {"use_dynamic_shifting": True},
}
COGVIDEOX = {
    "vae": {"block_out_channels": [128, 256, 256, 512], "temporal_compression_ratio": 4},
    "transformer": {
        "patch_size": 2,
        "sample_width": 90,
        "sample_height": 60,
        "sample_frames": 49,
    },
    "scheduler": {"_class_name": "CogVideoXDDIMScheduler"},
}
HUNYUAN = {
    "vae": {"temporal_compression_ratio": 4, "spatial_compression_ratio": 8},
    "transformer": {"patch_size": 2},
    "scheduler": FLOW,
}
MOCHI = {"vae": {}, "transformer": {}, "scheduler": FLOW}
ANIMATEDIFF = {"vae": {"block_out_channels": [8, 8, 8, 8]}, "unet": {"sample_size": 64}}
CONFIGS: dict[str, dict[str, Any]] = {
    "WanPipeline": WAN,
    "WanImageToVideoPipeline": WAN,
    "LTXPipeline": LTX,
    "LTXImageToVideoPipeline": LTX,
    "CogVideoXPipeline": COGVIDEOX,
    "CogVideoXImageToVideoPipeline": COGVIDEOX,
    "HunyuanVideoPipeline": HUNYUAN,
    "HunyuanVideoImageToVideoPipeline": HUNYUAN,
    "MochiPipeline": MOCHI,
    "AnimateDiffPipeline": ANIMATEDIFF,
}


def bare_folder(path: Path, name: Any, configs: dict[str, Any], **index: Any) -> str:
    """What planning reads of a pipeline, and nothing else."""
    components = {component: ["diffusers", "X"] for component in configs}
    (path / "model_index.json").write_text(json.dumps({"_class_name": name} | components | index))
    for component, config in configs.items():
        (path / component).mkdir()
        file = "scheduler_config.json" if component == "scheduler" else "config.json"
        (path / component / file).write_text(json.dumps(config))
    return str(path)


def plan(path: Path, name: str, fields: dict[str, Any], **index: Any) -> ClipPlan:
    configs = CONFIGS.get(name, {})
    source = find_model(bare_folder(path, name, configs, **index))
    values: dict[str, Any] = {"prompt": "a red ball", "seed": 7}
    return make_clip_plan(VideoRequest(**(values | fields)), source)


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("Wan", {"num_frames": 34}, "num_frames=34: this model makes 1+4k frames; nearest 33 or 37"),
    ("LTX", {"num_frames": 12}, "num_frames=12: this model makes 1+8k frames; nearest 9 or 17"),
    ("CogVideoX", {"num_frames": 13}, "this model makes 8k or 1+8k frames; nearest 9 or 16"),
    ("CogVideoX", {"num_frames": 5}, "this model makes 8k or 1+8k frames; nearest 1 or 8"),
    ("HunyuanVideo", {"num_frames": 34}, "this model makes 1+4k frames; nearest 33 or 37"),
    ("Mochi", {"num_frames": 12}, "this model makes 1+6k frames; nearest 7 or 13"),
    ("Wan", {"size": (840, 480)}, "size='840x480': width must be a multiple of 16 and height of"),
    ("Wan", {"size": (832, 488)}, "nearest to 488: 480 or 496"),
    ("LTX", {"size": (720, 512)}, "nearest to 720: 704 or 736"),
    ("CogVideoX", {"size": (728, 480)}, "nearest to 728: 720 or 736"),
    ("HunyuanVideo", {"size": (8, 720)}, "nearest to 8: 16"),
    ("Mochi", {"size": (848, 488)}, "nearest to 488: 480 or 496"),
    ("AnimateDiff", {"size": (514, 512)}, "nearest to 514: 512 or 520"),
    ("Wan", {"mode": "hybrid"}, "mode='hybrid': "),
    ("Wan", {"window": 6}, "window=6: a clip has a window only with attention=window; leave it"),
    ("Wan", {"window": 1, "attention": "window"}, "window=1: the clip has 21 latent frames; 2 to"),
    ("Wan", {"window": 22, "attention": "window"}, "window=22: the clip has 21 latent frames; 2 "),
    ("Wan", {"window": 6, "attention": "chunked"}, "window=6: attention=chunked has none; leave"),
    ("Wan", {"attention": "chunked:8,layers:0=full"}, "a clip is not read so; chunked[:TOKENS] or"),
    ("Wan", {"attention": "topk:2"}, "attention='topk:2': a clip is not read so; chunked[:TOKENS]"),
    ("LTX", {"attention": "chunked"}, "attention='chunked': the attention of LTXPipeline is not"),
    ("Wan", {"sink": 0}, "sink=0: clip mode has no such field"),
    ("Wan", {"attention": "global"}, "attention='global': a clip is not read so; chunked[:TOKENS]"),
    ("Wan", {"sampler": "lcm"}, "sampler='lcm': clip mode has no such field"),
    ("Wan", {"video": "a.mp4"}, "video='a.mp4': clip mode has no such field"),
    ("Wan", {"video": "a", "strength": 0.5}, "video='a': clip mode has no such field"),
    ("Wan", {"prompts": (TimedPrompt(1.0, "b"),)}, "prompts=['b']: clip mode has no such field"),
    ("Wan", {"image": "a.png"}, "image='a.png': WanPipeline starts from text alone"),
    ("WanImageToVideo", {"image": None}, "image=None: WanImageToVideoPipeline starts from an"),
    ("LTXImageToVideo", {"image": None}, "image=None: LTXImageToVideoPipeline starts from an"),
    ("CogVideoX", {"flow_shift": 3.0}, "flow_shift=3.0: the scheduler CogVideoXDDIMScheduler has"),
    ("AnimateDiff", {"flow_shift": 3.0}, "flow_shift=3.0: the scheduler"),
    ("LTX", {"flow_shift": 3.0}, "flow_shift=3.0: the scheduler shifts by size, on its own"),
    ("Wan", {"negative_prompt": "b", "guidance_scale": 1.0}, "has no effect at guidance_scale=1"),
    ("HunyuanVideo", {"negative_prompt": "b"}, "negative_prompt='b': has no effect on Hunyuan"),
    ("SkyReelsV2", {"fps": None}, "fps=None: the rate of SkyReelsV2Pipeline is not known"),
    ("EasyAnimateInpaint", {"seconds": 1.0, "fps": None}, "fps=None: "),
    ("MotifVideo", {"guidance_scale": 2.0}, "guidance_scale=2.0: MotifVideoPipeline takes none"),
    ("LTX2DFR", {"num_inference_steps": 2}, "num_inference_steps=2: LTX2DFRPipeline takes none"),
    ("LTX2DFR", {"negative_prompt": "b"}, "negative_prompt='b': LTX2DFRPipeline takes none"),
    ("LTX2DFR", {"num_frames": None}, "num_frames=None: LTX2DFRPipeline has no length of its own"),
    ("AnimateDiffPAG", {"fps": 8.0, "size": None}, "size=None: AnimateDiffPAGPipeline has no size"),
]


@pytest.mark.parametrize(("family", "fields", "message"), REFUSALS)
def test_illegal_requests_are_refused_by_field(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        plan(tmp_path, f"{family}Pipeline", fields)
    assert message in str(caught.value)
    assert caught.value.field in fields


LENGTHS: list[tuple[str, dict[str, Any], int, float]] = [
    ("Wan", {"seconds": 1.0}, 17, 16.0),
    ("Wan", {"seconds": 0.05}, 1, 16.0),
    ("Wan", {"seconds": 1.0, "fps": 8.0}, 9, 8.0),
    ("Wan", {}, 81, 16.0),
    ("LTX", {"seconds": 1.0}, 25, 25.0),
    ("LTX", {"seconds": 1.0, "fps": 30.0}, 33, 30.0),
    ("CogVideoX", {"seconds": 1.0}, 8, 8.0),
    ("CogVideoX", {}, 49, 8.0),
    ("HunyuanVideo", {"seconds": 0.5}, 13, 24.0),
    ("Mochi", {"seconds": 0.5}, 19, 30.0),
    ("Mochi", {}, 19, 30.0),
    ("AnimateDiff", {"num_frames": 34}, 34, 8.0),
    ("SkyReelsV2", {"seconds": 0.25, "fps": 24.0}, 6, 24.0),
]


@pytest.mark.parametrize(("family", "fields", "frames", "fps"), LENGTHS)
def test_seconds_reach_the_smallest_legal_length(
    tmp_path: Path, family: str, fields: dict[str, Any], frames: int, fps: float
) -> None:
    made = plan(tmp_path, f"{family}Pipeline", fields)
    assert (made.num_frames, made.fps) == (frames, fps)


def test_default_size_is_the_pipelines_own(tmp_path: Path) -> None:
    sizes = {"Wan": (832, 480), "CogVideoX": (720, 480), "Mochi": (848, 480)}
    for family, size in (sizes | {"AnimateDiff": (512, 512)}).items():
        folder = tmp_path / family
        folder.mkdir()
        assert plan(folder, f"{family}Pipeline", {}).size == size


def test_frame_rules_agree_with_counting() -> None:
    for stride, offsets in [(4, (1,)), (8, (0, 1)), (1, (0,)), (4, (0,))]:
        rule = FrameRule(stride, offsets)
        legal = [n for n in range(1, 60) if any(n % stride == o % stride for o in offsets)]
        for frames in range(1, 40):
            assert rule.allows(frames) == (frames in legal)
            assert rule.at_least(frames) == min(n for n in legal if n >= frames)


def test_plan_says_what_will_be_passed(tmp_path: Path) -> None:
    made = plan(tmp_path, "LTXPipeline", {"fps": 30.0, "num_frames": 9, "negative_prompt": "blur"})
    shown = json.loads(json.dumps(made.as_dict()))
    assert shown["arguments"] == {
        "prompt": "a red ball",
        "width": 704,
        "height": 512,
        "num_frames": 9,
        "negative_prompt": "blur",
        "num_inference_steps": 50,
        "guidance_scale": 3,
        "frame_rate": 30.0,
        "output_type": "np",
    }
    assert (shown["mode"], shown["seed"], shown["size"]) == ("clip", 7, "704x512")
    assert (shown["seconds"], shown["flow_shift"], shown["chunks"]) == (0.3, None, {"count": 1})
    assert (made.warnings, made.prompts) == ((), ("a red ball",))


def test_wan_plans_name_shift_rate_and_seed(tmp_path: Path) -> None:
    made = plan(tmp_path, "WanPipeline", {"fps": 24.0, "seed": None}, expand_timesteps=False)
    source = find_model(str(tmp_path))
    assert made.as_dict()["flow_shift"] == 3.0
    assert "trained at 16 and not told the rate, so motion runs 1.5 x as fast" in made.warnings[0]
    assert made.seed != make_clip_plan(VideoRequest(prompt="a"), source).seed
    shifted = make_clip_plan(VideoRequest(prompt="a", flow_shift=5.0), source)
    assert shifted.shift == ("shift", 5.0)


def test_wan_5b_is_known_by_its_per_token_timesteps(tmp_path: Path) -> None:
    assert plan(tmp_path, "WanPipeline", {}, expand_timesteps=True).fps == 24.0


def test_bundled_model_keeps_its_manifests_size_and_rate() -> None:
    source = find_model("papercut")
    made = make_clip_plan(VideoRequest(prompt="a", mode="clip"), source, warnings=["known"])
    assert (made.size, made.fps, made.num_frames) == ((128, 80), 16.0, 81)
    assert (made.steps, made.guidance_scale, made.warnings) == (50, 5.0, ("known",))
    with pytest.raises(RequestError, match=r"^size='832x480': papercut makes no such size; 128x80"):
        make_clip_plan(VideoRequest(prompt="a", mode="clip", size=(832, 480)), source)
    with pytest.raises(RequestError, match=r"^fps='24': papercut was trained at one rate; 16"):
        make_clip_plan(VideoRequest(prompt="a", mode="clip", fps=24), source)


def test_planning_imports_no_torch(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from longtake.video.clip_plan import make_clip_plan
        from longtake.video.request import VideoRequest
        from longtake.video.source import find_model
        make_clip_plan(VideoRequest(prompt="a"), find_model(sys.argv[1]))
        raise SystemExit(int("torch" in sys.modules or "diffusers" in sys.modules))
    """
    folder = bare_folder(tmp_path, "WanPipeline", WAN)
    done = subprocess.run([sys.executable, "-c", code, folder], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("name", "configs", "message"),
    [
        ("StableDiffusionPipeline", {}, "makes no video from text: takes no num_frames"),
        ("StableVideoDiffusionPipeline", {}, "makes no video from text: takes no prompt"),
        ("HunyuanVideo15Pipeline", {}, "takes no callback_on_step_end, so there is neither"),
        ("LucyEditPipeline", {}, "needs video, which no request can give"),
        ("AllegroPipeline", {}, "decodes in tiles only"),
        ("NoSuchPipeline", {}, "is no pipeline of the installed diffusers"),
        (["module", "Custom"], {}, "code of its own, which is not run"),
        ("WanPipeline", {}, "transformer_2: .* does not exist"),
        ("WanPipeline", WAN | {"transformer": {}}, "a config is not usable: KeyError"),
        (
            "HunyuanVideoImageToVideoPipeline",
            HUNYUAN | {"transformer": {"image_condition_type": "latent_concat"}},
            "cuts the first 4 frames",
        ),
    ],
)
def test_pipelines_that_cannot_be_one_chunk_are_refused(
    tmp_path: Path, name: Any, configs: dict[str, Any], message: str
) -> None:
    folder = bare_folder(tmp_path, name, {"vae": WAN["vae"]} | configs)
    image = "ImageToVideo" in name
    with pytest.raises(ModelError, match=message):
        make_clip_plan(VideoRequest(prompt="a"), find_model(folder), image_given=image)


def test_signatures_read_from_source_are_those_of_the_classes() -> None:
    for name in FAMILIES:
        real = inspect.signature(getattr(diffusers, name).__call__).parameters
        read = call_parameters(name)
        assert read is not None
        assert list(read) == [n for n in list(real)[1:] if real[n].kind != real[n].VAR_KEYWORD]
        for parameter, default in read.items():
            required = real[parameter].default is inspect.Parameter.empty
            expected = "<required>" if required else real[parameter].default
            assert default in (expected, OPAQUE)
            assert default != OPAQUE or not isinstance(expected, int | float | str | None)
