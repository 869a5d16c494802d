"""Frames per second, and how much faster that is than diffusers' own pipeline in one pass.

Run ``python -m benchmarks.speed [--quick] [--json] [--threads N]``.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import diffusers
import torch
import transformers

from benchmarks.bundled import (
    PROMPT,
    SEED,
    bundled_manifest,
    default_plan,
    load_bundled,
    next_chunk,
)
from benchmarks.report import Figure, Row, Scale, run
from longtake.video.components import CausalModel
from longtake.video.plan import Plan
from longtake.video.rollout import Rollout
from longtake.video.writer import open_writer

REFERENCE_STEPS = 50
GUIDANCE = 5.0
TEXT_TOKENS = 512
MIN_FPS = 16.0
MIN_SPEEDUP = 20.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Frames of the video, steps of the pipeline that are run, and how often both are."""

    frames: int
    steps: int
    repeats: int


SETTINGS = {
    Scale.FULL: Settings(481, 2, 3),
    Scale.QUICK: Settings(161, 2, 1),
    Scale.SMALLEST: Settings(5, 1, 1),
}


@dataclass(frozen=True, slots=True)
class Engine:
    """Seconds of one video: text, chunks and decode; and writing it."""

    made: float
    encoded: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Seconds of one pipeline call: the steps that were run, and all the rest."""

    steps: list[float]
    rest: float

    @property
    def whole(self) -> float:
        """What the call takes with all steps; each of them costs the same."""
        return self.rest + REFERENCE_STEPS * median(self.steps)


def figure(scale: Scale) -> Figure:
    """Engine and pipeline take turns."""
    use = SETTINGS[scale]
    model, pipeline = load_bundled(), _load_pipeline()
    plan = default_plan(model, use.frames)
    turns: list[tuple[Engine, Pipeline]] = []
    for _ in range(use.repeats):
        turns.append((_run_engine(plan, model), _run_pipeline(pipeline, plan, use.steps)))
    engine_s = median(engine.made for engine, _ in turns)
    encode_s = median(engine.encoded for engine, _ in turns)
    whole_s = median(pipeline.whole for _, pipeline in turns)
    rest_s = median(pipeline.rest for _, pipeline in turns)
    step_s = median(median(pipeline.steps) for _, pipeline in turns)
    speedup = median(pipeline.whole / engine.made for engine, pipeline in turns)
    scaled = f"{use.steps} of {REFERENCE_STEPS} steps run, the rest scaled"
    threads = torch.get_num_threads()
    rows = [
        Row(
            f"engine, {threads} threads, VAE decode included",
            use.frames / engine_s,
            "fps",
            MIN_FPS,
            at_least=True,
        ),
        Row("the same with encoding to mp4", use.frames / (engine_s + encode_s), "fps"),
        Row("engine / WanPipeline", speedup, "x", MIN_SPEEDUP, at_least=True, note=scaled),
        Row("engine", engine_s, "s"),
        Row("encoding to mp4, apart", encode_s, "s"),
        Row("WanPipeline", whole_s, "s", note=scaled),
        Row("WanPipeline: one step", step_s, "s"),
        Row("WanPipeline: text, VAE decode and the rest", rest_s, "s"),
    ]
    method = (
        f"{use.frames} frames of {plan.size[0]}x{plan.size[1]} by both, same weights in fp32, "
        f"medians of {use.repeats}, taking turns. Engine: the default plan, {plan.steps} steps and "
        f"guidance {plan.guidance_scale:g}. diffusers' WanPipeline: one pass over all frames, "
        f"{REFERENCE_STEPS} steps, guidance {GUIDANCE:g}, {TEXT_TOKENS} text tokens. Loading is "
        "not counted."
    )
    return Figure("Speed", rows, method)


def _run_engine(plan: Plan, model: CausalModel) -> Engine:
    encoded = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speed.mp4"
        with open_writer(path, size=plan.size, fps=plan.fps) as writer:
            began = perf_counter()
            rollout = Rollout(plan, model)
            while not rollout.finished:
                chunk = next_chunk(rollout)
                ready = perf_counter()
                writer.write(chunk.frames.numpy())
                encoded += perf_counter() - ready
            made = perf_counter() - began - encoded
            ready = perf_counter()
            writer.close()
            encoded += perf_counter() - ready
    return Engine(made, encoded)


def _load_pipeline() -> Any:
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    folder = bundled_manifest().folder
    pipeline = diffusers.WanPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _run_pipeline(pipeline: Any, plan: Plan, steps: int) -> Pipeline:
    """Run ``steps`` steps and time each: from the transformer's first call to the callback."""
    clock = _StepClock()
    hook = pipeline.transformer.register_forward_pre_hook(clock.on_forward)
    began = perf_counter()
    try:
        pipeline(
            prompt=PROMPT,
            num_frames=plan.num_frames,
            width=plan.size[0],
            height=plan.size[1],
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            max_sequence_length=TEXT_TOKENS,
            generator=torch.Generator().manual_seed(SEED),
            callback_on_step_end=clock.on_step_end,
        )
    finally:
        hook.remove()
    return Pipeline(clock.seconds, perf_counter() - began - sum(clock.seconds))


class _StepClock:
    """Seconds of each denoising step of a pipeline."""

    def __init__(self) -> None:
        self._began: float | None = None
        self.seconds: list[float] = []

    def on_forward(self, *_: object) -> None:
        """A step begins with its first forward."""
        if self._began is None:
            self._began = perf_counter()

    def on_step_end(
        self, _pipeline: Any, _index: int, _timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        """As diffusers calls it; the tensors go back as they came."""
        if self._began is not None:
            self.seconds.append(perf_counter() - self._began)
        self._began = None
        return tensors


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", {"speed": figure}))
