"""What a caller may ask for, and the nearest legal value where it may not.

A request is checked twice: here for values that are wrong for any model, and against the model in
``plan.py``. Nothing is rounded or clamped. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from longtake.errors import RequestError
from longtake.schedulers.prompts import TimedPrompt
from longtake.video.attention_plan import KINDS, check_attention

MAX_PROMPT_CHARACTERS = 8_000
MAX_SECONDS = 86_400
MAX_STEPS = 200
MAX_SIDE = 8_192
SEED_LIMIT = 2**63
MODES = ("hybrid", "clip")
ATTENTION_PLANS = KINDS
SIZE = re.compile(r"^(\d{1,6})[xX](\d{1,6})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRequest:
    """One video as a caller asks for it; None means the model's own value.

    The names are the REST names of design.md section 8.

    Attributes:
        prompt: text the video starts with.
        negative_prompt: what guidance steers away from.
        prompts: timeline of later prompts.
        seconds: duration; resolves to the smallest legal frame count that reaches it.
        num_frames: exact number of pixel frames.
        size: width and height in pixels.
        fps: frames per second.
        seed: 0 .. 2**63 - 1; drawn once where absent.
        model: short name, folder, manifest file or hub id.
        mode: ``hybrid`` (chunk by chunk) or ``clip`` (one pass of a diffusers pipeline).
        num_inference_steps, guidance_scale, flow_shift, sampler: how a chunk is denoised.
        window, sink, attention: what a query sees of the past; ``attention_plan.py`` has the
            grammar of the last.
        image: start image (path).
        video: clip to continue from or, with ``strength``, to redraw (path).
        strength: 0 .. 1, how much of ``video`` is noised away.
    """

    prompt: str
    negative_prompt: str | None = None
    prompts: tuple[TimedPrompt, ...] = ()
    seconds: float | None = None
    num_frames: int | None = None
    size: tuple[int, int] | None = None
    fps: float | None = None
    seed: int | None = None
    model: str = "papercut"
    mode: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    flow_shift: float | None = None
    sampler: str | None = None
    window: int | None = None
    sink: int | None = None
    attention: str | None = None
    image: str | None = None
    video: str | None = None
    strength: float | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        _check_text("prompt", self.prompt, required=True)
        if self.negative_prompt is not None:
            _check_text("negative_prompt", self.negative_prompt, required=False)
        for number, timed in enumerate(self.prompts, start=1):
            what = f"of entry {number} "
            _check_number("prompts", timed.at, low=0.0, high=MAX_SECONDS, what=f"at {what}")
            _check_text("prompts", timed.prompt, required=True, what=f"prompt {what}")
        self._check_lengths()
        self._check_sampling()
        self._check_inputs()

    def _check_lengths(self) -> None:
        if self.seconds is not None and self.num_frames is not None:
            raise RequestError(
                "num_frames", self.num_frames, f"seconds={self.seconds:g} is given too", "give one"
            )
        if self.seconds is not None:
            _check_number("seconds", self.seconds, low=0.0, high=MAX_SECONDS, above=True)
        if self.num_frames is not None:
            _check_number("num_frames", self.num_frames, low=1, high=MAX_SECONDS * 120)
        if self.fps is not None:
            _check_number("fps", self.fps, low=0.0, high=1000.0, above=True)
        if self.size is not None:
            for side in self.size:
                if not 1 <= side <= MAX_SIDE:
                    legal = f"1 to {MAX_SIDE} pixels a side"
                    raise RequestError("size", format_size(self.size), "out of range", legal)

    def _check_sampling(self) -> None:
        _check_choice("mode", self.mode, MODES)
        _check_choice("sampler", self.sampler, ("euler", "lcm"))
        if self.attention is not None:
            check_attention(self.attention)
        if self.seed is not None:
            _check_number("seed", self.seed, low=0, high=SEED_LIMIT - 1)
        if self.num_inference_steps is not None:
            _check_number("num_inference_steps", self.num_inference_steps, low=1, high=MAX_STEPS)
        if self.guidance_scale is not None:
            _check_number("guidance_scale", self.guidance_scale, low=1.0, high=100.0)
        if self.flow_shift is not None:
            _check_number("flow_shift", self.flow_shift, low=0.0, high=100.0, above=True)
        if self.window is not None:
            _check_number("window", self.window, low=1, high=1_000_000)
        if self.sink is not None:
            _check_number("sink", self.sink, low=0, high=1_000_000)

    def _check_inputs(self) -> None:
        if self.image is not None and self.video is not None:
            raise RequestError("image", self.image, f"video={self.video} is given too", "give one")
        if self.strength is not None:
            _check_number("strength", self.strength, low=0.0, high=1.0)
            if self.video is None:
                raise RequestError(
                    "strength", self.strength, "needs a video to redraw", "give video"
                )


REQUEST_FIELDS = tuple(f.name for f in fields(VideoRequest))


def request_from_mapping(data: Mapping[str, Any]) -> VideoRequest:
    """A request from JSON: ``prompts`` as a list of {at, prompt}, ``size`` as "WxH" or a pair.

    Raises:
        RequestError: an unknown field, or an illegal value.
    """
    for name in data:
        if name not in REQUEST_FIELDS:
            known = ", ".join(REQUEST_FIELDS)
            raise RequestError(name, data[name], "no such field", f"fields: {known}")
    if "prompt" not in data:
        raise RequestError("prompt", None, "is missing")
    values = dict(data)
    if isinstance(values.get("size"), str):
        values["size"] = parse_size(values["size"])
    elif isinstance(values.get("size"), list):
        values["size"] = tuple(values["size"])
    values["prompts"] = tuple(_timed(item) for item in _listed(values.get("prompts")))
    return VideoRequest(**values)


def request_to_mapping(request: VideoRequest) -> dict[str, Any]:
    """The JSON form of a request; fields left to the model are absent."""
    data: dict[str, Any] = {}
    for name in REQUEST_FIELDS:
        value = getattr(request, name)
        if value is not None and value != ():
            data[name] = value
    if request.size is not None:
        data["size"] = format_size(request.size)
    if request.prompts:
        data["prompts"] = [{"at": t.at, "prompt": t.prompt} for t in request.prompts]
    return data


def parse_size(text: str) -> tuple[int, int]:
    """``"128x80"`` as (128, 80).

    Raises:
        RequestError: the text is not of that form.
    """
    match = SIZE.match(text.strip())
    if match is None:
        raise RequestError("size", text, "is not WIDTHxHEIGHT", "for example 832x480")
    return int(match[1]), int(match[2])


def format_size(size: tuple[int, int]) -> str:
    """(128, 80) as ``"128x80"``."""
    return f"{size[0]}x{size[1]}"


def frames_for_seconds(seconds: float, fps: float, stride: int) -> int:
    """Smallest 1 + stride * k frames that last at least ``seconds``, without rounding error."""
    wanted = math.ceil(Fraction(repr(seconds)) * Fraction(repr(fps)))
    return 1 + stride * max(0, -(-(wanted - 1) // stride))


def nearest_multiple(value: int, multiple: int) -> str:
    """``"32 or 48"``: the legal values around an illegal one."""
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below else str(multiple)


def nearest_frames(num_frames: int, stride: int) -> str:
    """``"33 or 37"``: the frame counts 1 + stride * k around an illegal one."""
    below = 1 + (num_frames - 1) // stride * stride
    return f"{below} or {below + stride}"


def _check_types(request: VideoRequest) -> None:
    kinds: dict[str, tuple[type, ...]] = {
        **dict.fromkeys(("prompt", "negative_prompt", "model", "mode", "sampler"), (str,)),
        **dict.fromkeys(("attention", "image", "video"), (str,)),
        **dict.fromkeys(("num_frames", "seed", "num_inference_steps", "window", "sink"), (int,)),
        **dict.fromkeys(("seconds", "fps", "guidance_scale", "flow_shift"), (int, float)),
        "strength": (int, float),
    }
    for name, types in kinds.items():
        value = getattr(request, name)
        absent = value is None and name not in ("prompt", "model")
        if absent or (isinstance(value, types) and not isinstance(value, bool)):
            continue
        expected = " or ".join(t.__name__ for t in types)
        raise RequestError(name, value, f"got {type(value).__name__}, expected {expected}")
    timeline = request.prompts
    if not isinstance(timeline, tuple) or not all(type(t) is TimedPrompt for t in timeline):
        raise RequestError("prompts", timeline, "is not a tuple of TimedPrompt")
    size = request.size
    pair = isinstance(size, tuple) and len(size) == 2 and all(type(s) is int for s in size)
    if size is not None and not pair:
        raise RequestError("size", size, "is not a pair of whole numbers", "for example 832x480")


def _check_text(field: str, text: str, *, required: bool, what: str = "") -> None:
    if required and not text.strip():
        raise RequestError(field, text, f"{what}is empty", "say what the video shows")
    if len(text) > MAX_PROMPT_CHARACTERS:
        legal = f"at most {MAX_PROMPT_CHARACTERS} characters"
        raise RequestError(field, text, f"{what}has {len(text)} characters", legal)


def _check_number(
    field: str, value: float, *, low: float, high: float, above: bool = False, what: str = ""
) -> None:
    legal = f"{'above' if above else 'from'} {_exact(low)} to {_exact(high)}"
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(field, value, f"{what}is not a finite number", legal)
    if value < low or value > high or (above and value == low):
        raise RequestError(field, value, f"{what}is out of range", legal)


def _exact(number: float) -> str:
    """A limit as people would type it: no exponent for whole numbers."""
    return str(number) if isinstance(number, int) else f"{number:g}"


def _check_choice(field: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise RequestError(field, value, "no such choice", " or ".join(choices))


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return list(value)
    raise RequestError("prompts", value, "is not a list of {at, prompt}")


def _timed(item: Any) -> TimedPrompt:
    if isinstance(item, TimedPrompt):
        return item
    if not isinstance(item, dict) or set(item) != {"at", "prompt"}:
        raise RequestError("prompts", item, "is not of the form {at: seconds, prompt: text}")
    at, prompt = item["at"], item["prompt"]
    if isinstance(at, bool) or not isinstance(at, int | float) or not isinstance(prompt, str):
        raise RequestError("prompts", item, "at must be a number and prompt a text")
    try:
        return TimedPrompt(float(at), prompt)
    except OverflowError:
        raise RequestError("prompts", at, "is out of range", f"0 to {MAX_SECONDS}") from None
