"""Every benchmark runs at its smallest setting and prints its rows. Nothing here is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the benchmarks lie beside the package, not in it

from benchmarks import (  # noqa: E402
    attention_cost,
    bundled,
    gpu_attention,
    gpu_models,
    gpu_rollout,
    report,
    vae_decode,
)
from longtake.video import attention_video  # noqa: E402
from longtake.video.attention_bench import PLANS  # noqa: E402
from longtake.video.rollout import Rollout  # noqa: E402

# of the others: test_service.py
ENGINE = (
    *("overhead", "memory", "length", "speed", "parallel", "vae_decode"),
    *("attention", "attention_cost"),
)


def test_figures_are_printed_as_one_json_document() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *ENGINE, "--smallest", "--json"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    figures = document["figures"]
    assert list(figures) == list(ENGINE)
    judged = [row for f in figures.values() for row in f["rows"] if row["target"] is not None]
    assert {row["verdict"] for row in judged} <= {"met", "missed"}
    names = [row["name"] for row in judged]
    for wanted in ("engine overhead", "peak memory", "last chunks", "fps", "WanPipeline", "conv3d"):
        assert any(wanted in name for name in (*names, *(r["unit"] for r in judged))), wanted
    assert len(figures["length"]["table"]["lines"]) > 1


def test_one_figure_alone_prints_lines_with_target_and_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vae_decode", "--smallest"])
    assert report.run("", {"vae_decode": vae_decode.figure}) == 0
    lines = capsys.readouterr().out.splitlines()
    ratio = next(line for line in lines if line.startswith("stacked / conv3d, 1 thread |"))
    assert "| target >= 1 x | " in ratio
    assert ratio.endswith(("| met", "| missed"))


def test_parts_can_be_named_and_a_strange_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def figure(name: str) -> report.Benchmark:
        return lambda _scale: report.Figure(name, [], "")

    parts = {name: figure(name) for name in ("first", "second")}
    monkeypatch.setattr(sys, "argv", ["benchmarks", "second", "--smallest"])
    assert report.run("", parts) == 0
    printed = capsys.readouterr().out
    assert "## second" in printed
    assert "## first" not in printed
    monkeypatch.setattr(sys, "argv", ["benchmarks", "third"])
    with pytest.raises(SystemExit, match="2"):
        report.run("", parts)
    assert "third: no such part; there are first, second" in capsys.readouterr().err


def test_rows_are_judged_by_their_side_of_the_target() -> None:
    row = report.Row("engine overhead", 1.031, "x", 1.05)
    assert row.line() == "engine overhead | 1.03 x | target <= 1.05 x | met"
    assert report.Row("engine overhead", 1.06, "x", 1.05).verdict == "missed"
    assert report.Row("engine", 15.9, "fps", 16.0, at_least=True).verdict == "missed"
    assert report.Row("chunk", 812.0, "ms").line() == "chunk | 812 ms"


def test_gpu_rollout_runs_tiny_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["gpu_rollout", "--tiny", "--chunks", "1", "--compiler", "aot_eager"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_rollout.main() == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert [line[:2] for line in lines] == [
        [backend, compiled] for compiled in ("off", "on") for backend in gpu_rollout.BACKENDS
    ]
    assert [bool(line[2]) for line in lines] == [True, False, False] * 2
    assert "needs a CUDA device" in lines[1][-1]


def test_gpu_rollout_says_what_the_budget_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_rollout", "--tiny", "--budget-s", "0", "--json"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_rollout.main() == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["results"]) == 2 * len(gpu_rollout.BACKENDS)
    assert all("budget" in line["note"] for line in document["results"])


def test_compiled_blocks_make_the_same_chunks_and_keep_writing_the_cache() -> None:
    parts = gpu_models.RandomParts(gpu_models.TINY, torch.device("cpu"), "fp32")
    plan = gpu_rollout.plan_chunks(parts, 1)
    plain, compiled = parts.model("sdpa"), parts.model("sdpa")
    gpu_rollout.compile_blocks(compiled, "aot_eager")
    rollouts = Rollout(plan, plain), Rollout(plan, compiled)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for _ in plan.chunks:
        expected, found = (bundled.next_chunk(rollout) for rollout in rollouts)
        torch.testing.assert_close(found.latents, expected.latents, rtol=1e-4, atol=1e-4)
    # a graph for every layer would soon exceed torch's limit, and the rest would run uncompiled
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6


def test_bfloat16_models_keep_what_diffusers_keeps_in_float32() -> None:
    parts = gpu_models.RandomParts(gpu_models.TINY, torch.device("cpu"), "bf16")
    model = parts.model("sdpa")
    kinds = {name: p.dtype for name, p in model.wan.transformer.named_parameters()}
    assert kinds["blocks.0.scale_shift_table"] == torch.float32
    assert kinds["blocks.0.attn1.to_q.weight"] == torch.bfloat16
    chunk = bundled.next_chunk(Rollout(gpu_rollout.plan_chunks(parts, 1), model))
    assert chunk.latents.dtype == torch.bfloat16
    assert torch.isfinite(chunk.latents).all()


def test_gpu_attention_runs_tiny_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention_video, "REPEAT_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["gpu_attention", "--dry-run", "--json"])
    assert gpu_attention.main() == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["shapes"]) == list(gpu_attention.TINY)
    measured = [row for row in document["rows"] if not row["note"]]
    # two shapes, all plans, the two backends of a CPU, two lengths
    assert len(measured) == 2 * len(PLANS) * 2 * len(gpu_attention.TINY_FRAMES)
    for row in measured:
        exact = row["plan"] in ("full", "chunked:1024")
        assert row["seconds"] > 0
        assert (row["error"] < 1e-5) or not exact
    missing = {row["backend"] for row in document["rows"] if "needs a CUDA device" in row["note"]}
    assert missing == {"flash", "xformers"}
    slopes = document["slopes"]["tiny, 2 heads"]
    assert {plan: set(found) for plan, found in slopes.items()} == {
        plan: {"sdpa", "flex"} for plan in PLANS
    }


def test_gpu_attention_says_what_the_budget_left_out_and_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_attention", "--dry-run", "--budget-s", "0"])
    assert gpu_attention.main() == 0
    assert "skipped: the time budget is spent" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gpu_attention"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        gpu_attention.main()
    assert "no CUDA device here" in capsys.readouterr().err


def test_the_cost_of_a_chunk_is_told_by_its_number_and_the_slope_is_that_of_the_sum() -> None:
    flat, growing = [1.0] * 40, [float(number) for number in range(1, 41)]
    assert attention_cost.slope_of(flat, 10) == pytest.approx(1.0)
    assert attention_cost.slope_of(growing, 10) == pytest.approx(2.0, abs=0.05)
    assert attention_cost.cost(growing, 20) == 20.0
    assert attention_cost.cost(growing, 40) == pytest.approx(38.0)
