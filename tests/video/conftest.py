"""Fixtures of the engine's tests."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from diffusers import WanTransformer3DModel

from longtake.cli import main

# generate with a prompt and a target, without them, and on the tiny model
SHORT = {
    "{make}": "generate 'a red ball' -o out/ball.mp4",
    "{tiny}": "generate 'a red ball' -o out/ball.mp4 --model tiny",
}
Refuse = Callable[..., str]


@pytest.fixture
def fresh_transformer(tiny_components: Path) -> WanTransformer3DModel:
    """The tiny transformer, loaded anew since installing processors changes it."""
    model: WanTransformer3DModel = WanTransformer3DModel.from_pretrained(
        tiny_components / "transformer"
    )
    return model.eval()


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder: bytes of files, None for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def refuse(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Refuse:
    """Run a command line that must be refused, in a folder with an empty ``out``.

    Checks the exit code, the message, that the same stands in the JSON of ``--json``, and that
    every file in the folder is as it was: nothing made, nothing changed, no temporary left.
    Returns the JSON's ``field`` ("" where the error has none).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    (tmp_path / "out").mkdir()

    def run(line: str, code: int, message: str) -> str:
        for short, long in SHORT.items():
            line = line.replace(short, long)
        before = contents(tmp_path)
        capsys.readouterr()
        usage = False
        try:
            got = main([*shlex.split(line), "--json"])
        except SystemExit as stop:  # argparse's own refusals
            got, usage = int(stop.code or 0), True
        shown = capsys.readouterr()
        said = " ".join(shown.err.split())
        assert re.search(message, said), f"{line}: {said}"
        assert got == code, f"{line}: exit code {got}, expected {code}: {said}"
        assert contents(tmp_path) == before
        if usage:
            assert shown.out == ""
            return ""
        error = json.loads(shown.out)["error"]
        assert shown.err.strip() == f"longtake: {error['message']}"
        return error["field"] or ""

    return run
