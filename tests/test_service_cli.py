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
from longtake.queue.database import current_revision, upgrade
from longtake.queue.records import LOCAL_OWNER, NewJob
from longtake.queue.store import open_store
from longtake.serve import ServeOptions, Supervisor
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
    assert "keys move" not in out  # nothing was made without a key
    _, listed, _ = run("keys list")
    assert "active" in listed
    assert out.split()[0] not in listed


def test_videos_without_a_key_are_told_of_and_handed_over(run: Run, data: Path) -> None:
    upgrade(Settings().database)
    store = open_store(Settings())
    asked = {"prompt": "a ball"}
    store.submissions.submit([NewJob(LOCAL_OWNER, asked, {}, "papercut", "hybrid", "a ball")])
    _, out, _ = run("keys create laptop")
    hint = out.rpartition("longtake ")[2].strip()
    assert "1 videos were made without a key" in out
    assert run(hint)[:2] == (0, f"{hint.split()[-1]} has 1 videos of local now\n")
    assert sum(store.listings.counts(hint.split()[-1]).values()) == 1
    store.close()


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
        ("worker --parallel tensor=2", 2, "parallel='tensor=2': 'tensor=2' is no layout; auto, or"),
        ("worker --gpus 0,1,2,3 --parallel ulysses=2", 2, "for 2 ranks, there are 4 GPUs; .* of 4"),
        ("worker --gpus 0,0", 2, "gpus='0,0': names one twice; one GPU for each rank"),
        ("worker --gpus 0,", 2, "gpus='0,': is no list of CUDA devices; such as 0,1,2,3"),
        ("worker --gpus 0,1 --device cpu", 2, "device='cpu': is one device, .* gpus=0,1 or "),
        ("worker --parallel ring=2 --device cuda:1", 2, "device='cuda:1': is one device"),
        ("worker --kv-cache int4", 2, "kv_cache='int4': .*'bf16', 'fp16' or 'int8'"),
        ("serve --parallel ulysses=2 --workers 2", 2, "workers=2: one worker has all ranks"),
        ("serve --parallel cfg=3", 2, "parallel='cfg=3': guidance has two halves; cfg=1 or cfg=2"),
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


@pytest.mark.parametrize("command", ["worker", "serve", "generate", "plan"])
def test_help_tells_of_ranks(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--parallel LAYOUT" in shown
    assert "auto, or ulysses=N, ring=N, cfg=2 joined by commas" in shown
    assert "--kv-cache" in shown
    if command in ("worker", "serve"):
        assert "--gpus LIST" in shown
        assert "without --gpus on CPU processes" in shown


def test_children_of_serve_read_its_flags(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Settings(data_dir=data, parallel="ulysses=2", gpus=("2", "3"), kv_cache="int8", port=0)
    for name, value in Supervisor(told, ServeOptions())._environment().items():
        monkeypatch.setenv(name, value)
    assert Settings() == told
