"""Which backend computes which attention: what each can do, its limits, and what is compiled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.cli import main
from longtake.errors import BackendError
from longtake.video import attention_backends
from longtake.video.attention import attend_lse, sdpa
from longtake.video.attention_backends import (
    BIAS,
    LSE,
    Backend,
    Sizes,
    beyond_limits,
    choose_backend,
    choose_backends,
    make_backend,
    why_not,
)
from longtake.video.attention_blocks import BandMask
from longtake.video.attention_flex import adds_bias, flex_function

MakeModel = Callable[..., Path]
CPU = torch.device("cpu")
TOLERANCE = 1e-6


Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(dtype: torch.dtype = torch.float32) -> Three:
    """Queries, keys and values [2, 130, 3, 24] of unit variance."""
    draw = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(2, 130, 3, 24, generator=draw).to(dtype) for _ in "qkv")
    return q, k, v


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize(
    "size", [(2, 1, 1, 130), (1, 1, 1, 130), (2, 3, 130, 130), (1, 3, 1, 130), (1, 1, 130, 1)]
)
def test_every_backend_adds_the_whole_bias(backend: str, size: tuple[int, ...]) -> None:
    use = inputs()
    bias = torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))
    exact = sdpa(*inputs(torch.float64), bias.double())
    assert (make_backend(backend, CPU).attend_biased(*use, bias) - exact).abs().max() <= TOLERANCE
    assert (make_backend(backend, CPU).attend_biased(*use) - sdpa(*use)).abs().max() <= TOLERANCE
    # one that masks
    bias = bias.expand(2, 3, 130, 130).clone()
    bias[..., 100:] = -torch.inf
    masked = make_backend(backend, CPU).attend_biased(*use, bias)
    assert (masked - sdpa(*use, bias)).abs().max() <= TOLERANCE


@pytest.fixture
def without_bias(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A backend that runs here and adds no bias: flash, as if it were."""
    caches = (attention_backends._made, attention_backends._missing)
    refuse = attention_backends._without_bias("flash", sdpa)
    made = Backend("flash", sdpa, attend_lse, refuse, frozenset({LSE}))
    monkeypatch.setitem(attention_backends.MAKERS, "flash", lambda _: made)
    monkeypatch.delitem(attention_backends.PACKAGES, "flash")
    for cache in caches:
        cache.cache_clear()
    yield "flash"
    for cache in caches:
        cache.cache_clear()


def test_cross_attention_has_the_backend_of_self_attention_where_it_can(without_bias: str) -> None:
    sizes = Sizes(head_dim=16)
    for name in ("sdpa", "flex"):
        chosen = choose_backends(name, CPU, torch.float32, sizes)
        assert chosen.own is chosen.cross is make_backend(name, CPU)
        assert chosen.as_dict() == {"self_attention": name, "cross_attention": name}
    chosen = choose_backends(without_bias, CPU, torch.bfloat16, sizes)
    assert (chosen.own.name, chosen.cross.name) == ("flash", "sdpa")
    because = "flash adds no bias to the scores, as a prompt's padding needs"
    assert chosen.as_dict()["because"] == because
    with pytest.raises(BackendError, match=r"^backend=flash: adds no bias to the scores$"):
        choose_backend(without_bias, CPU, torch.bfloat16, needs=[BIAS])
    use = inputs(torch.bfloat16)
    assert torch.equal(chosen.own.attend_biased(*use), sdpa(*use))
    with pytest.raises(BackendError, match=r"^backend=flash: adds no bias to the scores$"):
        chosen.own.attend_biased(*use, torch.zeros(1, 1, 1, 130))


@pytest.mark.parametrize(
    ("name", "dtype", "width", "reason"),
    [
        ("flash", torch.float16, 256, None),
        ("flash", torch.float32, 64, "computes in bfloat16 and float16, this is float32"),
        ("flash", torch.bfloat16, 264, "has heads of at most 256 channels, these have 264"),
        ("xformers", torch.float32, 256, None),
        (
            "xformers",
            torch.float64,
            64,
            "computes in bfloat16, float16 and float32, this is float64",
        ),
        ("xformers", torch.float32, 257, "has heads of at most 256 channels, these have 257"),
        ("sdpa", torch.float64, 512, None),
        ("flex", torch.float64, 512, None),
        ("flash", None, None, None),
    ],
)
def test_limits_of_kernels_are_known_before_they_run(
    name: str, dtype: torch.dtype | None, width: int | None, reason: str | None
) -> None:
    assert beyond_limits(name, dtype, width) == reason


def test_limits_of_kernels_are_asked_where_they_are_there(without_bias: str) -> None:
    for dtype, width, reason in [
        (torch.float32, 64, "computes in bfloat16 and float16, this is float32"),
        (torch.bfloat16, 264, "has heads of at most 256 channels, these have 264"),
    ]:
        assert why_not(without_bias, CPU, dtype, head_dim=width) == reason
        with pytest.raises(BackendError, match=f"^backend=flash: {reason}"):
            choose_backend(without_bias, CPU, dtype, sizes=Sizes(head_dim=width))
    assert without_bias in attention_backends.MEASURED
    small = Sizes(1, 264, queries=8, keys=8)  # what would be measured
    wide = choose_backend("auto", CPU, torch.bfloat16, sizes=small)
    assert wide is make_backend("sdpa", CPU)


def test_a_device_has_one_backend_whatever_it_is_called() -> None:
    for names in (("cuda", "cuda:0"), ("cpu", "cpu:0")):
        first, second = (make_backend("sdpa", torch.device(name)) for name in names)
        assert first is second
    other = attention_backends.one_device(torch.device("cuda:1"))
    assert other == torch.device("cuda:1")


class Compiler:
    """Compiles to what it was given, and counts."""

    def __init__(self) -> None:
        self.kernels = 0

    def __call__(self, module: Any, _: Any) -> Any:
        self.kernels += 1
        return module.forward


@torch.inference_mode()
def test_flex_compiles_for_kinds_of_calls_and_not_for_numbers_of_keys() -> None:
    """Whole, biased and masked, over a rollout that sees more with every chunk."""
    torch._dynamo.reset()
    compiler, draw = Compiler(), torch.Generator().manual_seed(0)
    run = flex_function(CPU, compiler)
    after = []
    for kind in ("whole", "bias", "mask"):
        for frames in (2, 4, 6, 9, 12, 31):
            tokens = (2 * 40, *[frames * 40] * 2)
            q, k, v = (torch.randn(2, n, 3, 16, generator=draw) for n in tokens)
            bias = mask = None
            if kind == "bias":
                bias = torch.randn(2, 1, 1, frames * 40, generator=draw)
            if kind == "mask":
                picked = torch.rand(2, 3, frames, generator=draw).argsort(-1)[..., :2]
                mask = BandMask.of_frames(picked, frames, 40, 80)
                bias = torch.zeros(()).where(mask.dense(), -torch.inf)
            out = run(
                *(q, k, v),
                None if mask is None else mask.blocks(),
                adds_bias(bias) if kind == "bias" and bias is not None else None,
            ).out
            wide = None if bias is None else bias.double()
            exact = sdpa(q.double(), k.double(), v.double(), wide)
            assert (out - exact).abs().max() <= TOLERANCE
        after.append(compiler.kernels)
    torch._dynamo.reset()
    assert 3 <= after[-1] <= 8, after
    assert after[0] <= 2


BECAUSE = "flash adds no bias to the scores, as a prompt's padding needs"


@pytest.mark.parametrize("backend", ["auto", "flex", "flash"])
def test_plan_and_receipt_say_what_computes_each_attention(
    make_model: MakeModel,
    without_bias: str,
    backend: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backend that adds no bias makes the video all the same, and says who helped."""
    monkeypatch.setattr(attention_backends, "MEASURED", ("sdpa",))
    # nothing here computes a whole model in 16 bits: let it compute in what the others do
    monkeypatch.setitem(attention_backends.LIMITS, without_bias, ((torch.float32,), 256))
    own = "sdpa" if backend == "auto" else backend
    expected = {"self_attention": own, "cross_attention": own}
    if backend == "flash":
        expected |= {"cross_attention": "sdpa", "because": BECAUSE}
    more = ["a red ball", "--model", str(make_model()), "--num-frames", "5", "--device", "cpu"]
    more += ["--backend", backend]
    assert main(["plan", *more, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == expected
    assert main(["plan", *more]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ", ".join(f"{name} {value}" for name, value in expected.items()) in shown
    if backend == "auto":
        return
    assert main(["generate", *more, "--steps", "1", "-o", str(tmp_path / "a.mp4")]) == 0
    receipt = json.loads((tmp_path / "a.json").read_text())
    assert receipt["plan"]["backend"] == expected
    ran = receipt["engine"]["backend"]
    assert {name: value for name, value in ran.items() if name != "vae_convolutions"} == expected


def test_a_plan_refuses_a_backend_that_is_not_here(
    make_model: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", "a red ball", "--model", str(make_model()), "--device", "cpu"]
    assert main([*line, "--backend", "flash"]) == 3
    assert "backend=flash: needs a CUDA device, this is cpu" in capsys.readouterr().err
