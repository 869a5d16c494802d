"""What the benchmarks on the bundled model share: the model, its default plan, a clock."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

from longtake.errors import ModelError, StateError
from longtake.video.components import CausalModel, load_model
from longtake.video.manifest import DEFAULT_MODEL, Manifest
from longtake.video.plan import Plan, make_plan
from longtake.video.request import VideoRequest
from longtake.video.rollout import Chunk, Rollout
from longtake.video.shapes import ModelShape
from longtake.video.source import find_model

PROMPT = "a red ball bouncing over a green meadow"
SEED = 7

T = TypeVar("T")


def bundled_manifest() -> Manifest:
    """The bundled model's manifest."""
    manifest = find_model(DEFAULT_MODEL).manifest
    if manifest is None:
        raise ModelError(f"the bundled model {DEFAULT_MODEL} has no manifest")
    return manifest


def load_bundled() -> CausalModel:
    """The bundled model on the CPU, as ``longtake generate`` loads it."""
    return load_model(bundled_manifest())


def request(num_frames: int, *, attention: str | None = None) -> VideoRequest:
    """One and the same prompt and seed, at the model's defaults."""
    return VideoRequest(prompt=PROMPT, seed=SEED, num_frames=num_frames, attention=attention)


def default_plan(model: CausalModel, num_frames: int, *, attention: str | None = None) -> Plan:
    """The plan of ``request``."""
    return make_plan(request(num_frames, attention=attention), model.manifest, model.shape)


def frames_of_chunks(manifest: Manifest, shape: ModelShape, chunks: int) -> int:
    """Pixel frames of that many whole chunks."""
    stride = shape.vae.stride_time
    first = manifest.first_chunk or manifest.chunk
    latents = first + (chunks - 1) * manifest.chunk
    return 1 + stride * (latents - 1)


def first_steady(plan: Plan) -> int:
    """Index of the first chunk that sees a full window."""
    for spec in plan.chunks:
        if len(spec.past) + spec.frames >= plan.layout.capacity:
            return spec.index
    return plan.layout.count - 1


def next_chunk(rollout: Rollout) -> Chunk:
    """Make a chunk of a rollout that nobody stops."""
    chunk = rollout.make_chunk()
    if chunk is None:
        raise StateError("the rollout stopped without being asked to")
    return chunk


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """What ``run`` returns, and the seconds it took."""
    began = perf_counter()
    result = run()
    return result, perf_counter() - began
