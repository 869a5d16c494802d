"""The schema's history: frozen, equal to the tables in the code, and open to every old database."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, insert, inspect, select

from longtake.queue.database import (
    MIGRATIONS,
    current_revision,
    migration_config,
    open_database,
    upgrade,
)
from longtake.queue.records import NewJob
from longtake.queue.store import Store
from longtake.queue.tables import METADATA, jobs

# Released revisions, oldest first, and what their modules hash to. A released one is never changed:
# a change of tables.py is a new module and a new line here.
REVISIONS = {
    "0001": "72c64c4f1f8f996e6c34f82ecdf07189b8195ea1519ea64c9e8e637cca37e784",
}
SCRIPTS = {
    script.revision: Path(script.path)
    for script in ScriptDirectory.from_config(migration_config()).walk_revisions()
}
# a job as the first release stored it
OLD_JOB: dict[str, Any] = {
    "id": "video_old",
    "owner": "local",
    "state": "queued",
    "model": "papercut",
    "mode": "hybrid",
    "prompt": "from an old release",
    "request": {"seed": 1},
    "plan": {},
    "position": 1.0,
    "created_at": 1.0,
    "updated_at": 1.0,
}


def test_released_revisions_are_frozen() -> None:
    found = {
        revision: hashlib.sha256(path.read_bytes()).hexdigest()
        for revision, path in sorted(SCRIPTS.items())
    }
    assert found == REVISIONS


def test_history_is_one_line() -> None:
    scripts = ScriptDirectory.from_config(migration_config())
    assert len(scripts.get_heads()) == 1
    assert [one.down_revision for one in scripts.walk_revisions()][-1] is None
    assert MIGRATIONS.is_relative_to(Path(__file__).parents[2] / "longtake")


def test_a_migrated_database_is_what_the_code_says(new_url: str) -> None:
    assert current_revision(new_url) is None
    upgrade(new_url)
    assert current_revision(new_url) == [*REVISIONS][-1]
    upgrade(new_url)  # once more changes nothing
    db = open_database(new_url)
    with db.read() as conn:
        context = MigrationContext.configure(
            conn, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, METADATA) == []
        migrated = _schema(conn)
    db.dispose()
    assert migrated == _made_by_code(new_url)


@pytest.mark.parametrize("revision", [*REVISIONS])
def test_every_release_upgrades_with_its_rows(new_url: str, revision: str) -> None:
    db = open_database(new_url)
    with db.write() as conn:
        command.upgrade(migration_config(conn), revision)
        conn.execute(insert(jobs), [OLD_JOB])
    upgrade(new_url)
    with db.read() as conn:
        assert conn.execute(select(jobs.c.prompt)).scalar_one() == OLD_JOB["prompt"]
    store = Store(db)
    assert store.listings.get("video_old").state == "queued"
    # its owner is known to claims once he submits
    [new] = store.submissions.submit([_again(store)])
    claimed = [store.leases.claim("w", "default") for _ in range(2)]
    assert [job.id for job in claimed if job is not None] == ["video_old", new.id]
    store.close()


def test_several_upgrades_at_once_make_one_schema(new_url: str) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            upgrade(new_url)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert current_revision(new_url) == [*REVISIONS][-1]


def test_an_upgrade_that_fails_changes_nothing(new_url: str, monkeypatch: Any) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr("alembic.script.base.ScriptDirectory.run_env", _then(broken))
    with pytest.raises(RuntimeError, match="power cut"):
        upgrade(new_url)
    monkeypatch.undo()
    db = open_database(new_url)
    with db.read() as conn:
        assert inspect(conn).get_table_names() == []
    db.dispose()
    upgrade(new_url)


def _then(action: Any) -> Any:
    """Alembic's own run of a revision, with something after it."""
    run_env = ScriptDirectory.run_env

    def run(self: ScriptDirectory) -> None:
        run_env(self)
        action()

    return run


def _again(store: Store) -> NewJob:
    old = store.listings.get("video_old")
    return NewJob(old.owner, old.request, old.plan, old.model, old.mode, "new")


def _made_by_code(url: str) -> dict[str, Any]:
    """The schema that tables.py itself makes, in another database of the same kind."""
    if url.startswith("sqlite"):
        engine = create_engine("sqlite://")
        METADATA.create_all(engine)
        with engine.connect() as conn:
            made = _schema(conn)
        engine.dispose()
        return made
    db = open_database(url)
    with db.write() as conn:
        METADATA.drop_all(conn)
        METADATA.create_all(conn)
        made = _schema(conn)
    db.dispose()
    return made


def _schema(conn: Connection) -> dict[str, Any]:
    """Everything a database says about its tables, in an order of its own."""
    inspector = inspect(conn)
    found = {}
    for table in METADATA.tables:
        found[table] = {
            "columns": {
                column["name"]: (str(column["type"]), column["nullable"], column["default"])
                for column in inspector.get_columns(table)
            },
            "primary": inspector.get_pk_constraint(table),
            "checks": sorted(map(str, inspector.get_check_constraints(table))),
            "unique": sorted(map(str, inspector.get_unique_constraints(table))),
            "foreign": sorted(map(str, inspector.get_foreign_keys(table))),
            "indexes": sorted(str(_plain(index)) for index in inspector.get_indexes(table)),
        }
    return found


def _plain(value: Any) -> Any:
    """SQL inside a description as its text."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return str(value)
