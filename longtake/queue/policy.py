"""The settings that the store itself needs, so that it can be made without an environment."""

from __future__ import annotations

from dataclasses import dataclass

from longtake.settings import DAY_S, Settings


@dataclass(frozen=True, slots=True)
class Policy:
    """How often a job is tried and how long things are remembered; names are the settings'."""

    max_attempts: int = 5
    poison_limit: int = 3
    retention_s: int = 30 * DAY_S
    idempotency_s: int = DAY_S

    @classmethod
    def of(cls, settings: Settings) -> Policy:
        """What ``settings`` say."""
        return cls(
            max_attempts=settings.max_attempts,
            poison_limit=settings.poison_limit,
            retention_s=settings.retention_s,
            idempotency_s=settings.idempotency_s,
        )
