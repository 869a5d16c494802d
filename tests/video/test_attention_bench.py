"""``longtake bench attention``: its rows, slopes and errors. Nothing is asserted of time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch

from longtake.cli import main
from longtake.errors import RequestError, StateError
from longtake.video import attention_bench, attention_trial, attention_video
from longtake.video.attention_backends import make_backend
from longtake.video.attention_bench import (
    CPU_SHAPE,
    PLANS,
    Row,
    as_document,
    check_tokens,
    measure,
    slope,
    slopes_of,
)
from longtake.video.attention_plan import AttentionPlan
from longtake.video.attention_trial import Trial, Way
from longtake.video.attention_video import Shape, Video, Where, output_error
from longtake.video.components import CausalModel
from longtake.video.memory import peak_bytes

Refuse = Callable[..., str]
CPU = torch.device("cpu")
TINY = Where(CPU, "fp32", Shape(2, 16, 8, 2, 4, 1))
MIB = 2**20


def test_the_slope_of_a_power_is_its_exponent() -> None:
    for power in (0.0, 1.0, 1.7, 2.0):
        assert slope((x, 3.0 * x**power) for x in (10.0, 40.0, 90.0)) == pytest.approx(power)
    assert slope([(1024.0, 2.0)]) is None
    assert slope([(1024.0, 2.0), (1024.0, 3.0)]) is None
    assert slope([(1.0, 1.0), (math.e, math.e), (math.e**2, math.e**4)]) == pytest.approx(2.0)


def test_slopes_are_told_by_plan_and_for_its_fastest_backend() -> None:
    rows = [
        Row(plan, backend, tokens, unit * tokens**power, None, None)
        for plan, backend, unit, power in (
            ("full", "flex", 1e-3, 1.5),
            ("full", "sdpa", 1e-9, 2.0),
            ("window", "sdpa", 1e-6, 1.0),
        )
        for tokens in (1024, 2048, 4096)
    ]
    assert slopes_of(rows)["full"] == {"flex": pytest.approx(1.5), "sdpa": pytest.approx(2.0)}
    document = as_document(rows, TINY, {"flash": "not here"}, [])
    assert document["slopes"] == {"full": pytest.approx(2.0), "window": pytest.approx(1.0)}


def test_json_has_a_row_for_every_plan_backend_and_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention_bench, "ERROR_CHUNKS", 4)
    monkeypatch.setattr(attention_video, "REPEAT_S", 0.0)
    monkeypatch.setattr(attention_trial, "MAX_LAYERS", 1)
    argv = ["bench", "attention", "--tokens", "512,128", "--device", "cpu", "--json"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    assert {tuple(row) for row in rows} == {tuple(asdict(Row("", "", 0, 0.0, 0, 0.0)))}
    found = {(row["plan"], row["backend"], row["tokens"]) for row in rows}
    expected = {(p, b, t) for p in PLANS for b in ("sdpa", "flex") for t in (128, 512)}
    assert (found, len(rows)) == (expected, len(expected))
    assert all(row["seconds"] > 0 for row in rows)
    assert list(document["slopes"]) == list(PLANS)
    reason = "needs a CUDA device, this is cpu"
    assert document["missing"] == {"flash": reason, "xformers": reason}
    errors = {(row["plan"], row["backend"]): row["error"] for row in rows}
    for backend in ("sdpa", "flex"):
        assert all(errors[plan, backend] < 1e-5 for plan in ("full", "chunked:1024"))
        # 9 past frames: 3 of the sink, which every plan reads, and fewer than 8 more
        assert errors["topk:8", backend] < 1e-5
        assert all(0.01 < errors[p, backend] < 2 for p in ("window", "topk:0.5", "radial"))
    assert errors["radial", "flex"] == pytest.approx(errors["radial", "sdpa"], rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--backend flash", 3, "backend=flash: needs a CUDA device, this is cpu"),
        ("--backend swift", 2, "backend='swift': no such backend; sdpa, flash, xformers, flex"),
        ("--tokens 1000", 2, "tokens=1000: a latent frame has 32 here; nearest 992 or 1024"),
        ("--tokens 0", 2, "tokens=0: is out of range; 128 to 1048576"),
        ("--tokens many", 2, "tokens='many': is no list of numbers"),
        ("--threads 0", 2, "threads=0: is out of range; 1 or more"),
        ("--dtype fp64", 2, "invalid choice: 'fp64'"),
        ("--device tpu", 3, "device='tpu': not available here"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    refuse: Refuse, flags: str, code: int, message: str
) -> None:
    device = "" if "--device" in flags else "--device cpu "
    refuse(f"bench attention {device}{flags}", code, message)


def test_lengths_come_in_order_and_once() -> None:
    assert check_tokens([2048, 1024, 2048], CPU_SHAPE) == (1024, 2048)
    with pytest.raises(RequestError, match="tokens=33: "):
        check_tokens([33], Shape(1, 8, 32, 1, 4, 1))


def test_a_video_attends_once_a_chunk_and_reads_what_its_plan_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    sdpa = make_backend("sdpa", CPU)

    def count(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        read.append(k.shape[1] // TINY.shape.frame_tokens)
        return sdpa.attend(q, k, v)

    backend = type(sdpa)("sdpa", count, sdpa.attend_lse, sdpa.attend_biased, sdpa.can)
    for plan, frames in (
        ("global", [2, 4, 6, 8]),
        ("window", [2, 4, 4, 4]),
        ("global+topk:1", [2, 4, 4, 4]),
    ):
        read.clear()
        Video(plan, backend, 8 * TINY.shape.frame_tokens, TINY).seconds()
        assert read == frames, plan


def test_error_on_random_data_is_rounding_where_everything_is_read() -> None:
    tokens = 16 * TINY.shape.frame_tokens
    assert output_error("global+chunked:24", "sdpa", tokens, TINY) < 1e-5
    assert output_error("window", "sdpa", tokens, TINY) > 0.1


def test_a_case_without_memory_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(plan: str, backend: str, tokens: int, where: Where) -> tuple[float, None]:
        if plan == "global" and tokens == 64:
            raise torch.OutOfMemoryError("out of memory")
        return 1.0, None

    monkeypatch.setattr(attention_bench, "measure_case", full)
    rows, skipped = measure((32, 64), ["sdpa"], TINY, {("full", "sdpa"): 0.5}, lambda _: None)
    assert len(rows) == 2 * len(PLANS) - 1
    assert [row.error for row in rows if row.plan == "full"] == [0.5]
    assert skipped == [{"plan": "full", "backend": "sdpa", "tokens": 64, "reason": "out of memory"}]


def test_a_trial_that_watched_nothing_has_no_result(papercut: CausalModel) -> None:
    with pytest.raises(StateError, match="no activations were captured"):
        Trial([Way(AttentionPlan(), "sdpa")], papercut).results  # noqa: B018


def test_peak_memory_counts_what_a_call_takes() -> None:
    taken = peak_bytes(lambda: torch.ones(32, MIB // 4).sum(), CPU)
    if taken is None:
        pytest.skip("this system does not tell a process's peak")
    assert 30 * MIB < taken < 64 * MIB
