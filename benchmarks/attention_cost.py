"""What a chunk costs from the 10th to the 400th: sink and window, ranked frames, everything.

Run ``python -m benchmarks.attention_cost [--quick] [--json] [--threads N]``.

The bundled model's transformer with random weights and a rope table that is long enough; one
forward a chunk, the clean pass that fills the KV cache, since every forward of a chunk costs the
same. All plans take turns chunk by chunk.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from time import perf_counter

import torch
from diffusers import WanTransformer3DModel

from benchmarks.bundled import bundled_manifest
from benchmarks.report import Figure, Row, Scale, Table, run
from longtake.schedulers.chunks import ChunkLayout, ChunkSpec
from longtake.video.attention_bench import slope
from longtake.video.attention_plan import Scope, resolve_attention
from longtake.video.causal_wan import CausalWan, Session
from longtake.video.manifest import Manifest
from longtake.video.shapes import ModelShape, read_shape
from longtake.video.source import component_config

# at which chunks the cost of one is told; the video ends with the last
CHUNKS = {
    Scale.FULL: (10, 50, 100, 200, 400),
    Scale.QUICK: (10, 25, 50, 100),
    Scale.SMALLEST: (4, 8),
}
NEIGHBOURS = 4  # a chunk's cost is the median of those around it
PLANS = {
    "window": "window",
    "topk:8": "global+topk:8",
    "topk:0.5": "global+topk:0.5",
    "full": "global",
}
JUDGED = ("window", "topk:8")
MAX_SLOPE = 1.05
SIGMA = 0.1
MS = 1e3


@dataclass(frozen=True, slots=True)
class Model:
    """The bundled model's sizes around random weights."""

    manifest: Manifest
    shape: ModelShape
    wan: CausalWan


class Growing:
    """A video that grows chunk by chunk under one attention plan."""

    def __init__(self, model: Model, plan: str, chunks: int) -> None:
        manifest, self._model = model.manifest, model
        tokens = model.shape.frame_tokens(manifest.size)
        layers = model.shape.transformer.layers
        scope = Scope(manifest.window, manifest.sink, manifest.chunk, tokens, layers, steps=1)
        attention = resolve_attention(plan, scope)
        windowed = attention.layout == "window"
        layout = ChunkLayout(
            chunks * manifest.chunk,
            manifest.chunk,
            window=manifest.window if windowed else None,
            sink=manifest.sink if windowed else 0,
        )
        self._chunks = iter(layout)
        latent = model.shape.latent_size(manifest.size)
        self._cache = model.wan.new_cache(1, layout.capacity, latent, means=attention.ranks)
        text = torch.zeros(manifest.text_length, model.shape.transformer.text_dim)
        prompt = model.wan.encode_text([text], manifest.text_length)
        self._session = Session(self._cache, prompt, model.wan.reader(attention))
        draw = torch.Generator().manual_seed(0)
        size = (1, model.shape.transformer.in_channels, manifest.chunk, *latent)
        self._latents = torch.randn(size, generator=draw)

    def seconds(self) -> float:
        """Time of the next chunk's forward, its place in the cache included."""
        spec: ChunkSpec = next(self._chunks)
        began = perf_counter()
        self._cache.begin(spec.past, spec.own)
        self._cache.recording = True
        self._model.wan.forward(self._session, self._latents, SIGMA)
        return perf_counter() - began


def figure(scale: Scale) -> Figure:
    """All plans side by side, every chunk run and timed."""
    marks = CHUNKS[scale]
    model = make_model(marks[-1])
    videos = {name: Growing(model, plan, marks[-1]) for name, plan in PLANS.items()}
    times: dict[str, list[float]] = {name: [] for name in PLANS}
    for _ in range(marks[-1]):
        for name, video in videos.items():
            times[name].append(video.seconds())
    rows = [
        Row(
            f"{name}, slope of log time over log length, chunk {marks[0]} to {marks[-1]}",
            slope_of(times[name], marks[0]),
            "",
            MAX_SLOPE if name in JUDGED else None,
        )
        for name in PLANS
    ]
    rows += [
        Row(
            f"{name}, chunk {marks[-1]} / chunk {marks[0]}",
            cost(times[name], marks[-1]) / cost(times[name], marks[0]),
            "x",
        )
        for name in PLANS
    ]
    lines = [(mark, *(MS * cost(times[name], mark) for name in PLANS)) for mark in marks]
    manifest = model.manifest
    tokens = manifest.chunk * model.shape.frame_tokens(manifest.size)
    method = (
        f"{marks[-1]} chunks of {tokens} tokens, {model.shape.transformer.layers} layers of "
        f"{model.shape.transformer.heads} heads, random weights; window {manifest.window} and sink "
        f"{manifest.sink} latent frames. One forward a chunk, in turn. A chunk's cost is the "
        f"median of up to {2 * NEIGHBOURS + 1} around it; the slope is that of the time of the "
        "whole video so far over its length. topk:0.5 reads half of a past that grows, so its "
        "slope is no goal: it halves what full attention reads."
    )
    table = Table(("chunk", *(f"{name} ms" for name in PLANS)), tuple(lines))
    return Figure("Cost of a chunk against the length of the video", rows, method, table)


def make_model(chunks: int) -> Model:
    """The bundled model's transformer, random, with positions for so many chunks."""
    manifest = bundled_manifest()
    config = component_config(manifest, "transformer")
    positions = max(config["rope_max_seq_len"], chunks * manifest.chunk)
    torch.manual_seed(0)
    transformer = WanTransformer3DModel.from_config(config | {"rope_max_seq_len": positions})
    return Model(manifest, read_shape(manifest), CausalWan(transformer, "sdpa"))


def slope_of(seconds: Sequence[float], first: int) -> float:
    """Slope of log(time of the whole video so far) over log(its length), from a chunk on."""
    so_far = [(float(number), total) for number, total in enumerate(accumulate(seconds), 1)]
    found = slope(so_far[first - 1 :])
    return float("nan") if found is None else found


def cost(seconds: Sequence[float], chunk: int) -> float:
    """Seconds of a chunk, counted from 1: the median of those around it."""
    return median(seconds[max(0, chunk - 1 - NEIGHBOURS) : chunk + NEIGHBOURS])


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", {"attention_cost": figure}))
