"""Rows to records: a record's fields carry the names of its table's columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import Column, Row, Table

from longtake.queue import tables
from longtake.queue.records import (
    ApiKey,
    Artifact,
    ArtifactKind,
    AttemptRecord,
    Batch,
    ChunkRecord,
    Delivery,
    Event,
    Job,
    JobState,
    Relation,
    Webhook,
    WorkerRecord,
)

R = TypeVar("R")
TABLES: Mapping[type, Table] = {
    Job: tables.jobs,
    AttemptRecord: tables.attempts,
    ChunkRecord: tables.chunks,
    Artifact: tables.artifacts,
    Event: tables.events,
    ApiKey: tables.api_keys,
    Webhook: tables.webhooks,
    Delivery: tables.deliveries,
    Batch: tables.batches,
    WorkerRecord: tables.workers,
}
_JOB_FIELDS = [field.name for field in fields(Job)]
_STATE, _RELATION, _TAGS = (_JOB_FIELDS.index(name) for name in ("state", "relation", "tags"))


def columns_of(record: type) -> list[Column[Any]]:
    """The columns a record needs, in its order."""
    return [TABLES[record].c[field.name] for field in fields(record)]


def read_row(record: type[R], row: Row[*tuple[Any, ...]], **converted: object) -> R:
    """A record of ``row``; ``converted`` fields replace what the database gave."""
    values = row._mapping
    names = [field.name for field in fields(record)]  # type: ignore[arg-type]  # all are dataclasses
    return record(**{name: converted.get(name, values[name]) for name in names})


def job_of(row: Row[Any]) -> Job:
    """A row of exactly ``columns_of(Job)``."""
    values = list(row)
    values[_STATE] = JobState(values[_STATE])
    values[_RELATION] = Relation(values[_RELATION]) if values[_RELATION] else None
    values[_TAGS] = tuple(values[_TAGS])
    return Job(*values)


def artifact_of(row: Row[Any]) -> Artifact:
    """A row of ``columns_of(Artifact)``."""
    return read_row(Artifact, row, kind=ArtifactKind(row.kind))


def webhook_of(row: Row[Any]) -> Webhook:
    """A row of ``columns_of(Webhook)``."""
    return read_row(Webhook, row, event_types=tuple(row.event_types))


def batch_of(row: Row[Any]) -> Batch:
    """A row of ``columns_of(Batch)``."""
    return read_row(Batch, row, invalid=tuple(row.invalid))
