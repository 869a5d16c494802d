"""The service's benchmark runs at its smallest setting. Nothing here is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASKED = {
    "submission to first step, p50": 60,
    "submission to first step, p99": 200,
    "service / engine alone": 1.03,
    "first segment over HTTP / first chunk alone": 1.3,
    "submissions, SQLite": 200,
    "list p99, SQLite": 50,
    "retrieve p99, SQLite": 50,
    "gallery first page": 300,
}


def test_what_was_asked_of_the_service_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "service", "--smallest", "--json"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert list(figures) == ["service"]
    rows = figures["service"]["rows"]
    assert all(row["value"] > 0 for row in rows)
    for name, target in ASKED.items():
        assert any(row["name"].startswith(name) and row["target"] == target for row in rows), name
    found = any(row["name"] == "submissions, PostgreSQL" for row in rows)
    assert found or "PostgreSQL is not installed" in figures["service"]["method"]
