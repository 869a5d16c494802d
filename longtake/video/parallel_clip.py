"""Clip mode on several GPUs, by diffusers' own context parallelism.

Every rank runs the whole pipeline with the same generator, and diffusers shards the tokens inside
the transformer. It needs CUDA (its ring has no CPU path, and switching it on fails on a host
without a GPU), so on a CPU it is refused. Written against diffusers 0.42 and not run: no machine
with two GPUs was at hand.
"""

from __future__ import annotations

from typing import Any

from longtake.errors import ParallelError, RequestError
from longtake.video.clip import ClipModel
from longtake.video.clip_attention import transformers_of
from longtake.video.clip_plan import ClipPlan
from longtake.video.numerics import choose_device
from longtake.video.options import EngineOptions
from longtake.video.parallel_layout import Layout, parse_layout


def check_clip(plan: ClipPlan, engine: EngineOptions) -> None:
    """Refuse at plan time what diffusers' context parallelism cannot do.

    Raises:
        RequestError: of the field ``parallel``.
    """
    if engine.parallel is None:
        return
    layout = parse_layout(engine.parallel)
    reason = None
    if choose_device(engine.device).type != "cuda":
        reason = "diffusers divides a clip over CUDA devices only"
    elif plan.reading is not None:
        reason = "diffusers does not divide a clip whose attention is planned"
    elif layout is not None and layout.cfg > 1:
        reason = "diffusers does not divide guidance"
    if reason is not None:
        raise RequestError("parallel", engine.parallel, reason, "mode=hybrid, or leave it out")


def divide_clip(model: ClipModel, engine: EngineOptions) -> dict[str, Any]:
    """Switch context parallelism on in a loaded pipeline; for the receipt.

    Raises:
        ParallelError: the model has no plan for it, or the layout does not fit it.
    """
    ranks = engine.ranks
    if ranks is None:
        return {}
    from diffusers import ContextParallelConfig

    layout = parse_layout(engine.parallel or "auto") or Layout(ulysses=ranks.size)
    for part in transformers_of(model.pipeline):
        if getattr(part, "_cp_plan", None) is None:
            raise ParallelError(f"{type(part).__name__} has no plan for context parallelism")
        if getattr(part, "_parallel_config", None) is None:
            config = ContextParallelConfig(ulysses_degree=layout.ulysses, ring_degree=layout.ring)
            try:
                part.enable_parallelism(config=config)
            except (ValueError, RuntimeError) as error:
                raise ParallelError(f"parallel={layout.text}: {error}") from error
    return {"parallel": {"layout": layout.text, "ranks": ranks.size, "over": ranks.backend}}
