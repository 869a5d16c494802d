"""Requests: JSON there and back, durations without rounding error, nearest legal values."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from longtake.schedulers.prompts import TimedPrompt
from longtake.video.request import (
    REQUEST_FIELDS,
    VideoRequest,
    format_size,
    frames_for_seconds,
    nearest_frames,
    nearest_multiple,
    parse_size,
    request_from_mapping,
    request_to_mapping,
)

EVERYTHING: dict[str, Any] = {
    "prompt": "a red ball \N{SNOWMAN}",
    "negative_prompt": "blur",
    "prompts": [{"at": 1.5, "prompt": "a blue star"}, {"at": 3.0, "prompt": "rain"}],
    "seconds": 8.5,
    "size": "832x480",
    "fps": 16.0,
    "seed": 2**63 - 1,
    "model": "papercut",
    "mode": "hybrid",
    "num_inference_steps": 4,
    "guidance_scale": 3.0,
    "flow_shift": 5.0,
    "sampler": "lcm",
    "window": 12,
    "sink": 3,
    "attention": "window",
    "video": "clip.mp4",
    "strength": 0.4,
}


def test_json_round_trip() -> None:
    request = request_from_mapping(json.loads(json.dumps(EVERYTHING)))
    assert request.size == (832, 480)
    assert request.prompts == (TimedPrompt(1.5, "a blue star"), TimedPrompt(3.0, "rain"))
    assert request_to_mapping(request) == EVERYTHING
    assert set(EVERYTHING) | {"num_frames", "image"} == set(REQUEST_FIELDS)


def test_what_is_left_to_the_model_is_absent() -> None:
    request = request_from_mapping({"prompt": "a", "prompts": None, "seconds": None, "size": None})
    assert request == VideoRequest(prompt="a")
    assert request_to_mapping(request) == {"prompt": "a", "model": "papercut"}


@pytest.mark.parametrize("size", ["832x480", "832X480", " 832x480 ", [832, 480], (832, 480)])
def test_size_as_text_or_pair(size: Any) -> None:
    assert request_from_mapping({"prompt": "a", "size": size}).size == (832, 480)
    assert format_size(parse_size("832x480")) == "832x480"


def test_limits_are_legal() -> None:
    VideoRequest(prompt="a" * 8000, seconds=86_400, seed=0, strength=0.0, video="a", sink=0)
    VideoRequest(prompt="a", num_frames=1, seed=2**63 - 1, strength=1.0, video="a")
    VideoRequest(prompt="a", negative_prompt="", guidance_scale=1, num_inference_steps=200)
    VideoRequest(prompt="a", fps=1e-3, size=(8192, 1), window=1_000_000, flow_shift=100)


def test_whole_numbers_stand_for_floats_and_nothing_is_converted() -> None:
    request = request_from_mapping({"prompt": "a", "seconds": 8, "fps": 16, "guidance_scale": 3})
    assert [type(v) for v in (request.seconds, request.fps, request.guidance_scale)] == [int] * 3


def test_requests_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        VideoRequest(prompt="a").seed = 5  # type: ignore[misc]


# products are exact in decimals, though not in floats: 2.2 * 25 is 55.00000000000001
DURATIONS: list[tuple[float, float, int, int]] = [
    (2.2, 25, 1, 55),
    (0.28, 25, 1, 7),
    (8.3, 30, 4, 249),
    (0.07, 100, 1, 7),
    (0.1 * 3, 10, 1, 4),  # 0.30000000000000004 s is longer than three frames
    (0.3, 10, 1, 3),
    (8.0625, 16, 4, 129),
    (8.0626, 16, 4, 133),
    (8, 16, 4, 129),
    (5.0625, 16.0, 4, 81),
    (1.001, 23.976, 1, 24),
    (1e-9, 16, 4, 1),
    (1 / 16, 16, 4, 1),
    (0.07, 16, 4, 5),
    (86_400, 16, 4, 1_382_401),
]


@pytest.mark.parametrize(("seconds", "fps", "stride", "frames"), DURATIONS)
def test_seconds_resolve_to_the_smallest_count_that_reaches_them(
    seconds: float, fps: float, stride: int, frames: int
) -> None:
    assert frames_for_seconds(seconds, fps, stride) == frames


def test_every_duration_of_whole_frames_is_met_exactly() -> None:
    for hundredths in range(1, 400):
        seconds = float(f"{hundredths / 100:.2f}")
        assert frames_for_seconds(seconds, 100.0, 1) == hundredths


def test_nearest_values() -> None:
    assert nearest_frames(34, 4) == "33 or 37"
    assert nearest_frames(2, 4) == "1 or 5"
    assert nearest_frames(36, 4) == "33 or 37"
    assert nearest_multiple(130, 16) == "128 or 144"
    assert nearest_multiple(5, 16) == "16"


# A module, and a few words that make it work before torch could be noticed missing.
LIGHT = (
    "errors", "schedulers.chunks", "schedulers.noise", "schedulers.prompts", "schedulers.samplers",
    "video.manifest", "video.source", "video.shapes", "video.cost", "video.request", "video.plan",
    "video.vocabulary", "video.capabilities", "video.clip_plan",
)  # fmt: skip


def test_requests_and_plans_import_no_torch() -> None:
    code = f"""if True:
        import sys
        import {", ".join(f"longtake.{name}" for name in LIGHT)}
        from longtake.video.plan import make_plan
        from longtake.video.request import VideoRequest
        from longtake.video.shapes import read_shape
        from longtake.video.source import find_model
        from longtake.video.vocabulary import unknown_words
        manifest = find_model("papercut").manifest
        plan = make_plan(VideoRequest(prompt="a dragon"), manifest, read_shape(manifest))
        plan.as_dict()
        unknown_words(manifest, ["a dragon"])
        heavy = [m for m in ("torch", "diffusers", "transformers") if m in sys.modules]
        raise SystemExit(" ".join(heavy) or None)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
