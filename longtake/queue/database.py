"""The database: SQLite or PostgreSQL behind one pair of transactions, ``read`` and ``write``.

SQLite runs in WAL mode with synchronous=FULL, so that a power cut loses nothing accepted; a write
starts with BEGIN IMMEDIATE and, inside one process, waits on a lock rather than by trying again.
PostgreSQL runs at READ COMMITTED; what must take turns there takes an advisory lock.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Float,
    Table,
    create_engine,
    event,
    literal_column,
    make_url,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError

from longtake.errors import ServiceError

P = ParamSpec("P")
T = TypeVar("T")

BUSY_TIMEOUT_MS = 30_000
TRIES = 8
MIGRATIONS = Path(__file__).with_name("migrations")

_NOW = {
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
    "postgresql": "extract(epoch FROM clock_timestamp())::float8",
}
_WRITE = "longtake_write"
# deadlock and serialization failure: the transaction is rolled back and may simply run again
_AGAIN = frozenset({"40P01", "40001"})
_LOCK = text("SELECT pg_advisory_xact_lock(:kind, hashtext(:name))")


class Turn(IntEnum):
    """What takes turns on PostgreSQL; on SQLite all writes do. Numbers are ``longtake``'s own.

    A transaction takes them in this order and row locks before ``EVENTS``, so none can deadlock.
    """

    # submissions of one owner: quotas and idempotency keys are exact
    OWNER = 0x4C540001
    # claims from one queue: owners are served in turn
    CLAIM = 0x4C540002
    # appends to the event log, until commit: a reader never misses a smaller seq
    EVENTS = 0x4C540003
    # migrations
    UPGRADE = 0x4C540004


class Database:
    """One engine and its transactions; usable from many threads.

    Attributes:
        engine: SQLAlchemy's engine.
        dialect: ``sqlite`` or ``postgresql``.
        now: SQL for the seconds since 1970 by the database's clock.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.dialect = engine.dialect.name
        self.now: ColumnElement[float] = literal_column(_NOW[self.dialect], Float(53))
        self._writer = engine.execution_options(**{_WRITE: True})
        self._reader = engine
        if self.dialect == "postgresql":
            # READ COMMITTED gives statements no common moment, so BEGIN and COMMIT only cost time
            self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._turn = threading.RLock()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may write; committed at the end, rolled back by any exception."""
        with ExitStack() as stack:
            stack.enter_context(_borders())
            if self.dialect == "sqlite":
                stack.enter_context(self._turn)
            yield stack.enter_context(self._writer.begin())

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads; on SQLite all its statements see one moment."""
        with _borders(), self._reader.begin() as conn:
            yield conn

    def take_turn(self, conn: Connection, turn: Turn, name: str = "") -> None:
        """Wait for ``turn`` of ``name`` and keep it until the transaction ends."""
        if self.dialect == "postgresql":
            conn.execute(_LOCK, {"kind": turn.value, "name": name})

    def insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        """An INSERT that knows ON CONFLICT."""
        if self.dialect == "postgresql":
            return postgresql.insert(table)
        return sqlite.insert(table)

    def dispose(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def again(method: Callable[P, T]) -> Callable[P, T]:
    """Run a method that is one transaction once more when the database asked for it."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(TRIES - 1):
            try:
                return method(*args, **kwargs)
            except DBAPIError as error:
                if not _is_transient(error):
                    raise
            time.sleep(random.uniform(0.002, 0.02))  # noqa: S311  # spreads rivals, no secret
        return method(*args, **kwargs)

    return run


def open_database(url: str) -> Database:
    """Open ``url``: ``sqlite:///path`` or ``postgresql+psycopg://...``; no schema is made.

    Raises:
        ServiceError: the URL is of another kind of database.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ServiceError("database_url cannot be read as a URL") from error
    if parsed.get_backend_name() == "sqlite":
        return Database(_sqlite(url))
    if parsed.get_backend_name() in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
        return Database(create_engine(parsed, pool_size=8, max_overflow=24, pool_pre_ping=True))
    raise ServiceError(
        f"database_url names {parsed.get_backend_name()}; longtake knows sqlite and postgresql"
    )


def upgrade(url: str) -> None:
    """Bring the schema of ``url`` to the newest revision; safe when several do so at once."""
    db = open_database(url)
    try:
        with db.write() as conn:
            db.take_turn(conn, Turn.UPGRADE)
            command.upgrade(migration_config(conn), "head")
    finally:
        db.dispose()


def current_revision(url: str) -> str | None:
    """The revision of the schema that is there; None for an empty database."""
    db = open_database(url)
    try:
        with db.read() as conn:
            return _revision(conn)
    finally:
        db.dispose()


def check_revision(db: Database) -> None:
    """Refuse a database whose schema is not this version's.

    Raises:
        ServiceError: the schema is older, newer or not there.
    """
    scripts = ScriptDirectory.from_config(migration_config())
    newest = scripts.get_current_head()
    with db.read() as conn:
        found = _revision(conn)
    if found == newest:
        return
    if found is not None and found not in {script.revision for script in scripts.walk_revisions()}:
        raise ServiceError(
            f"the database is at revision {found}, which a newer longtake made; "
            f"this one knows up to {newest}"
        )
    raise ServiceError(
        f"the database is at revision {found or 'none'}, this longtake needs {newest}: "
        "run `longtake db upgrade`"
    )


def migration_config(conn: Connection | None = None) -> Config:
    """Alembic's configuration, made in code: there is no alembic.ini."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = conn
    return config


def _revision(conn: Connection) -> str | None:
    return MigrationContext.configure(conn).get_current_revision()


def _sqlite(url: str) -> Engine:
    """An engine whose transactions are the ones we ask for, not the driver's guess."""
    name = make_url(url).database
    if not name or name == ":memory:":
        raise ServiceError("database_url: SQLite needs a file, jobs must outlive the process")
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        # it holds the webhooks' secrets; the files that SQLite puts beside it have the same mode
        Path(name).touch(mode=0o600)
    except OSError as error:
        raise ServiceError(f"database_url: {error.strerror}: {name}") from error
    engine = create_engine(
        url, pool_size=8, max_overflow=56, connect_args={"cached_statements": 256}
    )
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(dbapi: Any, _record: object) -> None:
    dbapi.isolation_level = None  # no implicit BEGIN: _begin_sqlite says which
    cursor = dbapi.cursor()
    for pragma in (
        f"busy_timeout={BUSY_TIMEOUT_MS}",
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "temp_store=MEMORY",
        "cache_size=-16000",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(conn: Connection) -> None:
    writes = conn.get_execution_options().get(_WRITE)
    conn.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def _borders() -> Iterator[None]:
    """Tell a database that is away or full as what it is: a service that takes no work now."""
    try:
        yield
    except DBAPIError as error:
        state = getattr(error.orig, "sqlstate", None)
        if state == "53100" or "disk is full" in str(error.orig):
            raise ServiceError("the database's disk is full") from error
        if error.connection_invalidated or _is_away(error, state):
            raise ServiceError("the database does not answer", 5) from error
        raise


def _is_away(error: DBAPIError, state: str | None) -> bool:
    """True where the server refused or lost the connection: no SQLSTATE, or class 08 or 57P."""
    if not type(error.orig).__module__.startswith("psycopg"):
        return False
    if type(error.orig).__name__ != "OperationalError" and state is None:
        return False
    return state is None or state.startswith(("08", "57P"))


def _is_transient(error: DBAPIError) -> bool:
    if getattr(error.orig, "sqlstate", None) in _AGAIN:
        return True
    return "database is locked" in str(error.orig)
