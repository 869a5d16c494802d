"""What the documents say exists, exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from longtake import __version__

ROOT = Path(__file__).parents[1]
PATH = re.compile(r"`((?:longtake|tests|benchmarks|training|docs|samples)/[\w./-]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")
DOCUMENTS = sorted(
    path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_named_paths_exist(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = [ROOT / found for found in PATH.findall(text)]
    named += [(ROOT / document).parent / found for found in LINK.findall(text)]
    assert [str(path) for path in named if not path.exists()] == []


def test_architecture_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = [p for p in (ROOT / "longtake").rglob("*.py") if not p.name.startswith("__")]
    absent = [str(p.relative_to(ROOT)) for p in modules if str(p.relative_to(ROOT)) not in text]
    assert absent == []


def test_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    match = re.search(r"^## (\S+)", text, re.MULTILINE)
    assert match is not None
    assert match[1] == __version__
