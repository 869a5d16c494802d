"""What a query reads of the keys in reach: attention plans as data, and their text form. No torch.

    PLAN    = [LAYOUT "+"] READING {"," WHERE "=" READING}  |  LAYOUT {"," WHERE "=" READING}
    LAYOUT  = window | global                what the KV cache holds: sink and newest, or everything
    READING = full                           every key
            | chunked[:TOKENS]               every key, read so many at a time: same result
            | window[:FRAMES]                the sink and the newest latent frames
            | topk:AMOUNT                    the past frames whose keys fit best, by share or number
            | radial[:FRAMES]                all near frames; of farther ones, half as much a ring
    WHERE   = layers:RANGE | steps:RANGE     RANGE = 3 | 0-3 | 2-, from 0; the last one wins

``global+chunked:4096,layers:0-1=full`` reads everything, 4096 keys at a time, but not in the first
two layers. The clean pass is no denoising step: it reads what its layer reads. The chunk's own
frames and the sink are read in every plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from longtake.errors import RequestError
from longtake.video.attention_readings import (
    CHUNK_TOKENS,
    Chunked,
    Full,
    Radial,
    Reading,
    TopK,
    Window,
)

LAYOUTS = ("window", "global")
READINGS = ("full", "chunked", "window", "topk", "radial")
KINDS = ("window", "global", "chunked", "topk", "radial")
MAX_PARTS, PART_TOKENS = 16, 16  # parts that a frame is cut into at most, and their least size
WHERE = re.compile(r"(layers|steps):([0-9]{1,4})(?:(-)([0-9]{1,4})?)?")
LEGAL = "window, global, chunked[:TOKENS], topk:AMOUNT or radial[:FRAMES]"


@dataclass(frozen=True, slots=True)
class Scope:
    """What a plan's readings are resolved against.

    Attributes:
        window, sink, chunk: latent frames: the model's or the request's.
        tokens: of a latent frame.
        layers, steps: how many there are.
    """

    window: int
    sink: int
    chunk: int
    tokens: int
    layers: int
    steps: int


@dataclass(frozen=True, slots=True)
class Override:
    """Another reading in some layers or denoising steps; ``last`` is None for all further ones."""

    axis: str
    first: int
    last: int | None
    reading: Reading

    def holds(self, layer: int, step: int | None) -> bool:
        """True if the reading is for this layer at this step (None: the clean pass)."""
        place = layer if self.axis == "layers" else step
        if place is None:
            return False
        return self.first <= place and (self.last is None or place <= self.last)

    @property
    def text(self) -> str:
        """``layers:0-1=full``."""
        if self.last is None:
            return f"{self.axis}:{self.first}-={self.reading.text}"
        until = "" if self.last == self.first else f"-{self.last}"
        return f"{self.axis}:{self.first}{until}={self.reading.text}"


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What is in reach (``layout``) and what is read of it, by layer and step."""

    layout: str = "window"
    reading: Reading = field(default_factory=Full)
    overrides: tuple[Override, ...] = ()

    @property
    def plain(self) -> bool:
        """True if everything in reach is read in one call, everywhere."""
        return type(self.reading) is Full and not self.overrides

    @property
    def exact(self) -> bool:
        """True if every query's result is that of all keys in reach."""
        return all(r.exact for r in self.readings)

    @property
    def ranks(self) -> bool:
        """True if frames are ranked by their keys somewhere."""
        return any(isinstance(r, TopK) for r in self.readings)

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The reading and those of the overrides."""
        return (self.reading, *(o.reading for o in self.overrides))

    @property
    def text(self) -> str:
        """As ``parse_attention`` reads it; ``window`` or ``global`` for the plain ones."""
        base = self.layout
        if type(self.reading) is not Full:
            base = f"{self.layout}+{self.reading.text}"
        return ",".join((base, *(o.text for o in self.overrides)))

    def reading_at(self, layer: int, step: int | None) -> Reading:
        """What is read in a layer at a denoising step, or in the clean pass (None)."""
        found = self.reading
        for override in self.overrides:
            if override.holds(layer, step):
                found = override.reading
        return found

    def frames_read(self, past: int, own: int, layers: int, step: int | None) -> float:
        """Latent frames' worth of keys that a query reads, averaged over the layers."""
        if not self.overrides:
            return self.reading.frames_read(past, own)
        read = (self.reading_at(layer, step).frames_read(past, own) for layer in range(layers))
        return sum(read) / layers

    def as_dict(self) -> dict[str, Any]:
        """JSON form, everything resolved."""
        return {
            "layout": self.layout,
            "exact": self.exact,
            "reading": _as_dict(self.reading),
            "overrides": [
                {"axis": o.axis, "first": o.first, "last": o.last, "reading": _as_dict(o.reading)}
                for o in self.overrides
            ],
        }


def check_attention(text: str) -> None:
    """Refuse a text that is no attention plan for any model.

    Raises:
        RequestError: of the field ``attention``.
    """
    resolve_attention(text, Scope(2, 0, 1, 256, layers=10_000, steps=10_000))


def layout_of(text: str, *, window_given: bool) -> str:
    """``window`` or ``global``: the plan's own word, or what its reading is for.

    ``topk`` and ``radial`` choose from everything unless the request names a window.
    """
    base = text.split(",", 1)[0]
    for layout in LAYOUTS:
        if base == layout or base.startswith(f"{layout}+"):
            return layout
    chosen = base.split(":", 1)[0] in ("topk", "radial")
    return "global" if chosen and not window_given else "window"


@lru_cache(maxsize=256)  # a service asks at every submission
def resolve_attention(text: str, scope: Scope, *, window_given: bool = False) -> AttentionPlan:
    """The plan that a text means for a model.

    Raises:
        RequestError: of the field ``attention``, with what would be legal.
    """
    base, *clauses = text.split(",")
    layout = layout_of(text, window_given=window_given)
    rest = base.removeprefix(f"{layout}+") if "+" in base else base
    if base.startswith("window:"):
        legal = f"window with window={base.partition(':')[2]}"
        raise RequestError("attention", text, "the window has a field of its own", legal)
    reading: Reading = (
        Full() if rest in LAYOUTS and "+" not in base else _reading(rest, text, scope)
    )
    return AttentionPlan(layout, reading, tuple(_override(c, text, scope) for c in clauses))


def _reading(word: str, text: str, scope: Scope) -> Reading:
    kind, colon, argument = word.partition(":")
    if kind not in READINGS:
        raise RequestError("attention", text, f"{word!r} is no attention plan", LEGAL)
    if colon and not argument:
        raise RequestError("attention", text, f"{kind} has nothing after its colon", LEGAL)
    if kind == "full":
        if colon:
            raise RequestError("attention", text, "full takes nothing", "full")
        return Full()
    if kind == "chunked":
        return Chunked(_whole(argument, text, "chunked", CHUNK_TOKENS))
    if kind == "window":
        least = scope.sink + scope.chunk
        frames = _whole(argument, text, "window", scope.window)
        if frames < least:
            reason = f"{word} must hold sink={scope.sink} and a chunk of {scope.chunk}"
            raise RequestError("attention", text, reason, f"window:{least} or more")
        return Window(frames, scope.sink)
    near = max(scope.chunk, scope.window - scope.sink - scope.chunk)
    if kind == "radial":
        parts = min(MAX_PARTS, max(1, scope.tokens // PART_TOKENS))
        power = 1 << (parts.bit_length() - 1)
        return Radial(_whole(argument, text, "radial", near), scope.sink, power)
    count, share = _amount(argument, text)
    return TopK(count, share, scope.window - scope.sink - scope.chunk, scope.sink)


def _whole(argument: str, text: str, kind: str, default: int) -> int:
    if not argument:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", argument) or int(argument) < 1:
        reason = f"{argument!r} is not a whole number above 0"
        raise RequestError("attention", text, reason, f"{kind}:1 or more, as {kind}:{default}")
    return int(argument)


def _amount(argument: str, text: str) -> tuple[int | None, float | None]:
    """A number of frames, or a share where there is a point in it."""
    legal = "topk:0.5 for half of the past, topk:8 for 8 latent frames"
    if not argument:
        raise RequestError("attention", text, "topk needs a share or a number", legal)
    if re.fullmatch(r"[0-9]{1,6}", argument) and int(argument) >= 1:
        return int(argument), None
    if re.fullmatch(r"[0-9]?\.[0-9]{1,6}", argument) and 0 < float(argument) <= 1:
        return None, float(argument)
    reason = f"{argument!r} is neither a share above 0 to 1.0 nor a whole number above 0"
    raise RequestError("attention", text, reason, legal)


def _override(clause: str, text: str, scope: Scope) -> Override:
    where, equals, word = clause.partition("=")
    match = WHERE.fullmatch(where)
    if match is None or not equals:
        legal = "layers:0-3=READING or steps:0=READING"
        raise RequestError("attention", text, f"{clause!r} names no layers or steps", legal)
    axis, first = match[1], int(match[2])
    last = (int(match[4]) if match[4] else None) if match[3] else first
    count = scope.layers if axis == "layers" else scope.steps
    if last is not None and last < first:
        reason = f"{where} ends before it begins"
        raise RequestError("attention", text, reason, f"{axis}:{last}-{first}")
    if max(first, last or 0) >= count:
        reason = f"{where} is not a range of {count} {axis}"
        raise RequestError("attention", text, reason, f"{axis}:0-{count - 1} at most")
    return Override(axis, first, last, _reading(word, text, scope))


def _as_dict(reading: Reading) -> dict[str, Any]:
    names = getattr(reading, "__dataclass_fields__", {})
    return {"kind": reading.kind} | {name: getattr(reading, name) for name in names}
