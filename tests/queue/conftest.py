"""A database for each test: a new SQLite file, and a new database of one PostgreSQL server."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pwd import getpwnam
from typing import Any

import psycopg
import pytest
from sqlalchemy import delete, event

from longtake.queue.database import Database, open_database, upgrade
from longtake.queue.ids import new_id, random_text
from longtake.queue.policy import Policy
from longtake.queue.records import Artifact, ArtifactKind, ChunkRecord, Job, NewJob
from longtake.queue.store import Store
from longtake.queue.tables import METADATA

SERVER_USERS = ("postgres", "nobody")  # who may run a server when the tests run as root


@dataclass
class PostgresServer:
    """A server of its own on a unix socket in ``folder``; durable as a real one, fsync included."""

    folder: Path
    binaries: Path
    user: str | None

    def make(self) -> None:
        """Create the cluster."""
        if self.user is not None:
            entry = getpwnam(self.user)
            os.chown(self.folder, entry.pw_uid, entry.pw_gid)
        self._run("initdb", "-D", self._data, "-A", "trust", "-U", "longtake", "-E", "UTF8")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = f"-c listen_addresses='' -c unix_socket_directories='{self.folder}'"
        log = str(self.folder / "log")
        self._run("pg_ctl", "start", "-w", "-D", self._data, "-l", log, "-o", options)

    def stop(self, mode: str = "fast") -> None:
        """Stop the server; ``immediate`` is what a crash is."""
        self._run("pg_ctl", "stop", "-w", "-D", self._data, "-m", mode)

    def url(self, name: str) -> str:
        """SQLAlchemy's URL of a database of this server."""
        return f"postgresql+psycopg://longtake@/{name}?host={self.folder}"

    def execute(self, statement: str) -> None:
        """Run a statement of the kind that no transaction may hold."""
        conninfo = f"host={self.folder} user=longtake dbname=postgres"
        with psycopg.connect(conninfo, autocommit=True) as conn:
            conn.execute(statement.encode())

    @property
    def _data(self) -> str:
        return str(self.folder / "data")

    def _run(self, name: str, *arguments: str) -> None:
        command: Sequence[str] = (str(self.binaries / name), *arguments)
        with (self.folder / "commands").open("ab") as log:
            # pg_ctl's server inherits the output, so it must not be a pipe
            done = subprocess.run(
                command,
                user=self.user,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"{name}: {(self.folder / 'commands').read_text()[-2000:]}")


def find_postgres() -> tuple[Path, str | None] | str:
    """Folder of the server's programs and who may run them, or why there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    on_path = shutil.which("postgres")
    if not found and on_path is None:
        return "PostgreSQL is not installed"
    binaries = found[-1].parent if found else Path(str(on_path)).parent
    if os.geteuid() != 0:
        return binaries, None
    for user in SERVER_USERS:
        try:
            getpwnam(user)
        except KeyError:
            continue
        return binaries, user
    return "PostgreSQL does not run as root and there is no other user"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One server for all tests; absent, tests that need it skip, and fail where CI is set."""
    found = find_postgres()
    if isinstance(found, str):
        if os.environ.get("CI"):
            pytest.fail(found)
        pytest.skip(found)
    # not pytest's own temporary folder: another user has to reach it, by a short socket path
    folder = Path(tempfile.mkdtemp(prefix="longtake-pg-"))
    server = PostgresServer(folder, *found)
    try:
        server.make()
        server.start()
        try:
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("template")
    upgrade(f"sqlite:///{folder / 'template.sqlite3'}")
    return folder / "template.sqlite3"


@pytest.fixture(scope="session")
def _postgresql_database(postgres: PostgresServer) -> Iterator[Database]:
    postgres.execute("CREATE DATABASE longtake")
    url = postgres.url("longtake")
    upgrade(url)
    db = open_database(url)
    yield db
    db.dispose()


@pytest.fixture
def sqlite_url(tmp_path: Path, _sqlite_template: Path) -> str:
    """The URL of a migrated, empty SQLite database."""
    path = tmp_path / "longtake.sqlite3"
    shutil.copy(_sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture
def postgresql_url(postgres: PostgresServer, _postgresql_database: Database) -> str:
    """The URL of a migrated PostgreSQL database, emptied: making one each time is slow."""
    with _postgresql_database.write() as conn:
        for table in reversed(METADATA.sorted_tables):
            conn.execute(delete(table))
    return postgres.url("longtake")


@pytest.fixture
def new_postgresql_url(postgres: PostgresServer) -> str:
    """The URL of a new PostgreSQL database without tables."""
    name = f"test_{random_text(12)}"
    postgres.execute(f"CREATE DATABASE {name}")
    return postgres.url(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """The URL of a migrated, empty database; each test runs on both kinds."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without tables, of both kinds."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'new.sqlite3'}"
    url: str = request.getfixturevalue("new_postgresql_url")
    return url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A migrated, empty database."""
    db = open_database(database_url)
    yield db
    db.dispose()


@pytest.fixture
def store(database: Database) -> Store:
    """A store with the usual policy."""
    return Store(database, Policy())


@pytest.fixture
def two_stores(database_url: str) -> Iterator[list[Store]]:
    """Two more stores on the same database, as two processes have them."""
    stores = [Store(open_database(database_url)) for _ in range(2)]
    yield stores
    for store in stores:
        store.close()


@pytest.fixture
def desk(store: Store) -> Desk:
    """The store, and short ways to make jobs, files and chunks."""
    return Desk(store)


@pytest.fixture
def sqlite_desk(sqlite_url: str) -> Iterator[Desk]:
    """A desk on SQLite alone."""
    db = open_database(sqlite_url)
    yield Desk(Store(db, Policy()))
    db.dispose()


@dataclass(frozen=True)
class Desk:
    """A store as tests use it."""

    store: Store

    @staticmethod
    def new(prompt: str = "a red boat", **changes: Any) -> NewJob:
        """A small job of the local owner that is not stored yet."""
        values: dict[str, Any] = {
            "owner": "local",
            "request": {"prompt": prompt, "seed": 7},
            "plan": {"chunks": 3, "num_frames": 33},
            "model": "papercut",
            "mode": "hybrid",
            "prompt": prompt,
        }
        return NewJob(**(values | changes))

    def submit(self, prompt: str = "a red boat", **changes: Any) -> Job:
        """Store one job."""
        [job] = self.store.submissions.submit([self.new(prompt, **changes)])
        return job

    def claim(self, worker: str = "worker-1", queue: str = "default", **changes: Any) -> Job:
        """Claim the next job, which must be there."""
        job = self.store.leases.claim(worker, queue, **changes)
        assert job is not None
        return job

    def lose(self, job: Job) -> None:
        """Let the lease of a running job run out now."""
        self.store.held.renew(job.id, job.fence, -1.0)

    def get(self, job: Job) -> Job:
        """The job as it is now."""
        return self.store.listings.get(job.id)

    @staticmethod
    def file(job: Job, kind: ArtifactKind, name: str, **changes: Any) -> Artifact:
        """A file of a job's present attempt, ten bytes long."""
        values: dict[str, Any] = {
            "id": new_id("file"),
            "job_id": job.id,
            "owner": job.owner,
            "fence": job.fence,
            "kind": kind,
            "key": f"jobs/{job.id}/{job.fence}/{name}",
            "size": 10,
            "sha256": None,
            "content_type": "application/octet-stream",
            "created_at": job.created_at,
        }
        return Artifact(**(values | changes))

    def store_latents(self, job: Job, index: int) -> Artifact:
        """Store that a chunk is denoised."""
        latents = self.file(job, ArtifactKind.LATENTS, f"latents/{index}")
        record = ChunkRecord(job.id, index, job.fence, 0, latents.key, None, {})
        self.store.held.record_latents(job.id, job.fence, record, [latents])
        return latents

    def store_chunk(self, job: Job, index: int) -> Artifact:
        """Store that a chunk is denoised, and then that it is decoded; the segment."""
        latents = self.store_latents(job, index)
        segment = self.file(job, ArtifactKind.SEGMENT, f"segments/{index}")
        record = ChunkRecord(
            job.id, index, job.fence, 12, latents.key, segment.key, {"decode": 0.5}
        )
        self.store.held.record_chunk(
            job.id, job.fence, record, [segment], {"chunk": index + 1, "chunks": 3}
        )
        return segment

    def complete(self, job: Job) -> Job:
        """Publish a video."""
        video = self.file(job, ArtifactKind.VIDEO, "video.mp4")
        return self.store.leases.complete(job.id, job.fence, [video], {"frames": 33})

    def plans(self, call: Callable[[], object]) -> str:
        """How the database would run the statements on jobs of ``call``, if it avoids scans."""
        db = self.store.db
        seen: list[tuple[str, Any]] = []

        def note(_conn: object, _cursor: object, statement: str, given: Any, *_: object) -> None:
            if " jobs" in statement and statement.startswith(("SELECT", "UPDATE")):
                seen.append((statement, given))

        event.listen(db.engine, "before_cursor_execute", note)
        call()
        event.remove(db.engine, "before_cursor_execute", note)
        explain = {"sqlite": "EXPLAIN QUERY PLAN ", "postgresql": "EXPLAIN "}[db.dialect]
        lines: list[str] = []
        with db.write() as conn:
            if db.dialect == "postgresql":
                conn.exec_driver_sql("SET LOCAL enable_seqscan = off")
            for statement, given in seen:
                rows = conn.exec_driver_sql(explain + statement, given)
                lines += [str(row[-1]) for row in rows]
        return "\n".join(lines)

    def told(self, job: Job) -> list[str]:
        """What the log says about a job, in order, without ``video.``."""
        events = self.store.events.read(0, job_id=job.id)
        return [event.type.removeprefix("video.") for event in events]

    def garbage(self) -> list[str]:
        """Keys that are to be removed."""
        return [key for _, key in self.store.files.garbage()]
