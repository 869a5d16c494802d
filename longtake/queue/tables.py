"""The database's tables. Booleans, JSON and floats are the same in SQLite and PostgreSQL.

Times are seconds since 1970, from the database's own clock (``database.now``), so that workers on
several hosts agree about leases.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    false,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_N_label)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)
# SQLite numbers rows by itself only in a column that is exactly INTEGER
_SEQUENCE = BigInteger().with_variant(Integer, "sqlite")
# an absent error is SQL NULL, not the JSON text null
_NULL_JSON = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
_JSON = JSON().with_variant(JSONB, "postgresql")
# compared byte by byte also where the database sorts as people do: keys are looked up by prefix
_BY_BYTES = String(255).with_variant(String(255, collation="C"), "postgresql")
_STATES = "state IN ('queued', 'running', 'completed', 'failed', 'cancelled')"


def _json(name: str, default: str) -> Column[Any]:
    return Column(name, _JSON, nullable=False, server_default=default)


def _time(name: str, *, needed: bool = True) -> Column[Any]:
    return Column(name, Float(53), nullable=not needed)


def _flag(name: str) -> Column[Any]:
    return Column(name, Boolean, nullable=False, server_default=false())


def _whole(name: str, default: int | None = 0) -> Column[Any]:
    if default is None:
        return Column(name, Integer)
    return Column(name, Integer, nullable=False, server_default=str(default))


def _partial(name: str, *columns_and_condition: str) -> Index:
    """An index of the rows for which the last argument holds."""
    *columns, condition = columns_and_condition
    return Index(name, *columns, sqlite_where=text(condition), postgresql_where=text(condition))


jobs = Table(
    "jobs",
    METADATA,
    Column("id", String(40), primary_key=True),
    Column("owner", String(40), nullable=False),
    Column("state", String(16), nullable=False),
    Column("queue", String(64), nullable=False, server_default="default"),
    Column("model", String(255), nullable=False),
    Column("mode", String(16), nullable=False),
    Column("prompt", Text, nullable=False),
    _json("request", "{}"),
    _json("plan", "{}"),
    _whole("priority", 5),
    Column("position", Float(53), nullable=False),
    _flag("paused"),
    _flag("cancel_requested"),
    _flag("keep_chunks"),
    _time("created_at"),
    _time("updated_at"),
    _time("started_at", needed=False),
    _time("completed_at", needed=False),
    _time("expires_at", needed=False),
    Column("not_before", Float(53), nullable=False, server_default="0"),
    Column("lease_owner", String(64)),
    _time("lease_until", needed=False),
    _whole("fence"),
    _whole("attempt"),
    _whole("max_attempts", 5),
    _whole("strikes"),
    _whole("strike_chunk", None),
    _json("progress", "{}"),
    Column("error", _NULL_JSON),
    Column("parent_id", String(40)),
    Column("relation", String(16)),
    Column("batch_id", String(40)),
    _whole("batch_index", None),
    _json("tags", "[]"),
    _flag("starred"),
    _time("trashed_at", needed=False),
    _whole("chunks_done"),
    Column("bytes_stored", BigInteger, nullable=False, server_default="0"),
    CheckConstraint(_STATES, name="state"),
    CheckConstraint("priority BETWEEN 0 AND 9", name="priority"),
    # all that choosing and counting the next jobs needs
    Index(
        "ix_jobs_claim",
        *("queue", "state", "priority", "owner", "position", "paused", "not_before"),
    ),
    Index("ix_jobs_owner_created", "owner", "created_at", "id"),
    Index("ix_jobs_owner_state", "owner", "state", "created_at", "id"),
    # partial ones, so that a new job, which has none of these, is cheap to store
    _partial("ix_jobs_lease", "lease_until", "lease_until IS NOT NULL"),
    _partial("ix_jobs_completed", "completed_at", "completed_at IS NOT NULL"),
    _partial("ix_jobs_expires", "expires_at", "expires_at IS NOT NULL"),
    _partial("ix_jobs_trashed", "trashed_at", "trashed_at IS NOT NULL"),
    _partial("ix_jobs_parent", "parent_id", "parent_id IS NOT NULL"),
    _partial("ix_jobs_batch", "batch_id", "batch_id IS NOT NULL"),
    _partial("ix_jobs_bytes", "owner", "bytes_stored", "bytes_stored > 0"),
)

attempts = Table(
    "attempts",
    METADATA,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("fence", Integer, primary_key=True),
    Column("worker", String(64), nullable=False),
    _time("started_at"),
    _time("ended_at", needed=False),
    Column("outcome", String(24)),
    Column("error", _NULL_JSON),
)

chunks = Table(
    "chunks",
    METADATA,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("index", Integer, primary_key=True),
    Column("fence", Integer, nullable=False),
    _whole("frames"),
    Column("latents_key", Text),
    Column("segment_key", Text),
    _json("timings", "{}"),
)

events = Table(
    "events",
    METADATA,
    Column("seq", _SEQUENCE, primary_key=True, autoincrement=True),
    Column("job_id", String(40), nullable=False),
    Column("owner", String(40), nullable=False),
    Column("type", String(48), nullable=False),
    _json("data", "{}"),
    _time("created_at"),
    Index("ix_events_job", "job_id", "seq"),
    Index("ix_events_owner", "owner", "seq"),
    sqlite_autoincrement=True,  # an id is never given twice, also after pruning
)

artifacts = Table(
    "artifacts",
    METADATA,
    Column("id", String(40), primary_key=True),
    Column("job_id", ForeignKey("jobs.id", ondelete="SET NULL")),
    Column("owner", String(40), nullable=False),
    _whole("fence"),
    Column("kind", String(16), nullable=False),
    Column("key", Text, nullable=False, unique=True),
    Column("size", BigInteger, nullable=False),
    Column("sha256", String(64)),
    Column("content_type", String(64), nullable=False),
    _time("created_at"),
    _json("details", "{}"),
    Index("ix_artifacts_job", "job_id", "kind"),
    Index("ix_artifacts_owner", "owner"),
)

# Files to remove: written in the transaction that forgets them, emptied once they are gone.
garbage = Table(
    "garbage",
    METADATA,
    Column("id", _SEQUENCE, primary_key=True, autoincrement=True),
    Column("key", Text, nullable=False),
    _time("created_at"),
)

outbox = Table(
    "outbox",
    METADATA,
    Column("id", _SEQUENCE, primary_key=True, autoincrement=True),
    Column("queue", String(64), nullable=False),
    _time("created_at"),
)

# Who was served when: the least recently served owner goes first.
owners = Table(
    "owners",
    METADATA,
    Column("owner", String(40), primary_key=True),
    Column("served_at", Float(53), nullable=False, server_default="0"),
)

# Engine seconds by owner and hour (seconds since 1970 / 3600), also of jobs deleted since.
usage = Table(
    "usage",
    METADATA,
    Column("owner", String(40), primary_key=True),
    Column("hour", Integer, primary_key=True),
    Column("running_s", Float(53), nullable=False, server_default="0"),
)

api_keys = Table(
    "api_keys",
    METADATA,
    Column("id", String(40), primary_key=True),
    Column("name", String(120), nullable=False),
    Column("prefix", String(16), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    _time("created_at"),
    _time("revoked_at", needed=False),
    _json("limits", "{}"),
)

idempotency = Table(
    "idempotency",
    METADATA,
    Column("owner", String(40), primary_key=True),
    Column("key", _BY_BYTES, primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("target", String(40), nullable=False),  # the job or batch that was made
    _time("created_at"),
    Index("ix_idempotency_created", "created_at"),
)

webhooks = Table(
    "webhooks",
    METADATA,
    Column("id", String(40), primary_key=True),
    Column("owner", String(40), nullable=False),
    Column("name", String(120), nullable=False),
    Column("url", Text, nullable=False),
    _json("event_types", "[]"),
    Column("secret", String(120), nullable=False),
    Column("previous_secret", String(120)),
    _time("rotated_at", needed=False),
    _flag("enabled"),
    _time("created_at"),
    Index("ix_webhooks_owner", "owner"),
)

deliveries = Table(
    "deliveries",
    METADATA,
    Column("id", String(40), primary_key=True),
    Column("webhook_id", ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
    Column("type", String(48), nullable=False),
    _json("payload", "{}"),
    Column("state", String(16), nullable=False),
    _whole("attempt"),
    Column("next_at", Float(53), nullable=False),
    Column("claimed_until", Float(53), nullable=False, server_default="0"),
    _whole("status_code", None),
    Column("response", Text),
    _time("created_at"),
    _time("finished_at", needed=False),
    Index("ix_deliveries_due", "state", "next_at"),
    Index("ix_deliveries_webhook", "webhook_id", "created_at"),
)

batches = Table(
    "batches",
    METADATA,
    Column("id", String(40), primary_key=True),
    Column("owner", String(40), nullable=False),
    Column("name", String(255)),
    _time("created_at"),
    _whole("total"),
    _json("invalid", "[]"),
    Index("ix_batches_owner", "owner", "created_at"),
)

workers = Table(
    "workers",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("host", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("boot_id", String(64), nullable=False),
    Column("queue", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("model", String(255)),
    Column("job_id", String(40)),
    _whole("engine_pid", None),
    Column("memory_bytes", BigInteger, nullable=False, server_default="0"),
    _time("started_at"),
    _time("seen_at"),
    _time("step_at", needed=False),
    _json("details", "{}"),
)
