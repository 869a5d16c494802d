"""Transactions of both databases: what is promised about durability, turns and errors."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import insert, select, text

from longtake.errors import ServiceError
from longtake.queue.database import Database, check_revision, open_database, upgrade
from longtake.queue.store import open_store
from longtake.queue.tables import owners
from longtake.settings import Settings

if TYPE_CHECKING:
    from tests.queue.conftest import PostgresServer


def _owners(db: Database) -> list[str]:
    with db.read() as conn:
        return sorted(conn.execute(select(owners.c.owner)).scalars())


def test_sqlite_survives_a_power_cut(tmp_path: Path) -> None:
    db = open_database(f"sqlite:///{tmp_path / 'deep' / 'new.sqlite3'}")
    with db.read() as conn:
        found = {
            name: conn.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("synchronous", "journal_mode", "foreign_keys")
        }
    db.dispose()
    assert db.engine.url.database is not None
    assert Path(db.engine.url.database).stat().st_mode & 0o777 == 0o600
    assert found == {"synchronous": 2, "journal_mode": "wal", "foreign_keys": 1}


def test_a_transaction_is_all_or_nothing(database: Database) -> None:
    def fail() -> None:
        with database.write() as conn:
            conn.execute(insert(owners).values(owner="lost"))
            raise RuntimeError("a crash")

    with pytest.raises(RuntimeError, match="a crash"):
        fail()
    with database.write() as conn:
        conn.execute(insert(owners).values(owner="kept"))
    assert _owners(database) == ["kept"]


def test_a_reader_sees_one_moment_and_blocks_no_writer(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'db.sqlite3'}"
    upgrade(url)
    reader, writer = open_database(url), open_database(url)
    with reader.read() as conn:
        assert conn.execute(select(owners.c.owner)).all() == []
        with writer.write() as other:
            other.execute(insert(owners).values(owner="new"))
        assert conn.execute(select(owners.c.owner)).all() == []
    assert _owners(reader) == ["new"]
    reader.dispose()
    writer.dispose()


def test_writers_of_many_threads_and_engines_take_turns(database_url: str) -> None:
    rounds, threads = 20, 6
    engines = [open_database(database_url) for _ in range(2)]

    def work(number: int) -> None:
        db = engines[number % 2]
        for index in range(rounds):
            with db.write() as conn:
                conn.execute(select(owners.c.owner).limit(1)).all()
                conn.execute(insert(owners).values(owner=f"{number}-{index}"))

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert len(_owners(engines[0])) == rounds * threads
    for db in engines:
        db.dispose()


def test_the_clock_is_the_databases(database: Database) -> None:
    with database.read() as conn:
        [ours] = conn.execute(select(database.now)).one()
        statement = {
            "sqlite": "SELECT strftime('%s', 'now') + 0.0",
            "postgresql": "SELECT extract(epoch FROM clock_timestamp())::float8",
        }[database.dialect]
        theirs = conn.execute(text(statement)).scalar_one()
    assert ours == pytest.approx(theirs, abs=5)


def test_a_database_of_another_kind_is_refused() -> None:
    with pytest.raises(ServiceError, match="knows sqlite and postgresql"):
        open_database("mysql://somewhere/jobs")
    with pytest.raises(ServiceError, match="needs a file"):
        open_database("sqlite://")
    with pytest.raises(ServiceError, match="cannot be read"):
        open_database("no url at all")
    with pytest.raises(ServiceError, match="database_url: "):
        open_database("sqlite:////dev/null/db.sqlite3")


def test_a_schema_that_is_not_there_names_the_command(tmp_path: Path) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'db.sqlite3'}", data_dir=tmp_path)
    with pytest.raises(ServiceError, match="longtake db upgrade"):
        open_store(settings)
    upgrade(settings.database)
    open_store(settings).close()


def test_a_newer_schema_is_refused(sqlite_url: str) -> None:
    db = open_database(sqlite_url)
    check_revision(db)
    with db.write() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ServiceError, match="9999, which a newer longtake made"):
        check_revision(db)
    db.dispose()


def test_a_full_disk_is_told_and_recovers(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'db.sqlite3'}"
    upgrade(url)
    db = open_database(url)
    with db.write() as conn:
        size = conn.execute(text("PRAGMA page_count")).scalar_one()

    def fill() -> None:
        with db.write() as conn:
            conn.execute(text(f"PRAGMA max_page_count = {size}"))
            rows = [{"owner": f"{number:040}"} for number in range(2000)]
            conn.execute(insert(owners), rows)

    with pytest.raises(ServiceError, match="disk is full"):
        fill()
    with db.write() as conn:
        conn.execute(text("PRAGMA max_page_count = 1073741823"))
        conn.execute(insert(owners).values(owner="after"))
    assert _owners(db) == ["after"]
    db.dispose()


def test_a_server_that_restarts_is_away_and_comes_back(
    postgres: PostgresServer, postgresql_url: str
) -> None:
    db = open_database(postgresql_url)
    with db.write() as conn:
        conn.execute(insert(owners).values(owner="before"))
    postgres.stop("immediate")
    try:
        with pytest.raises(ServiceError, match="does not answer"):
            _owners(db)
    finally:
        postgres.start()
    assert _owners(db) == ["before"]
    db.dispose()


def test_a_connection_lost_in_a_transaction_is_told(
    postgres: PostgresServer, postgresql_url: str
) -> None:
    db = open_database(postgresql_url)

    def lose() -> None:
        with db.write() as conn:
            pid = conn.execute(text("SELECT pg_backend_pid()")).scalar_one()
            postgres.execute(f"SELECT pg_terminate_backend({pid})")
            conn.execute(insert(owners).values(owner="lost"))

    with pytest.raises(ServiceError, match="does not answer"):
        lose()
    assert _owners(db) == []
    db.dispose()
