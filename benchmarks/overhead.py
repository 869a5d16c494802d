"""Engine overhead: what a chunk costs over its bare forwards and its VAE decode.

Run ``python -m benchmarks.overhead [--quick] [--json] [--threads N]``.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.bare import BareChunks
from benchmarks.bundled import (
    default_plan,
    first_steady,
    frames_of_chunks,
    load_bundled,
    next_chunk,
    timed,
)
from benchmarks.report import Figure, Row, Scale, run
from longtake.video.components import CausalModel
from longtake.video.plan import Plan
from longtake.video.rollout import Rollout
from longtake.video.writer import open_writer

CHUNKS = {Scale.FULL: 60, Scale.QUICK: 16, Scale.SMALLEST: 2}
MAX_OVERHEAD = 1.05


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of one chunk: the engine's, the floor's, and writing it to an mp4."""

    engine: float
    bare: float
    encode: float
    stages: dict[str, float]


def figure(scale: Scale) -> Figure:
    """Engine and floor, turn by turn."""
    model = load_bundled()
    # the first chunk with a full window warms both sides up and is not counted
    warm = first_steady(default_plan(model, frames_of_chunks(model.manifest, model.shape, 64)))
    plan = default_plan(
        model, frames_of_chunks(model.manifest, model.shape, warm + 1 + CHUNKS[scale])
    )
    bare = BareChunks(plan, model)
    turns = _take_turns(plan, model, bare)[warm + 1 :]
    rows = [
        Row(
            "engine overhead",
            median(turn.engine / turn.bare for turn in turns),
            "x",
            MAX_OVERHEAD,
            note="chunk / (bare forwards + VAE decode)",
        ),
        Row("chunk", 1e3 * median(turn.engine for turn in turns), "ms"),
        Row("bare forwards + VAE decode", 1e3 * median(turn.bare for turn in turns), "ms"),
        *(
            Row(f"chunk: {stage}", 1e3 * median(turn.stages[stage] for turn in turns), "ms")
            for stage in turns[0].stages
        ),
        Row("encode to mp4, apart", 1e3 * median(turn.encode for turn in turns), "ms"),
    ]
    seen = plan.layout.capacity
    text = bare.text.keys[0].shape[1]
    method = (
        f"Medians over {len(turns)} chunks of {plan.layout.chunk} latent frames that see {seen}; "
        "engine and floor take turns chunk by chunk, and in who goes first. The floor is "
        "diffusers' own transformer on the same weights over ready-made keys and values: "
        f"{bare.forwards} forwards, batch {2 if plan.guided else 1}, {text} text tokens in both, "
        "then the same streaming decode. The ratio is the median of the turns' ratios."
    )
    return Figure("Engine overhead", rows, method)


def _take_turns(plan: Plan, model: CausalModel, bare: BareChunks) -> list[Turn]:
    engine = Rollout(plan, model)
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "overhead.mp4"
        with open_writer(path, size=plan.size, fps=plan.fps) as writer:
            for spec in plan.chunks:
                floor = partial(bare.make_chunk, spec)
                if spec.index % 2:
                    _, bare_s = timed(floor)
                    chunk, engine_s = timed(partial(next_chunk, engine))
                else:
                    chunk, engine_s = timed(partial(next_chunk, engine))
                    _, bare_s = timed(floor)
                _, encode_s = timed(partial(writer.write, chunk.frames.numpy()))
                turns.append(Turn(engine_s, bare_s, encode_s, chunk.timings))
    return turns


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", {"overhead": figure}))
