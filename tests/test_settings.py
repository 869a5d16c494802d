"""The settings and their table."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from longtake.settings import SOCKET_PATH_BYTES, Settings, main, render

ROOT = Path(__file__).parents[1]


def test_the_table_is_up_to_date() -> None:
    assert main(["--check", str(ROOT / "docs" / "settings.md")]) == 0


def test_every_setting_has_a_row_with_a_meaning() -> None:
    table = render()
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert f"| `LONGTAKE_{name.upper()}` |" in table
    assert "| `LONGTAKE_LEASE_S` | `60` | how long a worker's claim lasts unrenewed |" in table
    assert "| `LONGTAKE_REDIS_URL` |  | " in table


def test_an_old_table_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "settings.md"
    assert main(["--check", str(table)]) == 1
    assert main(["--write", str(table)]) == 0
    assert main(["--check", str(table)]) == 0
    table.write_text(table.read_text().replace("60", "61"))
    assert main(["--check", str(table)]) == 1
    assert "make docs" in capsys.readouterr().err


def test_environment_is_read_once_and_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGTAKE_LEASE_S", "7.5")
    monkeypatch.setenv("LONGTAKE_MODELS", '["one", "two"]')
    settings = Settings()
    assert settings.lease_s == 7.5
    assert settings.models == ("one", "two")
    with pytest.raises(ValidationError):
        settings.lease_s = 8


def test_the_broker_lives_in_the_data_folder(tmp_path: Path) -> None:
    settings = Settings(data_dir=Path("/srv/longtake"))
    assert settings.broker == "redis+socket:///srv/longtake/valkey.sock"
    assert Settings(redis_url="redis://host/1").broker == "redis://host/1"


def test_a_long_data_folder_gets_a_short_socket(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100) / ("y" * 100)
    first, other = Settings(data_dir=long), Settings(data_dir=long.with_name("z"))
    assert len(str(first.broker_socket).encode()) <= SOCKET_PATH_BYTES
    assert first.broker_socket == Settings(data_dir=long).broker_socket
    assert first.broker_socket != other.broker_socket
