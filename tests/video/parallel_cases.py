"""Videos that every layout of ranks must make as one rank does; not a test itself.

``parallel_ranks.py`` makes them, in its processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from longtake.schedulers.prompts import TimedPrompt
from longtake.video.components import CausalModel
from longtake.video.numerics import draw_noise
from longtake.video.plan import Inputs, Plan, make_plan
from longtake.video.request import VideoRequest
from longtake.video.rollout import Chunk, Rollout, rollout

BALL = "a red ball bouncing over a green meadow"
STAR = "a blue star moving left over dark hills at night"
FRAMES = 45  # 12 latent frames: 6 chunks of 2
STORES = ("bf16", "fp16", "int8")
Output = tuple[torch.Tensor, torch.Tensor]


def plan_of(model: CausalModel, inputs: Inputs | None = None, **fields: Any) -> Plan:
    """The plan of a video of six chunks."""
    values: dict[str, Any] = {"prompt": BALL, "seed": 5, "num_frames": FRAMES, **fields}
    return make_plan(VideoRequest(**values), model.manifest, model.shape, inputs=inputs)


def make(plan: Plan, model: CausalModel, **options: Any) -> Output:
    """Latents and pixels."""
    chunks: list[Chunk] = list(rollout(plan, model, **options))
    return torch.cat([c.latents for c in chunks], 2), torch.cat([c.frames for c in chunks])


def make_latents(plan: Plan, model: CausalModel, **options: Any) -> Output:
    """Without VAE decode, which has a job of its own, and is part of one case."""
    with patch.object(Rollout, "_decode", lambda *_: torch.zeros(1)):
        return make(plan, model, **options)


def make_again(plan: Plan, model: CausalModel) -> Output:
    """Every chunk is made, thrown away and made again from the state before it."""
    run = Rollout(plan, model)
    chunks = []
    with patch.object(Rollout, "_decode", lambda *_: torch.zeros(1)):
        while not run.finished:
            before = run.snapshot()
            run.make_chunk(attempt=1)
            run.restore(before)
            chunk = run.make_chunk()
            if chunk is not None:
                chunks.append(chunk)
    return torch.cat([c.latents for c in chunks], 2), torch.cat([c.frames for c in chunks])


def cases(model: CausalModel, *, guided: bool) -> dict[str, Callable[[], Output]]:
    """What the rows of ``capabilities.PARALLEL`` name, made with the model as it is.

    Only ``window`` is decoded too: rows are divided alike in every layout. Where there is nothing
    to learn from a second step there is one.
    """
    few: dict[str, Any] = {"num_inference_steps": 1} | ({"guidance_scale": 2.0} if guided else {})
    more = {**few, "num_inference_steps": 2}
    timeline = (TimedPrompt(1.0, STAR), TimedPrompt(3.5, BALL))
    image = torch.randn(1, 4, 1, 4, 10, generator=torch.Generator().manual_seed(1))
    clip = torch.randn(1, 4, 12, 4, 10, generator=torch.Generator().manual_seed(2))
    stored = draw_noise((1, 4, 2, 4, 10), 9, 0, 0, "start")
    readings = {
        "global": "global",
        "chunked": "global+chunked:7",
        "reading": "global+window:5",
        "topk": "topk:2",
        "radial": "radial:1",
        "layers": "global+chunked:7,layers:1=window:5",
    }
    starts = {
        "image": (plan_of(model, Inputs("image", 1), **few), image),
        "continue": (plan_of(model, Inputs("continue", 13, (2, 2)), **few), clip[:, :, :4]),
        "redraw": (
            plan_of(model, Inputs("redraw", FRAMES), video="clip", strength=0.6, **more),
            clip,
        ),
    }
    stores = {name: replace(plan_of(model, **few), kv_cache=name) for name in STORES}
    return {
        "window": lambda: make(plan_of(model, **more), model),
        "guided": lambda: make_latents(plan_of(model, **{**more, "guidance_scale": 2.5}), model),
        **{
            name: partial(make_latents, plan_of(model, attention=text, **few), model)
            for name, text in readings.items()
        },
        **{name: partial(make_latents, plan, model) for name, plan in stores.items()},
        **{
            name: partial(make_latents, plan, model, inputs=x) for name, (plan, x) in starts.items()
        },
        "recache": lambda: make_latents(plan_of(model, prompts=timeline, **few), model),
        "redo": lambda: make_again(plan_of(model, prompts=timeline, **few), model),
        "resume": lambda: make_latents(plan_of(model, **few), model, stored=[stored]),
    }
