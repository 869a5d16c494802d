"""Prompt timeline: which prompt each chunk is made with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longtake.errors import RequestError
from longtake.schedulers.chunks import ChunkSpec, pixel_frames


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """From ``at`` seconds on the video follows ``prompt``."""

    at: float
    prompt: str


@dataclass(frozen=True, slots=True)
class PromptSwitch:
    """A timed prompt as it will happen.

    Attributes:
        chunk: index of the first chunk made with the prompt.
        at: seconds asked for.
        starts: seconds at which that chunk's first pixel frame is shown; never before ``at``.
        prompt: the text.
    """

    chunk: int
    at: float
    starts: float
    prompt: str


def resolve_switches(
    timeline: Sequence[TimedPrompt], chunks: Iterable[ChunkSpec], fps: float, stride: int
) -> tuple[PromptSwitch, ...]:
    """Place every timed prompt at the first chunk that starts at or after its time.

    Raises:
        RequestError: times that do not increase, lie outside the video, or fall into one chunk.
    """
    waiting = list(timeline)
    _check_order(waiting)
    switches: list[PromptSwitch] = []
    for spec in chunks:
        if not waiting:
            break
        starts = pixel_frames(spec.start, stride) / fps
        if spec.given or starts < waiting[0].at:
            continue
        timed = waiting.pop(0)
        if waiting and waiting[0].at <= starts:
            raise RequestError(
                "prompts",
                f"at {waiting[0].at:g} s",
                f"falls into the same chunk as the prompt at {timed.at:g} s",
                f"chunks start at {starts:g} s and later; leave a chunk between two prompts",
            )
        switches.append(PromptSwitch(spec.index, timed.at, starts, timed.prompt))
    if waiting:
        raise RequestError(
            "prompts",
            f"at {waiting[0].at:g} s",
            "no chunk of this video starts at or after that time",
            "give an earlier time or a longer video",
        )
    return tuple(switches)


def _check_order(timeline: Sequence[TimedPrompt]) -> None:
    last = 0.0
    for timed in timeline:
        if not timed.at > last:
            raise RequestError(
                "prompts",
                f"at {timed.at:g} s",
                "times must be above 0 and increase",
                f"above {last:g} s",
            )
        last = timed.at
