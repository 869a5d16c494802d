"""Requests a minute and quotas of a principal.

Each API process counts for itself: with several of them the rate is that many times as high, the
quotas (queued jobs, running seconds, stored bytes) are exact, for the database counts those.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

WINDOW_S = 60.0
MAX_BUCKETS = 10_000
QUOTAS = ("max_queued", "max_running_s", "max_bytes")


@dataclass(frozen=True, slots=True)
class Rate:
    """How a request stands to its limit; ``wait_s`` is 0 where it may go on."""

    limit: int
    remaining: int
    reset_s: int
    wait_s: int

    @property
    def headers(self) -> dict[str, str]:
        """``RateLimit`` and ``RateLimit-Policy`` (draft-ietf-httpapi-ratelimit-headers-11)."""
        return {
            "ratelimit-policy": f'"default";q={self.limit};w={WINDOW_S:.0f}',
            "ratelimit": f'"default";r={self.remaining};t={self.reset_s}',
        }


class RateLimiter:
    """A bucket of tokens for each name, filled evenly over a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, name: str, limit: int) -> Rate:
        """Count one request of ``name``, which may send ``limit`` a minute."""
        now, pace = self._clock(), limit / WINDOW_S
        with self._lock:
            tokens, since = self._buckets.get(name, (float(limit), now))
            tokens = min(float(limit), tokens + (now - since) * pace)
            allowed = tokens >= 1.0
            if allowed:
                tokens -= 1.0
            self._buckets[name] = tokens, now
            self._buckets.move_to_end(name)
            while len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        wait = 0 if allowed else max(1, math.ceil((1.0 - tokens) / pace))
        return Rate(limit, int(tokens), math.ceil((limit - tokens) / pace), wait)


def quotas(limits: Mapping[str, int]) -> dict[str, int]:
    """What the store counts of a principal's limits; 0 and absent are no limit."""
    return {name: limits[name] for name in QUOTAS if limits.get(name)}
