"""A clip read in chunks is the same clip; one read by windows costs what its windows cost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import WanTransformer3DModel

from longtake.video.attention import sdpa
from longtake.video.attention_backends import choose_backend
from longtake.video.attention_readings import Chunked, Windows
from longtake.video.clip import load_pipeline
from longtake.video.clip_attention import attend_windows, clip_attention
from longtake.video.clip_plan import ClipPlan, make_clip_plan
from longtake.video.clip_reading import ClipReading
from longtake.video.generate import Target, generate
from longtake.video.options import EngineOptions
from longtake.video.prepare import plan_request
from longtake.video.request import VideoRequest
from longtake.video.source import find_model

CPU = torch.device("cpu")
Forward = Callable[[ClipReading | None], torch.Tensor]


@pytest.fixture
def forward(fresh_transformer: WanTransformer3DModel) -> Forward:
    """A stock forward of nine latent frames, read in some way."""
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(2, 4, 9, 4, 6, generator=draw)
    text = torch.randn(2, 7, 16, generator=draw)
    pipeline = SimpleNamespace(transformer=fresh_transformer)
    before = copy.copy([block.attn1.processor for block in fresh_transformer.blocks])

    def run(reading: ClipReading | None) -> torch.Tensor:
        with torch.inference_mode(), clip_attention(pipeline, reading, choose_backend("auto", CPU)):
            (out,) = fresh_transformer(x, torch.tensor([700.0, 300.0]), text, return_dict=False)
        assert [block.attn1.processor for block in fresh_transformer.blocks] == before
        result: torch.Tensor = out
        return result

    return run


@pytest.mark.parametrize("tokens", [1, 7, 10_000])
def test_a_clip_read_in_chunks_is_the_same(forward: Forward, tokens: int) -> None:
    assert (forward(Chunked(tokens)) - forward(None)).abs().max() <= 1e-5


def test_one_window_over_the_whole_clip_is_the_same(forward: Forward) -> None:
    assert (forward(Windows(9, 9)) - forward(None)).abs().max() <= 1e-5
    assert (forward(Windows(4, 9)) - forward(None)).abs().max() > 1e-3


def test_processors_come_out_when_a_run_fails(fresh_transformer: WanTransformer3DModel) -> None:
    pipeline = SimpleNamespace(transformer=fresh_transformer, transformer_2=None)
    before = fresh_transformer.blocks[0].attn1.processor
    reading, backend = Chunked(5), choose_backend("auto", CPU)

    def fail() -> None:
        with clip_attention(pipeline, reading, backend):
            assert fresh_transformer.blocks[0].attn1.processor is not before
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert fresh_transformer.blocks[0].attn1.processor is before


@pytest.mark.parametrize(("frames", "total"), [(4, 9), (8, 9), (2, 9), (5, 5), (21, 81), (3, 4)])
def test_windows_cover_the_clip_and_overlap(frames: int, total: int) -> None:
    spans = Windows(frames, total).spans
    assert spans[0][0] == 0
    assert spans[-1][1] == total
    assert all(stop - start == min(frames, total) for start, stop in spans)
    assert all(start < following[0] for (start, _), following in pairwise(spans))
    assert {frame for span in spans for frame in range(*span)} == set(range(total))
    if frames >= 4:
        assert all(b[0] < a[1] for a, b in pairwise(spans))


def test_a_token_gets_the_weighted_mean_of_its_windows() -> None:
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 6 * 5, 3, 8, generator=draw) for _ in range(3))
    windows = Windows(4, 6)
    assert windows.spans == ((0, 4), (2, 6))
    first = sdpa(q[:, :20], k[:, :20], v[:, :20])
    second = sdpa(q[:, 10:], k[:, 10:], v[:, 10:])
    made = attend_windows(q, k, v, windows, sdpa)
    assert (made[:, :10] - first[:, :10]).abs().max() <= 1e-6
    assert (made[:, 20:] - second[:, 10:]).abs().max() <= 1e-6
    # frame 2 is the third of the first window and the first of the second: weights 2 and 1
    expected = (2 * first[:, 10:15] + second[:, :5]) / 3
    assert (made[:, 10:15] - expected).abs().max() <= 1e-6


def plan(frames: int, **fields: object) -> ClipPlan:
    request = VideoRequest(prompt="a red ball", seed=1, mode="clip", num_frames=frames, **fields)  # type: ignore[arg-type]
    made = plan_request(request, EngineOptions("cpu"))
    assert isinstance(made, ClipPlan)
    return made


def test_a_clip_of_four_times_the_length_costs_about_four_times_as_much() -> None:
    own, long = 81, 321
    whole = plan(own)
    windowed = plan(long, attention="window")
    full = plan(long)
    assert windowed.reading == Windows(21, 81)
    assert whole.cost is not None
    assert windowed.cost is not None
    assert full.cost is not None
    base = whole.cost.flops["denoise"]
    assert 3.8 < windowed.cost.flops["denoise"] / base < 5.0
    assert full.cost.flops["denoise"] / base > windowed.cost.flops["denoise"] / base
    # keys read by a query, against those of a clip of the model's own length
    assert windowed.reading.frames_read(0, 81) / 21 < 1.35


def test_generate_reads_a_clip_as_asked_and_says_so(tmp_path: Path) -> None:
    frames = {}
    for name, fields in {
        "plain": {},
        "chunked": {"attention": "chunked:50"},
        "window": {"attention": "window", "window": 4},
    }.items():
        request = VideoRequest(
            prompt="a red ball", seed=1, mode="clip", num_frames=25, num_inference_steps=2, **fields
        )  # type: ignore[arg-type]
        folder = tmp_path / name
        result = generate(request, Target(None, frames_dir=folder), EngineOptions("cpu"))
        frames[name] = sorted(folder.glob("*.png"))
        shown = result.receipt["plan"]["attention"]
        assert shown == {"plain": None, "chunked": "chunked:50", "window": "window"}[name]
        used = result.receipt["engine"]["backend"]["attention"]
        assert used == ("diffusers" if name == "plain" else "sdpa")
    plain, chunked, window = ([p.read_bytes() for p in frames[name]] for name in frames)
    assert len(plain) == 25
    assert window != plain
    assert len(chunked) == 25


def test_a_loaded_pipeline_is_left_as_it_was() -> None:
    model = load_pipeline(find_model("papercut"))
    processors = [block.attn1.processor for block in model.pipeline.transformer.blocks]
    made = make_clip_plan(
        VideoRequest(prompt="a", mode="clip", num_frames=9, attention="chunked"),
        find_model("papercut"),
    )
    with clip_attention(model.pipeline, made.reading, model.attention):
        inside = [block.attn1.processor for block in model.pipeline.transformer.blocks]
    assert inside != processors
    assert processors == [b.attn1.processor for b in model.pipeline.transformer.blocks]
