"""Bodies of requests: field names, types, and what each means. The OpenAPI is made from these.

Types are checked here, in the way forms need it (numbers may come as text); legal values are the
plan's affair, which names the nearest one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from longtake.api.errors import ApiError
from longtake.video.attention_plan import LEGAL as ATTENTION_PLANS

MAX_TAGS, MAX_TAG = 32, 64
EXAMPLE_ID = "video_abcdefghijkmnpqrstuvwxyz"
MAX_POINTER = 200  # names come from the body, and are not sent back at any length
B = TypeVar("B", bound=BaseModel)
# what people write for a field's own name
ALIASES = {
    "step": "num_inference_steps",
    "steps": "num_inference_steps",
    "num_steps": "num_inference_steps",
    "guidance": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "frames": "num_frames",
    "n_frames": "num_frames",
    "duration": "seconds",
    "length": "seconds",
    "resolution": "size",
    "image": "input_reference",
    "image_url": "input_reference",
    "init_image": "input_reference",
    "frame_rate": "fps",
}
# settings of the service: whoever runs it decides, not whoever asks
ENGINE_OPTIONS = frozenset(
    {
        "device",
        "dtype",
        "offload",
        "compile",
        "parallel",
        "backend",
        "threads",
        "queue",
        "kv_cache",
        "profile",
    }
)


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("got true or false, expected a number")
    return value


def plain_text(value: str) -> str:
    """Text that every database and JSON reader can hold."""
    if "\x00" in value:
        raise ValueError("holds a null character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair") from None
    return value


def _plain_tag(value: str) -> str:
    if not value.strip() or any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise ValueError("is empty or holds control characters")
    return value.strip()


Text = Annotated[str, AfterValidator(plain_text)]
Whole = Annotated[int, BeforeValidator(_no_bool)]
Number = Annotated[float, BeforeValidator(_no_bool)]
Tag = Annotated[
    str, Field(max_length=MAX_TAG), AfterValidator(plain_text), AfterValidator(_plain_tag)
]
Tags = Annotated[list[Tag], Field(max_length=MAX_TAGS)]
Priority = Annotated[Whole, Field(ge=0, le=9)]


def _example(**fields: Any) -> ConfigDict:
    """A body's configuration with an example for readers of the OpenAPI."""
    return ConfigDict(extra="forbid", json_schema_extra={"examples": [fields]})


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TimedText(_Body):
    """From ``at`` seconds on the video follows ``prompt``."""

    at: Number
    prompt: Text


class Reference(_Body):
    """An input: exactly one of its members."""

    image_url: Text | None = Field(None, description="data: URL, or https where that is allowed")
    video_url: Text | None = Field(None, description="the same, of a video")
    file_id: Text | None = Field(None, description="an input of an earlier video")
    id: Text | None = Field(None, description="a video made here")


class RequestFields(_Body):
    """What every way to make a video takes besides its prompt."""

    negative_prompt: Text | None = Field(None, description="what guidance steers away from")
    prompts: list[TimedText] | None = Field(
        None, description="timeline of later prompts; in a form, JSON text"
    )
    seconds: Number | None = Field(
        None, description="duration; resolves to the smallest legal frame count that reaches it"
    )
    num_frames: Whole | None = Field(None, description="exact number of frames")
    size: Text | None = Field(None, description="WIDTHxHEIGHT in pixels")
    width: Whole | None = Field(None, description="pixels, with height in place of size")
    height: Whole | None = Field(None, description="pixels, with width in place of size")
    fps: Number | None = Field(None, description="frames per second")
    seed: Whole | None = Field(None, description="drawn once where absent, and shown")
    num_inference_steps: Whole | None = Field(None, description="denoising steps of a chunk")
    guidance_scale: Number | None = Field(None, description="1 is off")
    flow_shift: Number | None = Field(None, description="shift of the noise schedule")
    sampler: Text | None = Field(None, description="euler or lcm")
    window: Whole | None = Field(None, description="latent frames a query sees")
    sink: Whole | None = Field(None, description="first latent frames that are never evicted")
    attention: Text | None = Field(
        None,
        description=f"what a chunk reads of the past: {ATTENTION_PLANS}; clauses may name layers "
        "or steps (docs/attention.md)",
    )
    strength: Number | None = Field(
        None, description="0 to 1, how much of an input video is noised away"
    )
    mode: Text | None = Field(None, description="hybrid or clip")
    model: Text | None = Field(None, description="a name that GET /v1/models lists")


class JobFields(_Body):
    """What belongs to the job and not to the video."""

    priority: Priority | None = Field(None, description="0 is first, 9 last; 5 where absent")
    tags: Tags | None = Field(
        None, description="for finding it again; in a form, repeated or JSON text"
    )


class CreateVideo(RequestFields, JobFields):
    """A video to make."""

    model_config = _example(prompt="a red ball bouncing over a green meadow", seconds=5)

    prompt: Text = Field(description="what the video shows")
    input_reference: Reference | Text | None = Field(
        None, description="start image, or a video to continue or (with strength) to redraw"
    )


class RemixVideo(RequestFields, JobFields):
    """Another prompt for a video that was asked for before; all else stays unless given."""

    model_config = _example(prompt="a blue ball bouncing over a green meadow")

    prompt: Text = Field(description="replaces the prompt and its timeline")


class ExtendVideo(RequestFields, JobFields):
    """A video to go on with; ``seconds`` is the length of the whole."""

    model_config = _example(prompt="the ball rolls away", seconds=10, video={"id": EXAMPLE_ID})

    prompt: Text = Field(description="what happens from there on")
    video: Reference | Text | None = Field(None, description="video made here, or a file")


class EditVideo(RequestFields, JobFields):
    """A video to redraw after a prompt."""

    model_config = _example(prompt="the same in snow", video={"id": EXAMPLE_ID}, strength=0.6)

    prompt: Text = Field(description="what it shall show")
    video: Reference | Text | None = Field(None, description="video made here, or a file")


class Before(_Body):
    """A place in the queue: in front of that video."""

    before: Text


class After(_Body):
    """A place in the queue: behind that video."""

    after: Text


class ChangeVideo(RequestFields):
    """What can be changed: the request itself only while it is queued."""

    prompt: Text | None = Field(None, description="what the video shows")
    priority: Priority | None = Field(None, description="0 is first, 9 last")
    paused: bool | None = Field(None, description="a paused video waits until it is not")
    position: Literal["first", "last"] | Before | After | None = Field(
        None, description="place among the queued videos of its priority"
    )
    tags: Tags | None = Field(None, description="replace those it has")
    starred: bool | None = Field(None, description="starred videos are kept by retention")


class CancelVideo(_Body):
    """How to cancel."""

    keep: bool = Field(False, description="make a video of the chunks that are finished")


def body_schema(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is ``model`` in JSON or a form.

    In a form the reference may be a file; ``openapi.py`` describes that as ``<name>Form``.
    """
    name = model.__name__
    content = {
        "application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}},
        "multipart/form-data": {"schema": {"$ref": f"#/components/schemas/{name}Form"}},
    }
    return {"requestBody": {"required": required, "content": content}}


def read_fields(model: type[B], fields: Mapping[str, Any]) -> B:
    """``fields`` as ``model``.

    Raises:
        ApiError: 400; names every fault, and the field that an unknown one may have meant.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _refusal(model, error) from None


# in place of pydantic's own, which speak of parsing
WORDS = {
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "int_parsing": "is not a whole number",
    "int_type": "is not a whole number",
    "int_from_float": "is not a whole number",
    "bool_parsing": "is neither true nor false",
    "bool_type": "is neither true nor false",
    "string_type": "is not a text",
}


def _refusal(model: type[BaseModel], error: ValidationError) -> ApiError:
    faults: list[tuple[str, str]] = []
    code = "invalid_value"
    for item in error.errors(include_url=False, include_input=False, include_context=False):
        # unions name the member they tried; it is no part of the body
        path = [str(part) for part in item["loc"] if not _MEMBER.match(str(part))]
        pointer = "".join(f"/{part.replace('~', '~0').replace('/', '~1')}" for part in path)
        pointer = pointer[:MAX_POINTER]
        if item["type"] == "extra_forbidden" and len(path) == 1:
            code = "unknown_field" if not faults else code
            faults.append((pointer, _unknown(path[0], model)))
        elif item["type"] == "missing":
            code = "missing_field" if not faults else code
            faults.append((pointer, "is missing"))
        else:
            told = WORDS.get(item["type"], str(item["msg"]).removeprefix("Value error, "))
            faults.append((pointer, told))
    pointer, detail = faults[0]
    field = pointer[1:].partition("/")[0]
    shown = field if len(field) <= 80 else f"{field[:60]}..."
    param = shown or None
    return ApiError(400, f"{shown}: {detail}", code=code, param=param, errors=faults[:20])


_MEMBER = re.compile(r"^(Reference|Before|After|function-after\[.*|literal\[.*)$")


def _unknown(name: str, model: type[BaseModel]) -> str:
    if name in ENGINE_OPTIONS:
        return "is a setting of the service, not a field of a request"
    known = list(model.model_fields)
    alias = ALIASES.get(name.lower())
    near = [alias] if alias in known else get_close_matches(name, known, n=2, cutoff=0.6)
    if near:
        return f"no such field; nearest: {' or '.join(near)}"
    return f"no such field; fields: {', '.join(known)}"
