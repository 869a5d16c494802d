"""The table of what goes together: its proofs exist, its refusals are refused, its page is new."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from longtake.cli import main
from longtake.errors import BackendError, RequestError
from longtake.schedulers.prompts import TimedPrompt
from longtake.video import capabilities
from longtake.video.capabilities import (
    COLUMNS,
    PARALLEL,
    PARALLEL_COLUMNS,
    REFUSED_IN_CLIP,
    TABLE,
    Cell,
)
from longtake.video.clip_plan import OTHER_MODE
from longtake.video.generate import Target, generate
from longtake.video.options import EngineOptions, Storage
from longtake.video.prepare import plan_request
from longtake.video.request import REQUEST_FIELDS, VideoRequest, request_from_mapping
from longtake.video.writer import open_writer

MakeModel = Callable[..., Path]
ROOT = Path(__file__).parent.parent
CELLS = [
    (feature, column, cell)
    for feature, cells in TABLE.items()
    for column, cell in zip(COLUMNS, cells, strict=True)
]
OVER_RANKS = [cell for _, cells in PARALLEL.values() for cell in cells]
PROOFS = sorted(
    {cell.proof for cell in [*(c for *_, c in CELLS), *OVER_RANKS] if cell.kind != "refused"}
)
REFUSED = {(cell.proof, column) for _, column, cell in CELLS if cell.kind == "refused"}
# what nothing knows yet, under the name it will have
UNKNOWN = ("quantization", "offload", "compile", "guard", "lora")
IN_HYBRID: dict[str, Any] = {
    "prompts": (TimedPrompt(1.0, "a blue star"),),
    "video": "clip.mp4",
    "strength": 0.5,
    "sink": 2,
    "sampler": "euler",
}


@pytest.mark.parametrize("proof", PROOFS)
def test_every_proof_is_a_test_that_exists(proof: str) -> None:
    file, _, name = proof.partition("::")
    body = ast.parse((ROOT / file).read_text()).body
    assert name.startswith("test_")
    assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_every_feature_has_a_cell_in_every_column() -> None:
    assert all(len(cells) == len(COLUMNS) for cells in TABLE.values())
    assert all(cell.proof and cell.kind in ("exact", "tolerance", "refused") for *_, cell in CELLS)


def test_every_refusal_is_tried_below() -> None:
    # no request can ask for another try at a chunk, so "mode" has nothing to refuse
    # ranks are refused in test_a_layout_is_refused_at_plan_time_or_planned
    tried = {*UNKNOWN, *REFUSED_IN_CLIP, "attention", "backend", "kv_cache", "resume", "mode"}
    # and a profile in tests/video/test_profiles.py
    tried |= {"parallel", "profile"}
    assert {proof for proof, _ in REFUSED} <= tried
    assert {proof for proof, _ in REFUSED} >= {*UNKNOWN, "backend", "resume", "video", "prompts"}
    assert {column for proof, column in REFUSED if proof in UNKNOWN} == set(COLUMNS)


def test_the_table_names_the_fields_that_clip_mode_refuses() -> None:
    assert set(REFUSED_IN_CLIP) == set(OTHER_MODE) == set(IN_HYBRID)
    assert set(REFUSED_IN_CLIP) < set(REQUEST_FIELDS)


@pytest.mark.parametrize("field", REFUSED_IN_CLIP)
def test_clip_mode_refuses_what_the_other_mode_knows(tmp_path: Path, field: str) -> None:
    values = {field: IN_HYBRID[field]}
    if field == "strength":  # only legal with a video, which is named first
        values["video"] = IN_HYBRID["video"]
    request = VideoRequest(prompt="a red ball", mode="clip", num_frames=5, **values)
    with pytest.raises(RequestError, match="clip mode has no such field; leave it out") as caught:
        generate(request, Target(tmp_path / "a.mp4"))
    assert caught.value.field in values
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("attention", ["topk:2", "radial:2", "global", "chunked:9,steps:0=full"])
def test_a_clip_refuses_readings_of_a_cache(tmp_path: Path, attention: str) -> None:
    assert ("attention", "clip") in REFUSED
    request = VideoRequest(prompt="a red ball", mode="clip", num_frames=5, attention=attention)
    with pytest.raises(RequestError, match="a clip is not read so") as caught:
        generate(request, Target(tmp_path / "a.mp4"))
    assert caught.value.field == "attention"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", ["keep", "resume"])
def test_clip_mode_stores_and_resumes_nothing(
    tmp_path: Path, make_model: MakeModel, field: str
) -> None:
    kept = tmp_path / "kept"
    request = VideoRequest(prompt="a red ball", mode="clip", num_frames=5, seed=1)
    if field == "resume":  # latents of the other mode, with a description that says clip
        hybrid = VideoRequest(prompt="a", model=str(make_model()), num_frames=1)
        generate(hybrid, Target(tmp_path / "b.mp4"), storage=Storage(keep=kept))
        told = (kept / "rollout.json").read_text()
        changed = told.replace(f'"model": "{hybrid.model}"', '"model": "papercut", "mode": "clip"')
        (kept / "rollout.json").write_text(changed)
    with pytest.raises(RequestError, match="clip mode has no chunks to store") as caught:
        generate(
            request if field == "keep" else None,
            Target(tmp_path / "a.mp4"),
            storage=Storage(kept) if field == "keep" else Storage(resume=kept),
        )
    assert caught.value.field == {"keep": "keep_latents"}.get(field, field)
    assert not (tmp_path / "a.mp4").exists()


@pytest.mark.parametrize("backend", ["flash", "xformers"])
@pytest.mark.parametrize("column", COLUMNS)
def test_backends_of_a_gpu_are_refused_on_a_cpu(
    tmp_path: Path, make_model: MakeModel, column: str, backend: str
) -> None:
    assert ("backend", column) in REFUSED
    mode, _, attention = column.partition(", ")
    values: dict[str, Any] = {"attention": attention} if attention else {}
    model = "papercut" if mode == "clip" else str(make_model())
    request = VideoRequest(prompt="a", mode=mode, model=model, num_frames=1, **values)
    expected = RequestError if mode == "clip" else BackendError
    with pytest.raises(expected, match=rf"^backend='?{backend}'?: "):
        generate(request, Target(tmp_path / "a.mp4"), EngineOptions("cpu", backend=backend))
    assert not (tmp_path / "a.mp4").exists()


# how the rows of the table of ranks are asked for; a text of a reading is the field `attention`
ASKED: dict[str, dict[str, Any]] = {
    "window": {},
    "global": {"attention": "global"},
    "guided": {"guidance_scale": 2.0},
    "image": {"image": "start.png"},
    "continue": {"video": "clip.mp4"},
    "redraw": {"video": "clip.mp4", "strength": 0.5, "num_frames": 17},
    "recache": {"prompts": (TimedPrompt(1.0, "a blue star"),)},
    "redo": {},
    "resume": {},
    "chunked": {"attention": "chunked:7"},
    "reading": {"attention": "global+window:5"},
    "layers": {"attention": "global,layers:0=window:5"},
    "topk": {"attention": "topk:2"},
    "radial": {"attention": "radial:2"},
    **{name: {"kv_cache": name} for name in ("bf16", "fp16", "int8")},
    "clip": {"mode": "clip", "model": "papercut", "num_frames": 5},
}
LAYOUT_CELLS = [
    (case, layout, cell)
    for case, cells in PARALLEL.values()
    for layout, cell in zip(PARALLEL_COLUMNS.values(), cells, strict=True)
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a start image and a clip."""
    folder = tmp_path_factory.mktemp("inputs")
    pixels = np.zeros((17, 16, 32, 3), np.uint8)
    with open_writer(folder / "clip.mp4", size=(32, 16), fps=8) as writer:
        writer.write(pixels)
    Image.fromarray(pixels[0]).save(folder / "start.png")
    return folder


@pytest.mark.parametrize(("case", "layout", "cell"), LAYOUT_CELLS)
def test_a_layout_is_refused_at_plan_time_or_planned(
    make_model: MakeModel, inputs: Path, case: str, layout: str, cell: Cell
) -> None:
    values = {"prompt": "a red ball", "model": str(make_model()), "num_frames": 33, **ASKED[case]}
    for name in ("image", "video"):
        if name in values:
            values[name] = str(inputs / values[name])
    if "cfg" in layout and case != "clip":
        values["guidance_scale"] = 2.0
    options = EngineOptions("cpu", parallel=layout, kv_cache=values.pop("kv_cache", None))
    if cell.kind != "refused":
        plan = plan_request(VideoRequest(**values), options, probe=False)
        assert plan.as_dict()["chunks"]["count"] > 1
        return
    with pytest.raises(RequestError) as caught:
        plan_request(VideoRequest(**values), options, probe=False)
    assert (caught.value.field, cell.proof) == ("parallel", "parallel")


def test_halves_of_guidance_need_guidance(make_model: MakeModel) -> None:
    request = VideoRequest(prompt="a red ball", model=str(make_model()))
    with pytest.raises(RequestError, match="guidance_scale is 1"):
        plan_request(request, EngineOptions("cpu", parallel="cfg=2"), probe=False)


def test_every_row_of_ranks_is_asked_for() -> None:
    assert {case for case, _ in PARALLEL.values()} == set(ASKED)
    assert all(len(cells) == len(PARALLEL_COLUMNS) for _, cells in PARALLEL.values())


@pytest.mark.parametrize("field", UNKNOWN)
def test_what_is_not_there_is_not_taken_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    with pytest.raises(RequestError, match="no such field; fields: prompt, ") as caught:
        request_from_mapping({"prompt": "a red ball", field: True})
    assert caught.value.field == field
    line = ["generate", "a red ball", "-o", str(tmp_path / "a.mp4"), f"--{field}"]
    for words in (line, [*line, "1"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2
        assert f"unrecognized arguments: --{field}" in capsys.readouterr().err
    assert not hasattr(EngineOptions(), field)
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_what_the_code_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "capabilities.md"
    assert capabilities.main(["--check", str(page)]) == 0, "run `make docs`"
    assert page.read_text(encoding="utf-8") == capabilities.render()
    copy = tmp_path / "page.md"
    assert capabilities.main(["--check", str(copy)]) == 1
    assert "is out of date" in capsys.readouterr().err
    assert capabilities.main(["--write", str(copy)]) == 0
    assert capabilities.main(["--check", str(copy)]) == 0


def test_a_cell_says_its_proof_and_its_note() -> None:
    rows = capabilities.render().splitlines()
    assert sum(row.startswith("| ") for row in rows) == len(TABLE) + len(PARALLEL) + 2
    resume = next(row for row in rows if row.startswith("| stop and resume |"))
    assert "exact: `test_resume_equals_an_undisturbed_run`" in resume
    assert "refused: `resume` (a stopped clip keeps nothing)" in resume
    assert Cell("refused", "mode") == Cell("refused", "mode", "")
