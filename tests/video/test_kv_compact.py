"""A cache that stores less: how far off it is, and how much smaller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longtake.cli import main
from longtake.errors import RequestError, ResumeError
from longtake.schedulers.chunks import ChunkLayout
from longtake.video.attention import sdpa
from longtake.video.components import CausalModel
from longtake.video.generate import Target, generate
from longtake.video.kv_cache import CacheShape, RopeTable
from longtake.video.kv_compact import STORAGE, CompactKVCache, make_cache
from longtake.video.options import EngineOptions, Storage
from longtake.video.plan import make_plan
from longtake.video.request import VideoRequest
from longtake.video.rollout import rollout

LoadTiny = Callable[..., CausalModel]
MakeModel = Callable[..., Path]
CPU = torch.device("cpu")
WHERE = (torch.float32, CPU)
TOKENS, HEADS, DIM, LAYERS = 40, 3, 32, 2
# root mean square error of attention's output, relative; measured: 0.0085, 0.0011, 0.0120
ERRORS = {"bf16": 0.012, "fp16": 0.002, "int8": 0.018}
LAYOUT = ChunkLayout(40, 2, window=12, sink=2)


def table() -> RopeTable:
    draw = torch.Generator().manual_seed(0)
    angle = torch.rand(64, TOKENS, DIM // 2, generator=draw)
    return RopeTable(angle.cos(), angle.sin())


def outputs(storage: str | None, *, means: bool = False) -> list[torch.Tensor]:
    """Attention of every chunk and layer, keys with outliers in a few channels."""
    draw = torch.Generator().manual_seed(3)
    shape = CacheShape(LAYERS, 2, LAYOUT.capacity, TOKENS, HEADS, DIM)
    cache = make_cache(shape, table(), WHERE, means=means, storage=storage)
    channels = torch.ones(DIM)
    channels[3], channels[10] = 8.0, 20.0

    def random(frames: int) -> torch.Tensor:
        return torch.randn(2, frames * TOKENS, HEADS, DIM, generator=draw)

    made = []
    for spec in LAYOUT:
        cache.begin(spec.past, spec.own)
        for recording in (False, True):
            cache.recording = recording
            for layer in range(LAYERS):
                k, v = cache.exchange(layer, random(spec.frames) * channels, random(spec.frames))
                made.append(sdpa(cache.rotate_query(random(spec.frames) / channels), k, v))
                if means and spec.past:
                    past = [slot for slot, f in enumerate(cache.seen) if f not in cache.own]
                    by_slot = k.unflatten(1, (-1, TOKENS)).mean(2)
                    assert (cache.means(layer)[:, past] - by_slot[:, past]).abs().max() <= 1e-5
        cache.recording = False
    return made


@pytest.mark.parametrize("storage", STORAGE)
def test_attention_over_a_stored_past_is_this_far_off(storage: str) -> None:
    exact, stored = outputs(None), outputs(storage)
    assert torch.equal(exact[0], stored[0]), "the chunk's own keys and values are never rounded"
    error = max(
        float((a - b).square().mean().sqrt() / a.square().mean().sqrt())
        for a, b in zip(exact, stored, strict=True)
    )
    assert 1e-5 < error <= ERRORS[storage]


def test_storing_what_is_computed_is_exact() -> None:
    """The compact form with 16-bit inputs that survive rounding gives the plain form's numbers."""
    shape = CacheShape(1, 1, 4, TOKENS, HEADS, DIM)
    plain = make_cache(shape, table(), WHERE, means=False, storage=None)
    compact = make_cache(shape, table(), WHERE, means=False, storage="fp16")
    draw = torch.Generator().manual_seed(1)
    for past, own in (((), (0, 1)), ((0, 1), (2, 3)), ((2, 3), (4, 5))):
        k, v = (torch.randint(-8, 9, (1, 80, HEADS, DIM), generator=draw).float() for _ in "kv")
        seen = []
        for cache in (plain, compact):
            cache.begin(past, own)
            cache.recording = True
            seen.append([x.clone() for x in cache.exchange(0, k, v)])
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_frames_are_ranked_by_the_keys_that_were_stored() -> None:
    assert outputs("int8", means=True)


@pytest.mark.parametrize(("storage", "least"), [("bf16", 2.8), ("fp16", 2.8), ("int8", 4.8)])
def test_a_stored_cache_is_smaller(load_tiny: LoadTiny, storage: str, least: float) -> None:
    model = load_tiny()
    shape = CacheShape(30, 1, 4, TOKENS, HEADS, DIM)  # the more layers, the less the scratch counts
    plain, small = (
        make_cache(shape, table(), WHERE, means=False, storage=s) for s in (None, storage)
    )
    assert isinstance(small, CompactKVCache)
    assert plain.nbytes / small.nbytes >= least
    plan = make_plan(VideoRequest(prompt="a", num_frames=33), model.manifest, model.shape)
    text = 2 * 3 * 48 * 4 * plan.text_tokens
    for chosen in (None, storage):
        cache = model.wan.new_cache(1, plan.layout.capacity, plan.latent_shape[1:], storage=chosen)
        assert replace(plan, kv_cache=chosen).cost.bytes["kv_cache"] == cache.nbytes + text


@pytest.mark.parametrize("attention", ["window", "global"])
@pytest.mark.parametrize(("storage", "limit"), [("bf16", 0.05), ("fp16", 0.01), ("int8", 0.1)])
def test_a_rollout_over_a_stored_past_stays_close(
    load_tiny: LoadTiny, storage: str, limit: float, attention: str
) -> None:
    model = load_tiny()
    request = VideoRequest(prompt="a", seed=5, num_frames=49, attention=attention)
    plan = make_plan(request, model.manifest, model.shape)

    def latents(use: str | None) -> torch.Tensor:
        chunks = rollout(replace(plan, kv_cache=use), model)
        return torch.cat([chunk.latents for chunk in chunks], 2)

    plain, stored = latents(None), latents(storage)
    assert torch.equal(plain[:, :, :2], stored[:, :, :2])
    difference = (plain - stored).square().mean().sqrt() / plain.square().mean().sqrt()
    assert 0 < difference <= limit


def test_the_command_line_stores_less_and_says_so(
    tmp_path: Path, make_model: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    request = VideoRequest(prompt="a", model=str(make_model()), num_frames=9, seed=1)
    storage = Storage(keep=tmp_path / "kept")
    made = generate(
        request, Target(tmp_path / "a.mp4"), EngineOptions(kv_cache="int8"), storage=storage
    )
    assert made.receipt["plan"]["kv_cache"] == "int8"
    # what the latents depend on is kept: they go on in the same cache, and in no other
    again = Storage(resume=tmp_path / "kept")
    resumed = generate(None, Target(tmp_path / "b.mp4"), storage=again)
    assert resumed.receipt["plan"]["kv_cache"] == "int8"
    with pytest.raises(ResumeError, match="kv_cache='bf16': the stored rollout has 'int8'"):
        generate(None, Target(tmp_path / "c.mp4"), EngineOptions(kv_cache="bf16"), storage=again)
    assert main(["plan", "a red ball", "--kv-cache", "int8", "--json"]) == 0
    assert '"kv_cache": "int8"' in capsys.readouterr().out


def test_a_clip_has_no_cache_to_store(tmp_path: Path) -> None:
    request = VideoRequest(prompt="a", mode="clip", num_frames=5)
    with pytest.raises(RequestError, match="kv_cache='int8': a clip has no KV cache") as caught:
        generate(request, Target(tmp_path / "a.mp4"), EngineOptions(kv_cache="int8"))
    assert caught.value.field == "kv_cache"
