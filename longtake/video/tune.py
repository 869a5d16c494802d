"""``longtake tune``: the fastest backend, chunk and window of a model on this device.

Everything is measured on the model's own queries, keys and values, at the chunk that first sees a
full window. Exact forms (every key in the window read, in one call or in chunks) are always
allowed: their error is rounding. A smaller window is allowed where its error is within the bound,
which is 0 unless the caller raises it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from longtake.errors import RequestError
from longtake.video.attention_backends import LSE, MAKERS, MEASURED, why_not
from longtake.video.attention_plan import AttentionPlan
from longtake.video.attention_readings import Chunked, Full, Reading, Window
from longtake.video.attention_trial import Tried, Way, try_ways
from longtake.video.components import load_model
from longtake.video.manifest import Manifest
from longtake.video.numerics import choose_device, choose_dtype, torch_dtype
from longtake.video.profiles import Profile, target_of
from longtake.video.shapes import ModelShape, read_shape
from longtake.video.source import find_model

CHUNKS = (256, 1024, 4096, 16384)  # tokens read at a time
CLOSE = 1.05  # of two that are so close the plainer one is taken


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of what was tried.

    Attributes:
        attention: attention plan by its text; None for the model's own.
        backend, seconds, error: what computed it, the time of one layer's call, and its error.
        exact, allowed: see ``Profile``.
    """

    attention: str | None
    backend: str
    seconds: float
    error: float
    exact: bool
    allowed: bool


def tune(
    name: str, bound: float, how: tuple[str | None, str | None], told: Callable[[str], None]
) -> Profile:
    """Measure a model on a device and choose.

    Args:
        name: the model.
        bound: largest error of a plan that leaves keys out; 0 allows exact ones alone.
        how: device and dtype by name.
        told: hears what comes next.

    Raises:
        RequestError: of ``error_bound``, or of a model that has no attention of ours.
        DeviceError, ModelError: as of loading.
    """
    if not (math.isfinite(bound) and 0.0 <= bound < 1.0):
        legal = "0 (exact plans alone) to below 1"
        raise RequestError("error_bound", bound, "is out of range", legal)
    manifest = find_model(name).manifest
    if manifest is None:
        reason = "is a plain pipeline, whose attention is diffusers' own"
        raise RequestError("model", name, reason, "a model with a manifest: longtake models")
    device = choose_device(how[0])
    dtype = choose_dtype(how[1], device)
    shape = read_shape(manifest)
    kind, width = torch_dtype(dtype), shape.transformer.head_dim
    backends = [n for n in MAKERS if why_not(n, device, kind, [LSE], width) is None]
    if device.type == "cpu":
        # FlexAttention makes the whole matrix of scores there
        backends = [n for n in backends if n in MEASURED]
    told(f"loading {manifest.name}")
    model = load_model(manifest, device=device, dtype=dtype, backend="sdpa")
    forms = readings(manifest, shape)
    ways = [Way(AttentionPlan("window", form), b) for form in forms for b in backends]
    told(f"{len(ways)} ways to read {manifest.window} latent frames")
    tried = try_ways(ways, model, filling(manifest), timed=True)
    lines = [_line(way, one, bound) for way, one in zip(ways, tried, strict=True)]
    best = choose(lines)
    return Profile(
        target=target_of(manifest, shape, device, dtype),
        backend=best.backend,
        attention=best.attention,
        exact=best.exact,
        error=best.error,
        error_bound=bound,
        measured=tuple(asdict(line) for line in lines),
    )


def readings(manifest: Manifest, shape: ModelShape) -> list[Reading]:
    """What is tried, plainest first: the model's own window whole, in chunks, then smaller ones."""
    tokens = manifest.window * shape.frame_tokens(manifest.size)
    least = manifest.sink + max(manifest.chunk, manifest.first_chunk or 0)
    smaller = range(manifest.window - manifest.chunk, least - 1, -manifest.chunk)
    return [
        Full(),
        *(Chunked(size) for size in CHUNKS if size < tokens),
        *(Window(frames, manifest.sink) for frames in smaller),
    ]


def filling(manifest: Manifest) -> int:
    """Chunks until one sees a full window."""
    first = manifest.first_chunk or manifest.chunk
    return 1 + max(0, -(-(manifest.window - first) // manifest.chunk))


def choose(lines: Sequence[Measured]) -> Measured:
    """The first allowed line that is as fast as the fastest, or nearly so."""
    allowed = [line for line in lines if line.allowed]
    fastest = min(line.seconds for line in allowed)
    return next(line for line in allowed if line.seconds <= CLOSE * fastest)


def _line(way: Way, tried: Tried, bound: float) -> Measured:
    plan = way.plan
    return Measured(
        attention=None if plan.plain else plan.text,
        backend=way.backend,
        seconds=tried.seconds or 0.0,
        error=tried.error,
        exact=plan.exact,
        allowed=plan.exact or tried.error <= bound,
    )
