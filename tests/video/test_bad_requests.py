"""Requests that are refused: by field, with the nearest legal value, before anything is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from longtake.errors import DeviceError, RequestError
from longtake.schedulers.prompts import TimedPrompt
from longtake.video.generate import Target, generate
from longtake.video.options import EngineOptions
from longtake.video.request import VideoRequest, request_from_mapping

Refuse = Callable[..., str]
MakeModel = Callable[..., Path]

# The tiny model: 1+4k frames at 8 fps, sides of 8k, chunks of 2, window 6, sink 1, 17 frames.
TINY: list[tuple[str, str, str]] = [
    ("num_frames", "--num-frames 34", r"num_frames=34: .*1\+4k frames; nearest 33 or 37"),
    ("num_frames", "--frames 2", r"num_frames=2: .*nearest 1 or 5"),
    ("num_frames", "--num-frames 0", r"num_frames=0: is out of range; from 1 to "),
    ("num_frames", "--num-frames -3", r"num_frames=-3: is out of range; from 1 to "),
    ("num_frames", "--num-frames 10368001", r"num_frames=10368001: .*; from 1 to 10368000"),
    ("num_frames", "--num-frames 5 --seconds 1", r"num_frames=5: seconds=1 is given too"),
    ("seconds", "--seconds 0", r"seconds=0.0: is out of range; above 0 to 86400"),
    ("seconds", "--seconds -1", r"seconds=-1.0: is out of range; above 0 to 86400"),
    ("seconds", "--seconds nan", r"seconds=nan: is not a finite number; above 0 to 86400"),
    ("seconds", "--seconds inf", r"seconds=inf: is not a finite number; above 0 to 86400"),
    ("seconds", "--seconds 1e9", r"seconds=1000000000.0: is out of range; above 0 to 86400"),
    ("size", "--size 127x80", r"size='127x80': width .* of 8 .*; nearest to 127: 120 or 128"),
    ("size", "--size 128x84", r"size='128x84': .*height of 8; nearest to 84: 80 or 88"),
    ("size", "--size 4x80", r"size='4x80': .*; nearest to 4: 8"),
    ("size", "--size 0x80", r"size='0x80': out of range; 1 to 8192 pixels a side"),
    ("size", "--size 99999x80", r"size='99999x80': out of range; 1 to 8192 pixels a side"),
    ("size", "--size abc", r"size='abc': is not WIDTHxHEIGHT; for example 832x480"),
    ("fps", "--fps nan", r"fps=nan: is not a finite number"),
    ("fps", "--fps 0", r"fps=0.0: is out of range; above 0 to 1000"),
    ("fps", "--fps 30", r"fps='30': tiny was trained at one rate; 8"),
    ("seed", "--seed -1", r"seed=-1: is out of range; from 0 to 9223372036854775807"),
    ("seed", f"--seed {2**63}", r"seed=9223372036854775808: .*; from 0 to 9223372036854775807"),
    ("seed", f"--seed {'9' * 400}", r"seed=9+\.\.\. \(400 characters\): is out of range"),
    ("num_inference_steps", "--steps 0", r"num_inference_steps=0: is out of range; from 1 to 200"),
    ("num_inference_steps", "--steps -1", r"num_inference_steps=-1: is out of range"),
    ("num_inference_steps", "--steps 1000", r"num_inference_steps=1000: .*; from 1 to 200"),
    ("guidance_scale", "--guidance nan", r"guidance_scale=nan: is not a finite number; from 1 to"),
    ("guidance_scale", "--guidance 0", r"guidance_scale=0.0: is out of range; from 1 to 100"),
    ("guidance_scale", "--guidance -1", r"guidance_scale=-1.0: is out of range; from 1 to 100"),
    ("flow_shift", "--flow-shift 0", r"flow_shift=0.0: is out of range; above 0 to 100"),
    (
        "negative_prompt",
        "--negative-prompt blur --guidance 1",
        r"negative_prompt='blur': .*above 1",
    ),
    (
        "window",
        "--window 2",
        r"window=2: .*must hold sink=1.*; window 3 or more, or sink 0 or less",
    ),
    ("window", "--window 0", r"window=0: is out of range; from 1 to 1000000"),
    ("sink", "--sink 5", r"sink=5: .*; window 7 or more, or sink 4 or less"),
    ("sink", "--sink -1", r"sink=-1: is out of range; from 0 to 1000000"),
    ("window", "--attention global --window 6", r"window=6: .*; attention=window"),
    ("sink", "--attention global --sink 1", r"sink=1: attention=global has none"),
    ("attention", "--attention global --num-frames 4101", r"exceed this model's 1024 positions"),
    ("attention", "--attention ring", r"'ring' is no attention plan; window, global, chunked\[:"),
    ("attention", "--attention topk:1.5", r"'1.5' is neither .*; topk:0.5 for half of the past"),
    ("attention", "--attention chunked:0", r"'0' is not a whole number above 0; chunked:1 or more"),
    ("attention", "--attention window:6", r"has a field of its own; window with window=6"),
    ("attention", "--attention global,layers:9=full", r"not a range of 3 layers; layers:0-2"),
    ("attention", "--attention window,steps:2=full", r"not a range of 2 steps; steps:0-1 at most"),
    ("window", "--attention global+topk:2 --window 6", r"window=6: .*; attention=window\+topk:2"),
    ("prompts", "--at 1.9 b --at 1 c", r"prompts='at 1 s': times must .*increase; above 1.9 s"),
    ("prompts", "--at 100 b", r"prompts='at 100 s': no chunk of this video starts at or after"),
    ("prompts", "--at 0.1 b --at 0.2 c", r"prompts='at 0.2 s': falls into the same chunk as the"),
    ("prompts", "--at soon b", r"prompts='soon': is not a time in seconds; --at 4.0 TEXT"),
    ("prompts", "--at nan b", r"prompts=nan: at of entry 1 is not a finite number"),
    ("prompts", "--at 0 b", r"prompts='at 0 s': times must be above 0"),
    ("prompts", "--at -1 b", r"prompts=-1.0: at of entry 1 is out of range; from 0 to 86400"),
    ("prompts", "--at 1 ''", r"prompts='': prompt of entry 1 is empty"),
    ("strength", "--strength 0.5", r"strength=0.5: needs a video to redraw; give video"),
    ("strength", "--strength 1.5 --video a.mp4", r"strength=1.5: is out of range; from 0 to 1"),
    ("strength", "--strength nan --video a.mp4", r"strength=nan: is not a finite number"),
    ("image", "--image a.png --video b.mp4", r"image='a.png': video=b.mp4 is given too; give one"),
    ("mode", "--mode clip", r"mode='clip': model 'tiny' does not run that way; hybrid"),
    ("threads", "--threads 0", r"threads=0: is out of range; 1 or more"),
]

# The bundled model, and whole command lines.
OTHERS: list[tuple[str, str, str]] = [
    ("size", "{make} --size 127x80", r"size='127x80': papercut makes no such size; 128x80"),
    ("prompt", "generate '' -o out/a.mp4", r"prompt='': is empty; say what"),
    ("prompt", "generate ' \t\n ' -o out/a.mp4", r"prompt=.*: is empty"),
    ("prompt", "generate -o out/a.mp4", r"prompt=None: is missing"),
    ("prompt", "plan --num-frames 5", r"prompt=None: is missing"),
    ("prompt", f"generate '{'ball ' * 20_000}' -o out/a.mp4", r"prompt=.*at most 8000 characters"),
    ("negative_prompt", f"{{make}} --negative-prompt {'b' * 8001}", r"negative_prompt=.*at most 8"),
    ("output", "generate 'a red ball'", r"output=None: is missing; -o FILE or --frames-dir DIR"),
    ("num_frames", "plan 'a red ball' --frames 34", r"num_frames=34: .*nearest 33 or 37"),
    ("sink", "{make} --mode clip --sink 2", r"sink=2: clip mode has no such field"),
    ("num_frames", "{make} --mode clip --frames 34", r"num_frames=34: .*nearest 33 or 37"),
    ("backend", "{make} --mode clip --backend flash", r"backend='flash': .*; sdpa"),
    ("", "{make} --num-frames 4.5", r"argument --num-frames/--frames: invalid int value: '4.5'"),
    ("", "{make} --fps fast", r"argument --fps: invalid float value: 'fast'"),
    ("", "{make} --dtype fp8", r"argument --dtype: invalid choice: 'fp8' .*fp32.*bf16"),
    ("", "{make} --backend sage", r"argument --backend: invalid choice: 'sage' .*sdpa"),
    ("", "{make} --sampler ddim", r"argument --sampler: invalid choice: 'ddim' .*euler.*lcm"),
    ("", "{make} --format avi", r"argument --format: invalid choice: 'avi' .*mp4"),
    ("", "{make} --at 4", r"argument --at: expected 2 arguments"),
    ("", "dream 'a red ball'", r"invalid choice: 'dream'"),
    ("", "", r"required: COMMAND"),
]


@pytest.mark.parametrize(("field", "flags", "message"), TINY)
def test_illegal_values_name_the_nearest_legal_ones(
    refuse: Refuse, make_model: MakeModel, field: str, flags: str, message: str
) -> None:
    make_model("tiny")
    assert refuse(f"{{tiny}} {flags}", 2, message) == field


@pytest.mark.parametrize(("field", "line", "message"), OTHERS, ids=[o[2] for o in OTHERS])
def test_illegal_command_lines(refuse: Refuse, field: str, line: str, message: str) -> None:
    assert refuse(line, 2, message) == field


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--device cuda", r"device='cuda': not available here; usable: .*cpu"),
        ("--device cuda:7", r"device='cuda:7': "),
        ("--device toaster", r"device='toaster': not available here; usable: .*cpu"),
        ("--device meta", r"device='meta': not available here"),
        ("--backend flash --device cpu", r"backend=flash: needs a CUDA device, this is cpu"),
        ("--backend xformers --device cpu", r"backend=xformers: needs a CUDA device, this is cpu"),
    ],
)
def test_devices_and_backends_that_are_not_there(
    refuse: Refuse,
    make_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    message: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    make_model("tiny")
    refuse(f"{{tiny}} {flags}", 3, message)


def test_a_prompt_longer_than_the_model_reads(refuse: Refuse, make_model: MakeModel) -> None:
    make_model("tiny")
    line = f"generate '{'ball ' * 40}' --model tiny -o out/a.mp4"
    assert refuse(line, 2, r"prompt=.*has 41 tokens, tiny reads 32; at most 32 tokens") == "prompt"


@pytest.mark.parametrize(
    ("field", "flags"),
    [
        ("negative_prompt", f"--guidance 2 --negative-prompt '{'ball ' * 40}'"),
        ("prompts", f"--at 1 '{'ball ' * 40}'"),
    ],
)
def test_other_texts_longer_than_the_model_reads(
    refuse: Refuse, make_model: MakeModel, field: str, flags: str
) -> None:
    make_model("tiny")
    assert refuse(f"{{tiny}} {flags}", 2, r"has 41 tokens, tiny reads 32") == field


MAPPINGS: list[tuple[str, Any, str]] = [
    ("colour", "red", "no such field; fields: prompt, negative_prompt, prompts, "),
    ("num_frames", True, "got bool, expected int"),
    ("num_frames", "33", "got str, expected int"),
    ("num_frames", 33.0, "got float, expected int"),
    ("seconds", "8", "got str, expected int or float"),
    ("seconds", False, "got bool, expected int or float"),
    ("seed", 1.5, "got float, expected int"),
    ("prompt", None, "got NoneType, expected str"),
    ("prompt", ["a", "b"], "got list, expected str"),
    ("prompt", "\u2003", "is empty"),
    ("model", None, "got NoneType, expected str"),
    ("mode", "loop", "no such choice; hybrid or clip"),
    ("sampler", "ddim", "no such choice; euler or lcm"),
    ("attention", "ring", "'ring' is no attention plan; window, global, chunked"),
    ("attention", 5, "got int, expected str"),
    ("strength", "all", "got str, expected int or float"),
    ("size", [128], "is not a pair of whole numbers"),
    ("size", [128, 80.0], "is not a pair of whole numbers"),
    ("size", [True, 80], "is not a pair of whole numbers"),
    ("size", 128, "is not a pair of whole numbers"),
    ("size", "128x80x3", "is not WIDTHxHEIGHT"),
    ("fps", 10**400, "is out of range; above 0 to 1000"),
    ("window", 10**400, "is out of range; from 1 to 1000000"),
    ("prompts", "later", "is not a list of {at, prompt}"),
    ("prompts", {"at": 1, "prompt": "b"}, "is not a list of {at, prompt}"),
    ("prompts", ["later"], "is not of the form {at: seconds, prompt: text}"),
    ("prompts", [{"at": 1}], "is not of the form {at: seconds, prompt: text}"),
    ("prompts", [{"at": 1, "prompt": "b", "fade": 2}], "is not of the form"),
    ("prompts", [{"at": "1", "prompt": "b"}], "at must be a number and prompt a text"),
    ("prompts", [{"at": True, "prompt": "b"}], "at must be a number and prompt a text"),
    ("prompts", [{"at": 1, "prompt": None}], "at must be a number and prompt a text"),
    ("prompts", [{"at": math.nan, "prompt": "b"}], "is not a finite number"),
    ("prompts", [{"at": 10**400, "prompt": "b"}], "is out of range"),
]


@pytest.mark.parametrize(("field", "value", "message"), MAPPINGS)
def test_illegal_json(field: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        request_from_mapping({"prompt": "a red ball", field: value})
    assert message in str(caught.value)
    assert caught.value.field == field


def test_a_prompt_is_required() -> None:
    with pytest.raises(RequestError, match="prompt=None: is missing"):
        request_from_mapping({"seconds": 2})


@pytest.mark.parametrize("timeline", [["b"], ("b",), (("1", "b"),), TimedPrompt(1.0, "b")])
def test_a_timeline_holds_timed_prompts(timeline: Any) -> None:
    with pytest.raises(RequestError, match="is not a tuple of TimedPrompt"):
        VideoRequest(prompt="a", prompts=timeline)


def refused_options(options: EngineOptions, folder: Path) -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        generate(VideoRequest(prompt="a", num_frames=1), Target(folder / "a.mp4"), options)
    return caught.value


def test_engine_options_are_checked_without_a_command_line(tmp_path: Path) -> None:
    said: Sequence[str] = [
        str(refused_options(EngineOptions(dtype="fp64"), tmp_path)),
        str(refused_options(EngineOptions(device="tpu"), tmp_path)),
    ]
    assert said[0] == "dtype='fp64': no such dtype; fp32, bf16, fp16"
    assert said[1].startswith("device='tpu': not available here; usable: ")
    assert list(tmp_path.iterdir()) == []


def test_nowhere_to_write() -> None:
    with pytest.raises(RequestError, match="output=None: is missing"):
        generate(VideoRequest(prompt="a", num_frames=1), Target(None))
