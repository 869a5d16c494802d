"""The service's settings: environment variables ``LONGTAKE_*``, read once and frozen.

``docs/settings.md`` is generated from this class (``python -m longtake.settings --write``); used by
``queue`` and ``api`` only, the engine takes its options as arguments.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import platformdirs
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "LONGTAKE_"
MINUTE_S, DAY_S = 60, 86_400
MIB, GIB = 2**20, 2**30
# what the kernel takes of a socket's path, its closing zero and a margin left out
SOCKET_PATH_BYTES = 100


def _data_dir() -> Path:
    return Path(platformdirs.user_data_dir("longtake", appauthor=False))


class Settings(BaseSettings):
    """Everything that can be set. Sizes are bytes, times seconds; each name says so."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    data_dir: Path = Field(
        default_factory=_data_dir,
        description="folder of database, broker and artifacts of a service on one machine",
    )
    database_url: str | None = Field(
        default=None,
        description="SQLAlchemy URL, sqlite or postgresql+psycopg; "
        "default: longtake.sqlite3 in the data folder",
    )
    redis_url: str | None = Field(
        default=None,
        description="Redis or Valkey; default: an embedded Valkey in the data folder",
    )
    artifacts_url: str | None = Field(
        default=None,
        description="folder or fsspec URL (s3://bucket/path) of the results; "
        "default: artifacts in the data folder",
    )
    scratch_dir: Path | None = Field(
        default=None,
        description="local folder of attempts whose results go to another place; "
        "default: scratch in the data folder",
    )

    host: str = Field(default="127.0.0.1", description="address the API listens on")
    port: int = Field(
        default=8000, ge=0, le=65_535, description="port the API listens on; 0 takes any"
    )
    base_path: str = Field(
        default="", description="path under which a reverse proxy serves the API"
    )
    require_keys: bool = Field(default=False, description="every route needs an API key")
    allow_open: bool = Field(
        default=False,
        description="listen beyond loopback without keys; anybody who reaches the port may use it",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), description="origins that browsers may call from"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="prompts are logged at debug only"
    )

    queue: str = Field(default="default", description="queue a worker takes jobs from")
    device: str | None = Field(
        default=None, description="the engine's device; default: the best there is"
    )
    dtype: str = Field(default="auto", description="the engine's compute dtype")
    backend: str = Field(default="auto", description="the engine's attention backend")
    kv_cache: Literal["bf16", "fp16", "int8"] | None = Field(
        default=None,
        description="what the KV cache stores; default: what is computed. "
        "Clip mode has no cache and does not mind",
    )
    profile: str | None = Field(
        default=None,
        description="file of longtake tune, or none; default: the one made for a model here",
    )
    threads: int | None = Field(
        default=None, ge=1, description="the engine's CPU threads, of each rank"
    )
    parallel: str | None = Field(
        default=None,
        description="one video on several ranks: auto, or ulysses=N, ring=N, cfg=2 with commas",
    )
    gpus: tuple[str, ...] = Field(
        default=(), description="CUDA devices of the ranks, one each; none: CPU processes"
    )
    preload: bool = Field(default=True, description="load the default model when a worker starts")
    default_model: str = Field(default="papercut", description="model of a request that names none")
    models: tuple[str, ...] = Field(
        default=(),
        description="further models that requests may name: folders, manifests or hub ids",
    )

    lease_s: float = Field(
        default=60, gt=0, description="how long a worker's claim lasts unrenewed"
    )
    renew_s: float = Field(
        default=15, gt=0, description="how often a claim is renewed while steps go on"
    )
    poll_s: float = Field(
        default=5, gt=0, description="how often an idle worker looks without a tick"
    )
    reconcile_s: float = Field(
        default=15, gt=0, description="how often lost leases and ticks are mended"
    )
    heartbeat_s: float = Field(
        default=5, gt=0, description="how often a worker says that it is there"
    )
    start_limit_s: float = Field(
        default=300, gt=0, description="longest start of an engine process"
    )
    load_limit_s: float = Field(default=1800, gt=0, description="longest loading of a model")
    step_limit_s: float = Field(default=600, gt=0, description="longest denoising step")
    decode_limit_s: float = Field(default=600, gt=0, description="longest VAE decode of a chunk")
    finish_limit_s: float = Field(default=600, gt=0, description="longest muxing of a video")
    stop_grace_s: float = Field(
        default=30,
        gt=0,
        description="longest wait for an engine to stop by itself before it is killed",
    )
    max_attempts: int = Field(default=5, ge=1, description="tries of a job that count")
    poison_limit: int = Field(
        default=3,
        ge=1,
        description="engine deaths in steps of one chunk without progress before giving up",
    )
    retry_delay_s: float = Field(default=5, ge=0, description="wait before a second try; doubles")
    engine_max_jobs: int = Field(
        default=500, ge=1, description="jobs after which an engine is replaced"
    )
    engine_max_growth: float = Field(
        default=2.0,
        gt=1,
        description="memory, in multiples of after the first job, that replaces an engine",
    )
    affinity_s: float = Field(
        default=30,
        ge=0,
        description="how long a job of another model may wait for one that is loaded",
    )

    retention_s: int = Field(
        default=30 * DAY_S, ge=0, description="age at which videos go; 0 keeps them"
    )
    retention_bytes: int = Field(
        default=0,
        ge=0,
        description="stored bytes above which the oldest unstarred go; 0 sets no limit",
    )
    trash_s: int = Field(
        default=7 * DAY_S, ge=0, description="how long trashed videos can be restored"
    )
    min_free_bytes: int = Field(
        default=512 * MIB, ge=0, description="free space below which no new work is started"
    )
    max_queued: int = Field(default=1000, ge=1, description="queued jobs of one key")
    max_running_s: int = Field(
        default=0, ge=0, description="engine seconds of one key in a day; 0 sets no limit"
    )
    max_bytes: int = Field(default=0, ge=0, description="stored bytes of one key; 0 sets no limit")
    requests_per_minute: int = Field(
        default=0, ge=0, description="requests of one key or address in a minute; 0 sets no limit"
    )

    max_upload_bytes: int = Field(default=256 * MIB, ge=1, description="largest upload")
    max_body_bytes: int = Field(default=2 * MIB, ge=1, description="largest JSON body")
    max_upload_pixels: int = Field(
        default=8192 * 8192, ge=1, description="pixels of one uploaded frame"
    )
    max_upload_frames: int = Field(default=4096, ge=1, description="frames of an uploaded video")
    upload_decode_s: float = Field(default=30, gt=0, description="longest decode of an upload")
    upload_memory_bytes: int = Field(
        default=2 * GIB, ge=1, description="memory of an upload's decoder"
    )
    allow_private_addresses: bool = Field(
        default=False, description="webhooks and remote references may name private addresses"
    )
    allow_remote_references: bool = Field(
        default=False, description="input references may be fetched over http and https"
    )
    idempotency_s: int = Field(
        default=DAY_S, ge=1, description="how long an Idempotency-Key is remembered"
    )
    webhook_timeout_s: float = Field(
        default=20, gt=0, description="longest wait for a webhook's answer"
    )
    session_secret: SecretStr | None = Field(
        default=None,
        description="signs session cookies and cursors; default: made in the data folder",
    )

    @property
    def database(self) -> str:
        """The database's URL."""
        return self.database_url or f"sqlite:///{self.data_dir / 'longtake.sqlite3'}"

    @property
    def artifacts(self) -> str:
        """Where results go."""
        return self.artifacts_url or str(self.data_dir / "artifacts")

    @property
    def scratch(self) -> Path:
        """Where attempts work when results go elsewhere."""
        return self.scratch_dir or self.data_dir / "scratch"

    @property
    def broker(self) -> str:
        """The broker's URL as kombu takes it; the embedded one listens on a unix socket."""
        return self.redis_url or f"redis+socket://{self.broker_socket}"

    @property
    def broker_socket(self) -> Path:
        """Socket of the embedded Valkey; a short name elsewhere where the data folder's is long."""
        here = self.data_dir.absolute() / "valkey.sock"
        if len(str(here).encode()) <= SOCKET_PATH_BYTES:
            return here
        name = hashlib.sha256(str(here).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"longtake-{name}" / "valkey.sock"


def render() -> str:
    """The table of all settings as Markdown."""
    lines = [
        "# Settings",
        "",
        "Generated by `make docs` from `longtake/settings.py`; `make check` fails if it is out",
        "of date. Every process of the service reads them once, when it starts. Sizes are bytes,",
        'times seconds; lists are JSON (`["one", "two"]`). A flag of `longtake serve`, `api` or',
        "`worker` wins over its variable.",
        "",
        "| environment variable | default | meaning |",
        "|---|---|---|",
    ]
    for name, field in Settings.model_fields.items():
        default = "" if field.default_factory is not None else _shown(field.default)
        if name == "data_dir":
            default = "the platform's folder for user data"
        lines.append(f"| `{PREFIX}{name.upper()}` | {default} | {field.description} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table to a file, or check that the file is what would be written."""
    parser = argparse.ArgumentParser(description="The table of settings.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.write is not None:
        args.write.write_text(render(), encoding="utf-8")
        return 0
    if args.check.is_file() and args.check.read_text(encoding="utf-8") == render():
        return 0
    sys.stderr.write(f"{args.check} is out of date: run `make docs`\n")
    return 1


def _shown(default: object) -> str:
    """A default as the environment would spell it; nothing where there is none."""
    if default is None or default == "":
        return ""
    if isinstance(default, tuple):
        return f"`{json.dumps(list(default))}`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default}`"


if __name__ == "__main__":
    sys.exit(main())
