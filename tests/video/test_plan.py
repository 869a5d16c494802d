"""Plans: what a request becomes, and what its JSON says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longtake.errors import RequestError
from longtake.schedulers.prompts import TimedPrompt
from longtake.video.manifest import Manifest, read_manifest
from longtake.video.options import EngineOptions
from longtake.video.plan import Inputs, Plan, make_plan
from longtake.video.prepare import plan_request
from longtake.video.request import VideoRequest
from longtake.video.shapes import read_shape
from longtake.video.source import find_model
from longtake.video.vocabulary import vocabulary_warnings

MakeModel = Callable[..., Path]


@pytest.fixture
def tiny(make_model: MakeModel) -> Manifest:
    """Chunks of 2, window 6, sink 1, 32x16 at 8 fps, 17 frames, 2 steps with shift 3."""
    return read_manifest(make_model() / "longtake.json")


@pytest.fixture
def bundled() -> Manifest:
    """128x80 at 16 fps, 81 frames."""
    manifest = find_model("papercut").manifest
    assert manifest is not None
    return manifest


def plan_of(manifest: Manifest, inputs: Inputs | None = None, **fields: Any) -> Plan:
    """A plan for a red ball, with seed 5 unless another is given."""
    request = VideoRequest(**{"prompt": "a red ball", "seed": 5, **fields})
    return make_plan(request, manifest, read_shape(manifest), inputs=inputs)


LENGTHS: list[tuple[dict[str, Any], int]] = [
    ({}, 81),
    ({"seconds": 8.0625}, 129),  # times 16 is 129 exactly
    ({"seconds": 8.063}, 133),
    ({"seconds": 8}, 129),
    ({"seconds": 0.1 * 3}, 5),
    ({"seconds": 0.3125}, 5),
    ({"seconds": 0.3125000001}, 9),
    ({"seconds": 1e-6}, 1),
    ({"num_frames": 1}, 1),
]


@pytest.mark.parametrize(("fields", "frames"), LENGTHS)
def test_lengths(bundled: Manifest, fields: dict[str, Any], frames: int) -> None:
    made = plan_of(bundled, **fields)
    assert made.num_frames == frames
    assert made.seconds == frames / 16
    assert made.seconds >= fields.get("seconds", 0)
    assert made.layout.latent_frames == 1 + (frames - 1) // 4
    assert sum(c.keep for c in made.chunks) == made.layout.latent_frames
    assert made.as_dict()["request"].get("seconds") == fields.get("seconds")


def test_the_manifests_values_are_the_defaults(tiny: Manifest) -> None:
    made = plan_of(tiny)
    assert (made.size, made.fps, made.num_frames, made.seed) == ((32, 16), 8.0, 17, 5)
    assert (made.layout.chunk, made.layout.window, made.layout.sink) == (2, 6, 1)
    assert (made.sampler, made.steps, made.guidance_scale) == ("euler", 2, 1.0)
    assert made.sigmas == pytest.approx((1.0, 0.75, 0.0))
    assert (made.context_noise, made.context_noise_added, made.text_length) == (0.05, True, 32)
    assert (made.latent_shape, made.frame_tokens, made.guided) == ((4, 4, 8), 8, False)
    assert (made.attention, made.input_kind, made.warnings) == ("window", "text", ())


def test_a_request_overrules_the_manifest(tiny: Manifest) -> None:
    made = plan_of(
        tiny,
        size=(64, 32),
        num_inference_steps=4,
        flow_shift=1.0,
        guidance_scale=2.0,
        negative_prompt="blur",
        sampler="lcm",
        window=8,
        sink=2,
    )
    assert (made.size, made.latent_shape, made.frame_tokens) == ((64, 32), (4, 8, 16), 32)
    assert made.sigmas == pytest.approx((1.0, 0.75, 0.5, 0.25, 0.0))
    assert (made.layout.window, made.layout.sink, made.sampler) == (8, 2, "lcm")
    assert (made.guided, made.negative_prompt) == (True, "blur")


def test_a_seed_is_drawn_where_none_is_given(tiny: Manifest) -> None:
    seeds = {plan_of(tiny, seed=None).seed for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert plan_of(tiny, seed=0).seed == 0


@pytest.mark.parametrize("fields", [{"num_frames": 129}, {"num_frames": 5}, {"window": 9}])
def test_capacity_is_what_the_widest_chunk_sees(tiny: Manifest, fields: dict[str, Any]) -> None:
    made = plan_of(tiny, **fields)
    assert made.layout.capacity >= max(len(c.past) + c.frames for c in made.chunks)
    assert made.layout.capacity <= (made.layout.window or 0)


def test_a_prompt_timeline_is_placed_on_chunks(tiny: Manifest) -> None:
    later = (TimedPrompt(0.625, "star"), TimedPrompt(1.7, "rain"))
    made = plan_of(tiny, num_frames=33, prompts=later)
    # chunks start at pixel frames 0, 5, 13, 21, 29
    assert [(s.chunk, s.starts) for s in made.switches] == [(1, 5 / 8), (3, 21 / 8)]
    assert made.prompts == ("a red ball", "star", "rain")
    assert made.recache
    assert not plan_of(replace(tiny, recache=False), num_frames=33, prompts=later).recache
    assert not plan_of(tiny).recache


def test_json_has_every_key_that_receipts_and_tables_use(bundled: Manifest) -> None:
    made = plan_of(bundled, num_frames=33, prompts=(TimedPrompt(1.0, "a blue star"),))
    data = json.loads(json.dumps(made.as_dict()))
    assert list(data) == [
        "request", "model", "mode", "seed", "size", "fps", "num_frames", "seconds",
        "latent_frames", "input", "chunks", "attention", "attention_plan", "window",
        "sink", "kv_cache", "backend", "profile", "sampler", "num_inference_steps", "sigmas",
        "guidance_scale",
        "negative_prompt", "context_noise", "context_noise_added", "recache", "prompts",
        "cost", "warnings",
    ]  # fmt: skip
    assert (data["model"], data["mode"], data["size"]) == ("papercut", "hybrid", "128x80")
    assert data["request"]["prompts"] == [{"at": 1.0, "prompt": "a blue star"}]
    assert data["chunks"] == {"count": 3, "frames": 3, "first": [3] * 3, "sees": [3, 6, 9]}
    assert data["prompts"] == [{"at": 1.0, "starts": 1.3125, "chunk": 2, "prompt": "a blue star"}]
    cost = data["cost"]
    tokens = [cost[f"tokens_{of}"] for of in ("per_frame", "per_chunk", "in_window")]
    assert tokens == [40, 120, 360]
    assert set(cost["flops"]) == {"denoise", "clean", "decode", "encode", "total"}
    assert cost["bytes"]["total"] == sum(v for k, v in cost["bytes"].items() if k != "total")
    assert (cost["seconds"], cost["device"]) == ({}, None)


def test_a_long_plan_lists_its_first_chunks_only(bundled: Manifest) -> None:
    data = plan_of(bundled, seconds=3600).as_dict()
    assert data["chunks"]["count"] == 4801
    assert data["chunks"]["first"] == [3] * 8


INPUTS: list[tuple[Inputs, list[bool], int]] = [
    (Inputs("image", 1), [True, False, False], 1),
    (Inputs("continue", 5), [True, False, False], 5),
    (Inputs("continue", 9), [True, True, False], 9),
    (Inputs("continue", 12), [True, True, False], 9),
    (Inputs("continue", 13, (2, 2)), [True, True, False], 13),
    (Inputs("redraw", 17), [False, False, False], 17),
    (Inputs("redraw", 20), [False, False, False], 17),
]


@pytest.mark.parametrize(("inputs", "given", "used"), INPUTS)
def test_inputs_fill_the_first_chunks(
    tiny: Manifest, inputs: Inputs, given: list[bool], used: int
) -> None:
    redraw = {"video": "clip.mp4", "strength": 0.5} if inputs.kind == "redraw" else {}
    made = plan_of(tiny, inputs, **redraw)
    assert (made.num_frames, made.input_frames) == (17, used)
    assert [c.given for c in made.chunks] == given
    cut = inputs.frames - used
    note = f"input: {used} of {inputs.frames} frames are used, {cut} at the end are not"
    assert made.warnings == ((note,) if cut else ())


@pytest.mark.parametrize(
    ("strength", "sigmas"),
    [
        (0.0, (0.0,)),
        (0.5, (0.5, 0.0)),
        (0.75, (0.75, 0.0)),
        (0.8, (0.8, 0.75, 0.0)),
        (1, (1.0, 0.75, 0.0)),
    ],
)
def test_strength_begins_the_schedule_there(
    tiny: Manifest, strength: float, sigmas: tuple[float, ...]
) -> None:
    made = plan_of(tiny, Inputs("redraw", 17), video="clip.mp4", strength=strength)
    assert made.sigmas == pytest.approx(sigmas)


def test_a_fixed_list_of_timesteps_has_a_fixed_number_of_steps(tiny: Manifest) -> None:
    timesteps = (1000.0, 757.0)
    fixed = replace(tiny, schedule=replace(tiny.schedule, timesteps=timesteps, warp=False))
    assert plan_of(fixed, num_inference_steps=2).sigmas == (1.0, 0.757, 0.0)
    with pytest.raises(RequestError, match=r"num_inference_steps=3: .*fixed list .*; 2$"):
        plan_of(fixed, num_inference_steps=3)


def test_the_global_plan_sees_everything(tiny: Manifest) -> None:
    made = plan_of(tiny, num_frames=33, attention="global")
    assert [len(c.past) for c in made.chunks] == [0, 2, 4, 6, 8]
    assert (made.as_dict()["window"], made.as_dict()["sink"]) == (None, 0)
    short = replace(tiny, max_latent_frames=8)
    with pytest.raises(RequestError, match="exceed this model's 8 positions"):
        plan_of(short, num_frames=33, attention="global")
    assert plan_of(short, num_frames=29, attention="global").layout.capacity == 8
    with pytest.raises(RequestError, match="at most 8"):
        plan_of(short, num_frames=81, window=9)


def test_unknown_words_are_named(bundled: Manifest) -> None:
    words = vocabulary_warnings(bundled, ["a red Dragon over a green meadow"])
    assert words == ("papercut does not know: dragon",)
    request = VideoRequest(
        prompt="a red ball", prompts=(TimedPrompt(2.0, "a sleepy dragon"),), negative_prompt="blur"
    )
    made = plan_request(request, EngineOptions(device="cpu"), probe=False)
    assert made.warnings == ("papercut does not know: sleepy, dragon, blur",)
    assert made.as_dict()["warnings"] == list(made.warnings)


def test_first_chunk_of_one(tiny: Manifest) -> None:
    made = plan_of(replace(tiny, first_chunk=1), num_frames=33)
    assert [c.frames for c in made.chunks] == [1, 2, 2, 2, 2]
    assert [c.keep for c in made.chunks] == [1, 2, 2, 2, 2]
    whole = plan_of(tiny, num_frames=33)
    assert [c.keep for c in whole.chunks] == [2, 2, 2, 2, 1]
