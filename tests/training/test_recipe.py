"""The recipe in one command: its budget is shared out, and what it leaves can be carried."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.papercut.__main__ import commands, too_large


def test_the_stages_share_the_budget(tmp_path: Path) -> None:
    made = commands(7, tmp_path, "cuda", 8)
    names = [command[0].rpartition(".")[2] for command in made]
    assert names == ["prepare", "train_vae", "train_transformer", "export"]
    minutes = [float(one[one.index("--minutes") + 1]) for one in made if "--minutes" in one]
    assert sum(minutes) == pytest.approx(7 * 0.95)
    assert made[2][-2:] == ["--scale", "8"]
    assert all(str(tmp_path) in command for command in made)


def test_a_file_that_is_too_large_is_named(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "weights").write_bytes(b"12345")
    (tmp_path / "small").write_bytes(b"1")
    assert too_large(tmp_path, 5) == ["vae/weights"]
    assert too_large(tmp_path, 6) == []
