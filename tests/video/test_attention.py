"""Every exact way to attend equals SDPA: backends, parts merged, keys read in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from longtake.errors import BackendError
from longtake.video import attention_backends
from longtake.video.attention import (
    Merger,
    Partial,
    attend_chunked,
    attend_lse,
    attend_lse_math,
    merge,
    sdpa,
)
from longtake.video.attention_backends import (
    BACKENDS,
    MAKERS,
    Sizes,
    choose_backend,
    make_backend,
    measure,
)

CPU = torch.device("cpu")
TOLERANCE = 1e-6
SHAPES = {
    "square": (2, 130, 130, 3, 24),
    "few queries, many keys": (1, 40, 700, 2, 48),
    "many queries, few keys": (1, 700, 40, 2, 32),
    "one query": (2, 1, 333, 4, 64),
    "one key": (1, 50, 1, 2, 16),
    "one of each": (1, 1, 1, 1, 8),
    "odd head dimension": (1, 33, 77, 5, 7),
}


class Inputs(NamedTuple):
    """Queries, keys and values [B, S, H, D] of unit variance."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """All three in another dtype."""
        return Inputs(*(x.to(dtype) for x in self))


def inputs(name: str = "square", dtype: torch.dtype = torch.float32) -> Inputs:
    """Seeded random numbers of a shape."""
    batch, queries, keys, heads, dim = SHAPES[name]
    draw = torch.Generator().manual_seed(len(name))

    def random(tokens: int) -> torch.Tensor:
        return torch.randn(batch, tokens, heads, dim, generator=draw)

    return Inputs(random(queries), random(keys), random(keys)).to(dtype)


def exact_lse(use: Inputs) -> torch.Tensor:
    """LSE in float64, written as plainly as can be."""
    q, k = use.q.double(), use.k.double()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    lse: torch.Tensor = scores.logsumexp(-1)
    return lse


def chunked(tokens: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Attention that reads keys so many at a time."""
    return lambda q, k, v: attend_chunked(q, k, v, tokens)


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sdpa with LSE": lambda q, k, v: attend_lse(q, k, v).out,
    "math": lambda q, k, v: attend_lse_math(q, k, v).out,
    "flex": lambda q, k, v: choose_backend("flex", CPU).attend(q, k, v),
    "chunks of 64": chunked(64),
    "chunks of 1": chunked(1),
    "a ragged last chunk": chunked(129),
    "chunks by math": lambda q, k, v: attend_chunked(q, k, v, 50, attend_lse_math),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_exact_way_equals_sdpa(shape: str, way: str) -> None:
    use = inputs(shape)
    assert (WAYS[way](*use) - sdpa(*use)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("way", ["sdpa with LSE", "math", "chunks of 64", "a ragged last chunk"])
@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_is_as_good_as_sdpa_in_bf16(shape: str, way: str) -> None:
    use = inputs(shape, torch.bfloat16)
    truth = sdpa(*use.to(torch.float64))
    own = (WAYS[way](*use).double() - truth).abs().max()
    theirs = (sdpa(*use).double() - truth).abs().max()
    assert WAYS[way](*use).dtype == torch.bfloat16
    assert own <= 2 * theirs + 1e-6


@pytest.mark.parametrize("form", [attend_lse, attend_lse_math])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_lse_is_that_of_the_scores(
    shape: str, form: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Partial]
) -> None:
    use = inputs(shape)
    part = form(*use)
    assert part.lse.dtype == torch.float32
    assert part.lse.shape == (use.q.shape[0], use.q.shape[2], use.q.shape[1])
    assert (part.lse - exact_lse(use)).abs().max() <= 2e-6
    assert form(*use.to(torch.float64)).lse.dtype == torch.float64
    assert (form(*use.to(torch.float64)).lse - exact_lse(use)).abs().max() <= 1e-12


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_parts_merge_in_any_order(order: tuple[int, ...]) -> None:
    use = inputs("few queries, many keys")
    cuts = [slice(0, 1), slice(1, 400), slice(400, None)]
    parts = [attend_lse(use.q, use.k[:, c], use.v[:, c]) for c in (cuts[i] for i in order)]
    kept = [part.out.clone() for part in parts]
    whole = merge(parts)
    assert (whole.out - sdpa(*use)).abs().max() <= TOLERANCE
    assert (whole.lse - exact_lse(use)).abs().max() <= 2e-6
    assert all(torch.equal(part.out, before) for part, before in zip(parts, kept, strict=True))


def test_merging_is_safe_where_scores_are_far_apart() -> None:
    use = inputs("few queries, many keys")
    far = Inputs(use.q * 40, use.k, use.v)
    # an LSE near 150 has steps of 1.5e-5, so that is what weights are good to
    assert (chunked(13)(*far) - sdpa(*far)).abs().max() <= 1e-4
    nothing = Partial(torch.zeros_like(use.q), torch.full((1, 2, 40), -torch.inf))
    seen = attend_lse(*use)
    for order in ([nothing, seen], [seen, nothing], [nothing, nothing, seen]):
        assert (merge(order).out - seen.out).abs().max() <= TOLERANCE
        assert torch.equal(merge(order).lse, seen.lse)


def test_float64_stays_float64_through_merging() -> None:
    use = inputs(dtype=torch.float64)
    assert (chunked(17)(*use) - sdpa(*use)).abs().max() <= 1e-14


@pytest.mark.parametrize("form", [attend_lse, attend_lse_math])
def test_a_bias_is_added_to_the_scores(form: Callable[..., Partial]) -> None:
    use = inputs("few queries, many keys")
    bias = torch.zeros(1, 1, 1, 700)
    bias[..., 300:] = -torch.inf
    bias[..., :100] = 1.5
    assert (form(*use, bias).out - sdpa(*use, bias)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("form", [attend_lse, attend_lse_math])
def test_a_query_without_keys_is_refused(form: Callable[..., Partial]) -> None:
    use = inputs("few queries, many keys")
    masked = torch.zeros(1, 1, 40, 700)
    masked[:, :, 7] = -torch.inf
    with pytest.raises(BackendError, match="all masked"):
        form(*use, masked)
    with pytest.raises(BackendError, match=r"q, k, v .* one query and key at least"):
        form(use.q, use.k[:, :0], use.v[:, :0])
    with pytest.raises(BackendError, match="one query and key at least"):
        form(use.q[:, :0], use.k, use.v)
    with pytest.raises(BackendError, match="one query and key at least"):
        form(use.q, use.k, use.v[:, :5])
    with pytest.raises(BackendError, match="nothing to merge"):
        Merger().result()


@pytest.mark.parametrize("form", [attend_lse, attend_lse_math])
def test_shapes_that_do_not_fit_are_refused(form: Callable[..., Partial]) -> None:
    q, k, v = inputs("few queries, many keys")
    for other_k, other_v in [(k[:, :, :1], v[:, :, :1]), (k[..., :8], v), (k[0], v[0])]:
        with pytest.raises(BackendError, match=r"of one B, H and D"):
            form(q, other_k, other_v)
    with pytest.raises(BackendError, match=r"of one B, H and D"):
        form(torch.cat([q, q]), k, v)
    with pytest.raises(BackendError, match="boolean bias"):
        form(q, k, v, torch.ones(1, 1, 1, k.shape[1], dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_numbers_need_not_lie_side_by_side(dtype: torch.dtype) -> None:
    use = [x.to(dtype) for x in inputs("few queries, many keys")]
    spread = [torch.stack([x, x], -1).flatten(-2)[..., ::2] for x in use]
    assert torch.equal(attend_lse(*spread).out, attend_lse(*use).out)
    parts = [attend_chunked(q, k, v, 64) for q, k, v in (spread, use)]
    assert torch.equal(*parts)


@pytest.mark.parametrize("tokens", [64, 1000])
@pytest.mark.parametrize("form", [attend_lse, attend_lse_math])
def test_what_is_no_number_stays_so(form: Callable[..., Partial], tokens: int) -> None:
    q, k, v = inputs("few queries, many keys")
    q[:, 3, 1] = torch.nan
    out = attend_chunked(q, k, v, tokens, form)
    assert out[:, 3, 1].isnan().all()
    assert not out[:, 4:].isnan().any()


def test_values_may_be_wider_than_keys() -> None:
    use = inputs("few queries, many keys")
    wide = torch.cat([use.v, -use.v], -1)
    out = attend_lse(use.q, use.k, wide).out
    assert (out[..., :48] - sdpa(*use)).abs().max() <= TOLERANCE
    assert torch.equal(out[..., 48:], -out[..., :48])


def test_missing_backends_are_errors_not_fallbacks() -> None:
    with pytest.raises(BackendError, match=r"^backend=flash: needs a CUDA device, this is cpu"):
        choose_backend("flash", CPU)
    with pytest.raises(BackendError, match=r"^backend=magic: no such backend; auto, sdpa, flash"):
        choose_backend("magic", CPU)
    cuda = torch.device("cuda")
    for name in ("flash", "xformers"):
        reason = attention_backends.why_not(name, cuda, torch.bfloat16)
        assert reason is not None
        assert "is not installed" in reason or "does not run on this device" in reason


def test_auto_measures_nothing_where_one_candidate_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = choose_backend("auto", CPU, torch.float32)
    assert (chosen.name, chosen.attend) == ("sdpa", sdpa)
    assert chosen is choose_backend("sdpa", CPU)
    # with a second one, the faster is taken, and the choice is kept
    monkeypatch.setattr(attention_backends, "MEASURED", ("flex", "sdpa"))
    small = Sizes(heads=2, head_dim=16, queries=300, keys=900)
    first = choose_backend("auto", CPU, torch.float32, sizes=small)
    assert first is choose_backend("auto", CPU, torch.float32, sizes=small)
    assert set(measure(("flex", "sdpa"), CPU, torch.float32, small)) == {"flex", "sdpa"}


def test_every_name_makes_a_backend_or_says_why_not() -> None:
    assert ("auto", *MAKERS) == BACKENDS
    for name in MAKERS:
        reason = attention_backends.why_not(name, CPU, None)
        assert reason is not None or make_backend(name, CPU).name == name
