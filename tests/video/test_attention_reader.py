"""Attention plans on a KV cache equal masked attention written as plainly as can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from longtake.errors import BackendError
from longtake.schedulers.chunks import ChunkLayout
from longtake.video.attention_backends import choose_backend
from longtake.video.attention_blocks import BLOCK, BandMask
from longtake.video.attention_plan import AttentionPlan, Override
from longtake.video.attention_reader import Reader, band_slices, radial_bands
from longtake.video.attention_readings import Chunked, Full, Radial, Reading, TopK, Window
from longtake.video.components import CausalModel
from longtake.video.kv_cache import CacheShape, KVCache, RopeTable
from longtake.video.plan import make_plan
from longtake.video.request import VideoRequest
from longtake.video.rollout import rollout

LoadTiny = Callable[..., CausalModel]
CPU = torch.device("cpu")
TOKENS, HEADS, DIM, BATCH = 40, 3, 16, 2
SCALE = DIM**-0.5


class Moment(NamedTuple):
    """A cache in the middle of a rollout, and the queries of the chunk that is being made."""

    cache: KVCache
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def read(self, reading: Reading, backend: str = "sdpa") -> torch.Tensor:
        """Output of a reading."""
        reader = Reader(AttentionPlan(reading=reading), choose_backend(backend, CPU))
        return reader.attend(self.q, self.k, self.v, self.cache, (0, None))


def moment(layout: ChunkLayout, chunk: int) -> Moment:
    """Random keys and values, put into the cache chunk by chunk; one layer."""
    draw = torch.Generator().manual_seed(chunk)
    shape = CacheShape(1, BATCH, layout.capacity, TOKENS, HEADS, DIM)
    angle = torch.rand(64, TOKENS, DIM // 2, generator=draw)
    cache = KVCache(
        shape, RopeTable(angle.cos(), angle.sin()), dtype=torch.float32, device=CPU, means=True
    )

    def random(frames: int) -> torch.Tensor:
        return torch.randn(BATCH, frames * TOKENS, HEADS, DIM, generator=draw)

    for spec in layout:
        cache.begin(spec.past, spec.own)
        if spec.index == chunk:
            break
        cache.recording = True
        cache.exchange(0, random(spec.frames), random(spec.frames))
        cache.recording = False
    k, v = cache.exchange(0, random(spec.frames), random(spec.frames))
    return Moment(cache, cache.rotate_query(random(spec.frames)), k, v)


def masked(use: Moment, keep: torch.Tensor) -> torch.Tensor:
    """Attention to the keys that ``keep`` [B, H, S_q, S_k] allows."""
    scores = torch.einsum("bqhd,bkhd->bhqk", use.q, use.k) * SCALE
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, use.v)


def everything(use: Moment) -> torch.Tensor:
    return torch.ones(BATCH, HEADS, use.q.shape[1], use.k.shape[1], dtype=torch.bool)


def by_frame(use: Moment, keep: Callable[[int, int, int], bool]) -> torch.Tensor:
    """A mask of whole frames: ``keep(batch, head, frame)``."""
    mask = everything(use)
    for slot, frame in enumerate(use.cache.seen):
        for b in range(BATCH):
            for h in range(HEADS):
                mask[b, h, :, slot * TOKENS : (slot + 1) * TOKENS] = keep(b, h, frame)
    return mask


def best_frames(use: Moment, reading: TopK) -> dict[tuple[int, int], set[int]]:
    """The frames a ranking keeps, worked out from the keys themselves."""
    own = set(use.cache.own)
    past = sorted(f for f in use.cache.seen if f not in own)
    rest = past[reading.sink :]
    kept: dict[tuple[int, int], set[int]] = {}
    for b in range(BATCH):
        for h in range(HEADS):
            score = {}
            for slot, frame in enumerate(use.cache.seen):
                mean = use.k[b, slot * TOKENS : (slot + 1) * TOKENS, h].mean(0)
                score[frame] = float(use.q[b, :, h].mean(0) @ mean)
            best = sorted(rest, key=lambda frame: -score[frame])[: reading.number(len(rest))]
            kept[b, h] = {*best, *own, *past[: reading.sink]}
    return kept


LAYOUTS = {
    "everything": (ChunkLayout(24, 2), 8),
    "a ring that has turned": (ChunkLayout(40, 2, window=12, sink=2), 13),
    "chunks of three, a first of one": (ChunkLayout(40, 3, first_chunk=1, window=17, sink=1), 9),
    "early": (ChunkLayout(24, 2), 1),
}


@pytest.fixture(params=LAYOUTS)
def use(request: pytest.FixtureRequest) -> Moment:
    """A moment of each layout."""
    return moment(*LAYOUTS[request.param])


def test_exact_readings_equal_one_call(use: Moment) -> None:
    whole = masked(use, everything(use))
    for reading in (Full(), Chunked(64), Chunked(7), Chunked(10_000)):
        assert (use.read(reading) - whole).abs().max() <= 1e-6
    count = len(use.cache.seen)
    for covers in (
        Window(count, 1),
        TopK(count, None, 2, 1),
        TopK(None, 1.0, 0, 0),
        Radial(40, 0, 2),
    ):
        assert (use.read(covers) - whole).abs().max() <= 1e-6


@pytest.mark.parametrize("frames", [4, 7, 9])
def test_a_window_reads_the_sink_and_the_newest(use: Moment, frames: int) -> None:
    past = sorted(f for f in use.cache.seen if f not in use.cache.own)
    kept = {*use.cache.own, *Window(frames, 1).kept(past, len(use.cache.own))}
    expected = masked(use, by_frame(use, lambda *at: at[2] in kept))
    assert (use.read(Window(frames, 1)) - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("reading", [TopK(3, None, 0, 2), TopK(None, 0.3, 1, 0)])
def test_each_head_reads_its_best_frames(use: Moment, reading: TopK, backend: str) -> None:
    best = best_frames(use, reading)
    expected = masked(use, by_frame(use, lambda b, h, frame: frame in best[b, h]))
    assert (use.read(reading, backend) - expected).abs().max() <= 1e-6
    if len(use.cache.seen) > 8:
        assert len({frozenset(kept) for kept in best.values()}) > 1


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("reading", [Radial(1, 0, 2), Radial(2, 1, 4), Radial(1, 1, 1)])
def test_a_radial_reading_reads_its_bands(use: Moment, reading: Radial, backend: str) -> None:
    mask = everything(use)
    bands = radial_bands(reading, use.cache.seen, use.cache.own, TOKENS)
    for band, part in zip(bands, band_slices(TOKENS, reading.parts), strict=True):
        for start in range(0, use.q.shape[1], TOKENS):
            mask[:, :, start + part.start : start + part.stop] = False
            mask[:, :, start + part.start : start + part.stop, band] = True
    assert (use.read(reading, backend) - masked(use, mask)).abs().max() <= 1e-6


def test_bands_are_as_dense_as_the_plan_says() -> None:
    reading, tokens = Radial(2, 1, 16), 1600
    seen, own = list(range(40)), (38, 39)
    bands = radial_bands(reading, seen, own, tokens)
    assert len({len(band) for band in bands}) == 1
    assert len(bands[0]) == pytest.approx(tokens * reading.frames_read(38, 2))
    for band, part in zip(bands, band_slices(tokens, 16), strict=True):
        assert len(band.unique()) == len(band)
        for frame in (0, 38, 39):  # sink and own frames whole
            assert ((band // tokens) == frame).sum() == tokens
        middle = (part.start + part.stop) // 2
        for frame in sorted(set((band // tokens).tolist())):
            inside = band[band // tokens == frame] % tokens
            assert inside.min() <= middle <= inside.max()


@pytest.mark.parametrize("keys", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_blocks_cover_the_mask_and_only_whole_ones_skip_it(keys: int) -> None:
    draw = torch.Generator().manual_seed(keys)
    bands = [torch.randperm(keys, generator=draw)[: max(1, keys // n)] for n in (1, 2, 9)]
    mask = BandMask.of_bands(bands, keys, band_slices(48, 3), frames=7)
    blocks = mask.blocks()
    dense = torch.nn.functional.pad(mask.dense(), (0, -keys % BLOCK, 0, -48 * 7 % BLOCK))
    split = dense.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    assert torch.equal(blocks.to_dense()[0, 0].bool(), split[0, 0].any(3).any(1))
    full = blocks.full_kv_num_blocks
    assert full is not None
    # a row of blocks that the queries do not fill may count as whole
    filled = torch.nn.functional.pad(mask.dense(), (0, -keys % BLOCK)).unflatten(3, (-1, BLOCK))
    rows = [row.all(-1).all(0) for row in filled[0, 0].split(BLOCK)]
    assert int(full.sum()) == sum(int(row.sum()) for row in rows)


def test_a_band_that_reads_nothing_is_refused() -> None:
    mask = BandMask.of_bands([torch.arange(3), torch.arange(0)], 9, band_slices(32, 2), 1)
    with pytest.raises(BackendError, match="all masked"):
        mask.blocks()


def test_layers_and_steps_read_what_the_plan_says() -> None:
    use = moment(*LAYOUTS["everything"])
    plan = AttentionPlan(
        "global",
        Window(6, 2),
        (Override("steps", 1, None, TopK(2, None, 0, 0)), Override("layers", 2, 2, Full())),
    )
    reader = Reader(plan, choose_backend("sdpa", CPU))
    expected: list[tuple[tuple[int, int | None], Reading]] = [
        ((0, 0), Window(6, 2)),
        ((0, None), Window(6, 2)),
        ((0, 3), TopK(2, None, 0, 0)),
        ((2, 3), Full()),
    ]
    for place, reading in expected:
        # one layer of keys stands for all of them
        made = reader.attend(use.q, use.k, use.v, _OneLayer(use.cache), place)
        assert torch.equal(made, use.read(reading))


class _OneLayer(KVCache):
    """A cache whose every layer is that of another cache."""

    def __init__(self, cache: KVCache) -> None:
        for name in vars(cache):
            setattr(self, name, getattr(cache, name))

    def means(self, layer: int) -> torch.Tensor:
        """Those of the only layer."""
        return super().means(layer * 0)


def video(model: CausalModel, attention: str, **fields: object) -> torch.Tensor:
    """Latents of 8 chunks."""
    values = {"prompt": "a red ball", "seed": 5, "num_frames": 61, "attention": attention, **fields}
    plan = make_plan(VideoRequest(**values), model.manifest, model.shape)  # type: ignore[arg-type]
    return torch.cat([chunk.latents for chunk in rollout(plan, model)], 2)


def test_rollouts_of_exact_plans_are_the_same_video(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    plain = {name: video(model, name) for name in ("window", "global")}
    for name, exact in [
        ("window", "chunked:10"),
        ("global", "global+chunked:10"),
        ("global", "topk:40"),
        ("global", "topk:1.0"),
        ("global", "radial:40"),
        ("global", "global,layers:0-1=window:40,steps:0=topk:40"),
    ]:
        assert (plain[name] - video(model, exact)).abs().max() <= 1e-5, exact


def test_rollouts_that_read_less_are_other_videos_and_begin_the_same(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    whole = video(model, "global")
    for attention in ("topk:3", "topk:0.5", "radial:2", "global,layers:1=window:6"):
        made = video(model, attention)
        assert torch.isfinite(made).all()
        assert torch.equal(made[:, :, :4], whole[:, :, :4]), "early chunks are dense"
        assert (made - whole).abs().max() > 1e-3
    windowed = video(model, "window")
    assert (video(model, "global+window:6") - windowed).abs().max() > 1e-3  # other positions
    assert torch.equal(
        video(model, "global,steps:0=topk:4"), video(model, "global,steps:0-0=topk:4")
    )
    assert (video(model, "global,steps:0=topk:3") - video(model, "topk:3")).abs().max() > 1e-3


def test_a_ring_is_ranked_by_frames_and_not_by_slots(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    small = video(model, "window+topk:3", window=12)
    assert torch.isfinite(small).all()
    assert (small - video(model, "window", window=12)).abs().max() > 1e-3
    assert (
        video(model, "topk:11", window=12) - video(model, "window", window=12)
    ).abs().max() <= 1e-5
