"""The gallery's benchmark runs at its smallest setting. Nothing here is timed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JUDGED = {
    "JavaScript heap": 60,
    "first segment to first picture, on its page": 1000,
    "first segment to first picture, on the wall": 1000,
}


@pytest.mark.skipif(
    not (shutil.which("chromium") or shutil.which("chromium-browser")),
    reason="Chromium is not installed",
)
def test_what_was_asked_of_the_gallery_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gallery", "--smallest", "--json"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["figures"]["gallery"]["rows"]
    assert all(row["value"] > 0 for row in rows)
    for name, target in JUDGED.items():
        assert any(row["name"].startswith(name) and row["target"] == target for row in rows), name
