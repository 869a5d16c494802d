"""Alembic's entry: runs revisions on the connection that ``database.migration_config`` carries.

The transaction is the caller's, so an upgrade is all or nothing on both databases.
"""

from __future__ import annotations

from alembic import context

from longtake.queue.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,
)
context.run_migrations()
