"""The tables of the first release.

Revision: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_NULL_JSON = sa.JSON(none_as_null=True).with_variant(
    postgresql.JSONB(none_as_null=True), "postgresql"
)
_JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
_BY_BYTES = sa.String(255).with_variant(sa.String(255, collation="C"), "postgresql")
TABLES = (
    "jobs",
    "attempts",
    "chunks",
    "events",
    "artifacts",
    "garbage",
    "outbox",
    "owners",
    "usage",
    "api_keys",
    "idempotency",
    "webhooks",
    "deliveries",
    "batches",
    "workers",
)


def upgrade() -> None:
    """Make all tables."""
    _jobs()
    _job_indexes()
    _attempts()
    _events()
    _files()
    _owners()
    _webhooks()
    _others()


def downgrade() -> None:
    """Drop all tables."""
    for table in reversed(TABLES):
        op.drop_table(table)


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("owner", sa.String(40), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("queue", sa.String(64), server_default="default", nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("request", _JSON, server_default="{}", nullable=False),
        sa.Column("plan", _JSON, server_default="{}", nullable=False),
        sa.Column("priority", sa.Integer(), server_default="5", nullable=False),
        sa.Column("position", sa.Float(53), nullable=False),
        sa.Column("paused", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("keep_chunks", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("updated_at", sa.Float(53), nullable=False),
        sa.Column("started_at", sa.Float(53), nullable=True),
        sa.Column("completed_at", sa.Float(53), nullable=True),
        sa.Column("expires_at", sa.Float(53), nullable=True),
        sa.Column("not_before", sa.Float(53), server_default="0", nullable=False),
        sa.Column("lease_owner", sa.String(64), nullable=True),
        sa.Column("lease_until", sa.Float(53), nullable=True),
        sa.Column("fence", sa.Integer(), server_default="0", nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("max_attempts", sa.Integer(), server_default="5", nullable=False),
        sa.Column("strikes", sa.Integer(), server_default="0", nullable=False),
        sa.Column("strike_chunk", sa.Integer(), nullable=True),
        sa.Column("progress", _JSON, server_default="{}", nullable=False),
        sa.Column("error", _NULL_JSON, nullable=True),
        sa.Column("parent_id", sa.String(40), nullable=True),
        sa.Column("relation", sa.String(16), nullable=True),
        sa.Column("batch_id", sa.String(40), nullable=True),
        sa.Column("batch_index", sa.Integer(), nullable=True),
        sa.Column("tags", _JSON, server_default="[]", nullable=False),
        sa.Column("starred", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("trashed_at", sa.Float(53), nullable=True),
        sa.Column("chunks_done", sa.Integer(), server_default="0", nullable=False),
        sa.Column("bytes_stored", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint(
            "state IN ('queued', 'running', 'completed', 'failed', 'cancelled')",
            name=op.f("ck_jobs_state"),
        ),
        sa.CheckConstraint("priority BETWEEN 0 AND 9", name=op.f("ck_jobs_priority")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )


def _job_indexes() -> None:
    op.create_index(
        "ix_jobs_batch",
        "jobs",
        ["batch_id"],
        sqlite_where=sa.text("batch_id IS NOT NULL"),
        postgresql_where=sa.text("batch_id IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_bytes",
        "jobs",
        ["owner", "bytes_stored"],
        sqlite_where=sa.text("bytes_stored > 0"),
        postgresql_where=sa.text("bytes_stored > 0"),
    )
    op.create_index(
        "ix_jobs_claim",
        "jobs",
        ["queue", "state", "priority", "owner", "position", "paused", "not_before"],
    )
    op.create_index(
        "ix_jobs_completed",
        "jobs",
        ["completed_at"],
        sqlite_where=sa.text("completed_at IS NOT NULL"),
        postgresql_where=sa.text("completed_at IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_expires",
        "jobs",
        ["expires_at"],
        sqlite_where=sa.text("expires_at IS NOT NULL"),
        postgresql_where=sa.text("expires_at IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_lease",
        "jobs",
        ["lease_until"],
        sqlite_where=sa.text("lease_until IS NOT NULL"),
        postgresql_where=sa.text("lease_until IS NOT NULL"),
    )
    op.create_index("ix_jobs_owner_created", "jobs", ["owner", "created_at", "id"])
    op.create_index("ix_jobs_owner_state", "jobs", ["owner", "state", "created_at", "id"])
    op.create_index(
        "ix_jobs_parent",
        "jobs",
        ["parent_id"],
        sqlite_where=sa.text("parent_id IS NOT NULL"),
        postgresql_where=sa.text("parent_id IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_trashed",
        "jobs",
        ["trashed_at"],
        sqlite_where=sa.text("trashed_at IS NOT NULL"),
        postgresql_where=sa.text("trashed_at IS NOT NULL"),
    )


def _attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(64), nullable=False),
        sa.Column("started_at", sa.Float(53), nullable=False),
        sa.Column("ended_at", sa.Float(53), nullable=True),
        sa.Column("outcome", sa.String(24), nullable=True),
        sa.Column("error", _NULL_JSON, nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "fence", name=op.f("pk_attempts")),
    )
    op.create_table(
        "chunks",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("frames", sa.Integer(), server_default="0", nullable=False),
        sa.Column("latents_key", sa.Text(), nullable=True),
        sa.Column("segment_key", sa.Text(), nullable=True),
        sa.Column("timings", _JSON, server_default="{}", nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_chunks_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "index", name=op.f("pk_chunks")),
    )


def _events() -> None:
    op.create_table(
        "events",
        sa.Column("seq", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("owner", sa.String(40), nullable=False),
        sa.Column("type", sa.String(48), nullable=False),
        sa.Column("data", _JSON, server_default="{}", nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_job", "events", ["job_id", "seq"])
    op.create_index("ix_events_owner", "events", ["owner", "seq"])
    op.create_table(
        "outbox",
        sa.Column("id", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("queue", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
    )


def _files() -> None:
    op.create_table(
        "artifacts",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=True),
        sa.Column("owner", sa.String(40), nullable=False),
        sa.Column("fence", sa.Integer(), server_default="0", nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=True),
        sa.Column("content_type", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("details", _JSON, server_default="{}", nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_artifacts_job_id"), ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_artifacts")),
        sa.UniqueConstraint("key", name=op.f("uq_artifacts_key")),
    )
    op.create_index("ix_artifacts_job", "artifacts", ["job_id", "kind"])
    op.create_index("ix_artifacts_owner", "artifacts", ["owner"])
    op.create_table(
        "garbage",
        sa.Column("id", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_garbage")),
    )


def _owners() -> None:
    op.create_table(
        "owners",
        sa.Column("owner", sa.String(40), nullable=False),
        sa.Column("served_at", sa.Float(53), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_owners")),
    )
    op.create_table(
        "usage",
        sa.Column("owner", sa.String(40), nullable=False),
        sa.Column("hour", sa.Integer(), nullable=False),
        sa.Column("running_s", sa.Float(53), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("owner", "hour", name=op.f("pk_usage")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("revoked_at", sa.Float(53), nullable=True),
        sa.Column("limits", _JSON, server_default="{}", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("hash", name=op.f("uq_api_keys_hash")),
    )
    op.create_table(
        "idempotency",
        sa.Column("owner", sa.String(40), nullable=False),
        sa.Column("key", _BY_BYTES, nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("target", sa.String(40), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("owner", "key", name=op.f("pk_idempotency")),
    )
    op.create_index("ix_idempotency_created", "idempotency", ["created_at"])


def _webhooks() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("owner", sa.String(40), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("event_types", _JSON, server_default="[]", nullable=False),
        sa.Column("secret", sa.String(120), nullable=False),
        sa.Column("previous_secret", sa.String(120), nullable=True),
        sa.Column("rotated_at", sa.Float(53), nullable=True),
        sa.Column("enabled", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_index("ix_webhooks_owner", "webhooks", ["owner"])
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("webhook_id", sa.String(40), nullable=False),
        sa.Column("type", sa.String(48), nullable=False),
        sa.Column("payload", _JSON, server_default="{}", nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_at", sa.Float(53), nullable=False),
        sa.Column("claimed_until", sa.Float(53), server_default="0", nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("response", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("finished_at", sa.Float(53), nullable=True),
        sa.ForeignKeyConstraint(
            ["webhook_id"],
            ["webhooks.id"],
            name=op.f("fk_deliveries_webhook_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deliveries")),
    )
    op.create_index("ix_deliveries_due", "deliveries", ["state", "next_at"])
    op.create_index("ix_deliveries_webhook", "deliveries", ["webhook_id", "created_at"])


def _others() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("owner", sa.String(40), nullable=False),
        sa.Column("name", sa.String(255), nullable=True),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("total", sa.Integer(), server_default="0", nullable=False),
        sa.Column("invalid", _JSON, server_default="[]", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index("ix_batches_owner", "batches", ["owner", "created_at"])
    op.create_table(
        "workers",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("boot_id", sa.String(64), nullable=False),
        sa.Column("queue", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("model", sa.String(255), nullable=True),
        sa.Column("job_id", sa.String(40), nullable=True),
        sa.Column("engine_pid", sa.Integer(), nullable=True),
        sa.Column("memory_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("started_at", sa.Float(53), nullable=False),
        sa.Column("seen_at", sa.Float(53), nullable=False),
        sa.Column("step_at", sa.Float(53), nullable=True),
        sa.Column("details", _JSON, server_default="{}", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
