"""Commands of the service: what they print, and with which exit code."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.cli import main
from longtake.queue.database import current_revision
from longtake.queue.store import open_store
from longtake.settings import Settings

Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder that the environment names."""
    monkeypatch.setenv("LONGTAKE_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line; exit code, standard output and standard error."""

    def run(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(shlex.split(line))
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def read(output: str) -> Any:
    """The one JSON document on standard output."""
    return json.loads(output)


def test_keys_are_made_listed_and_revoked(run: Run, data: Path) -> None:
    code, out, _ = run("keys create laptop --max-queued 5 --json")
    made = read(out)
    assert code == 0
    assert made["secret"].startswith(f"lt_{made['prefix']}_")
    assert made["limits"] == {"max_queued": 5}

    code, out, _ = run("keys list --json")
    [listed] = read(out)
    assert (code, listed["id"], listed["revoked_at"]) == (0, made["id"], None)
    assert "secret" not in listed
    assert made["secret"] not in out

    store = open_store(Settings(data_dir=data))
    found = store.keys.find(made["secret"])
    assert found is not None
    code, out, _ = run(f"keys revoke {made['id']}")
    assert (code, out) == (0, f"{made['id']} (laptop) is revoked\n")
    assert store.keys.find(made["secret"]) is None
    store.close()


def test_a_key_is_shown_once_and_in_words(run: Run, data: Path) -> None:
    code, out, _ = run("keys create laptop")
    assert code == 0
    assert out.startswith("lt_")
    assert "only now" in out
    _, listed, _ = run("keys list")
    assert "active" in listed
    assert out.split()[0] not in listed


def test_a_flag_wins_over_the_environment(run: Run, data: Path, tmp_path: Path) -> None:
    run(f"keys create other --data {tmp_path / 'other'}")
    assert read(run("keys list --json")[1]) == []
    assert len(read(run(f"keys list --json --data {tmp_path / 'other'}")[1])) == 1


def test_the_schema_is_upgraded_and_checked(run: Run, data: Path) -> None:
    code, out, err = run("db check --json")
    assert code == 3
    assert "longtake db upgrade" in read(out)["error"]["message"]
    assert err.startswith("longtake: ")

    code, out, _ = run("db upgrade --json")
    revision = current_revision(Settings(data_dir=data).database)
    assert (code, read(out)) == (0, {"before": None, "revision": revision})
    code, out, _ = run("db check --json")
    assert (code, read(out)) == (0, {"revision": revision})


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("keys revoke key_nobody", 2, "no key 'key_nobody'"),
        ("keys create x --max-bytes -1", 2, "max_bytes=-1: is out of range; 0 or more"),
        ("serve --workers -1", 2, "workers=-1: is out of range; 0 or more"),
        ("serve --port 70000", 2, "port=70000: .*65535"),
        ("serve --host 0.0.0.0 --port 0", 3, "host=0.0.0.0: anybody .*--allow-open"),
        ("serve --host 192.0.2.1 --port 0", 3, "host=192.0.2.1: anybody"),
        ("serve --host nowhere.invalid", 3, "host=nowhere.invalid"),
        ("api --host 0.0.0.0", 3, "db upgrade"),
    ],
)
def test_refusals(run: Run, data: Path, line: str, code: int, message: str) -> None:
    got, out, err = run(f"{line} --json")
    assert got == code
    error = read(out)["error"]
    assert err.strip().endswith(f"longtake: {error['message']}")
    assert re.search(message, error["message"])


def test_a_bad_variable_is_named(run: Run, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGTAKE_LEASE_S", "soon")
    code, _, err = run("db upgrade")
    assert code == 2
    assert "LONGTAKE_LEASE_S='soon'" in err
