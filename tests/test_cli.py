"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import av
import pytest
from PIL import Image

from longtake import __version__
from longtake.cli import main
from longtake.progress import ConsoleObserver

MakeModel = Callable[..., Path]
BALL = "a red ball bouncing over a green meadow"


def test_generate_prints_the_files_and_keeps_stdout_for_results(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ball.mp4"
    code = main(["generate", BALL, "--model", str(make_model()), "--seed", "7", "-o", str(out)])
    shown = capsys.readouterr().out
    assert code == 0
    assert shown.startswith(f"{out} and {tmp_path / 'ball.json'}: 17 frames, ")


def test_json_is_one_document_on_stdout(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make_model())
    argv = ["generate", BALL, "--model", model, "-o", str(tmp_path / "a.mp4"), "--json"]
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["files"] == [str(tmp_path / "a.mp4"), str(tmp_path / "a.json")]
    assert main(["plan", BALL, "--model", model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cost"]["seconds"]["total"] > 0
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["model"] == "papercut"
    assert main(["plan", BALL, "--model", model, "--num-frames", "34", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["field"] == "num_frames"
    assert "nearest 33 or 37" in error["message"]


def test_plan_is_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{BALL} with a dragon", "--seconds", "8", "--at", "4", BALL]) == 0
    shown = capsys.readouterr().out
    for part in ("num_frames", "129", "kv_cache", "vae_decode", "denoise", "chunks", "asked 4 s"):
        assert part in shown
    assert "papercut does not know: with, dragon" in shown


def test_unknown_words_are_named_in_receipt_and_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    argv = ["generate", "a red dragon over a green meadow", "--frames", "5", "-o", str(out)]
    assert main(argv) == 0
    assert "papercut does not know: dragon" in capsys.readouterr().err
    warnings = json.loads((tmp_path / "a.json").read_text())["warnings"]
    assert warnings == ["papercut does not know: dragon"]


def test_ctrl_c_keeps_finished_chunks_as_a_playable_file(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    plain = ConsoleObserver.on_chunk

    def press(self: ConsoleObserver, frames: int) -> None:
        plain(self, frames)
        written.append(frames)
        if len(written) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ConsoleObserver, "on_chunk", press)
    before = signal.getsignal(signal.SIGINT)
    out = tmp_path / "a.mp4"
    code = main(["generate", BALL, "--model", str(make_model()), "--frames", "33", "-o", str(out)])
    assert code == 130
    assert signal.getsignal(signal.SIGINT) is before
    with av.open(str(out)) as container:
        assert sum(1 for _ in container.decode(video=0)) == sum(written) == 13
    receipt = json.loads((tmp_path / "a.json").read_text())
    assert (receipt["state"], receipt["num_frames"]) == ("stopped", 13)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.mp4", "model"]


@pytest.mark.parametrize("kind", ["webm", "gif", "png"])
def test_other_formats(make_model: MakeModel, tmp_path: Path, kind: str) -> None:
    out = tmp_path / f"a.{kind}"
    assert main(["generate", BALL, "--model", str(make_model()), "-o", str(out)]) == 0
    with av.open(str(out)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 17


def test_sheet_shows_a_video_as_one_picture(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    assert main(["generate", BALL, "--model", str(make_model()), "-o", str(out)]) == 0
    capsys.readouterr()
    picture = tmp_path / "a.png"
    argv = ["sheet", str(out), "-o", str(picture), "--columns", "4", "--width", "300", "--json"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["frames"] == [0, 5, 11, 16]
    with Image.open(picture) as image:
        assert image.width == pytest.approx(300, abs=8)


def test_version_and_help_need_no_torch() -> None:
    code = "import sys, longtake.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.returncode == 0
    assert "generate" in run.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"longtake {__version__}\n"
