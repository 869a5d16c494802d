"""Memory of worker and engine does not grow with the number of jobs.

Here 12 jobs, whose figures are only shown: so early nothing has settled. ``make soak`` compares
after 200 jobs with after 20 (``LONGTAKE_SOAK_MEMORY_JOBS=200``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.soak.conftest import Served

JOBS = int(os.environ.get("LONGTAKE_SOAK_MEMORY_JOBS", "12"))
SETTLED_JOBS = 20
MOST_GROWTH = 1.10
BLOCK = 10
MIB = 2**20


@pytest.mark.timeout(300 + 5 * JOBS)
def test_memory_does_not_grow_with_jobs(make_service: Callable[..., Served]) -> None:
    service = make_service()
    early = min(SETTLED_JOBS, JOBS // 3)
    before = make(service, 0, early)
    after = make(service, early, JOBS)
    for part, size in after.items():
        growth = size / before[part]
        sys.stdout.write(
            f"\n{part}: {before[part] / MIB:.0f} MiB after {early} jobs, "
            f"{size / MIB:.0f} MiB after {JOBS}: x {growth:.3f}"
        )
        if early == SETTLED_JOBS:
            assert growth <= MOST_GROWTH, part
    assert set(after) == {"worker", "engine"}


def make(service: Served, first: int, last: int) -> dict[str, int]:
    """Resident bytes of worker and engine once jobs ``first`` up to ``last`` are done."""
    for number in range(first, last):
        service.submit(number, prompt="a red ball", seed=number, num_frames=5)
        # so many at a time that each wait is a short one
        if (number + 1) % BLOCK == 0 or number + 1 == last:
            service.until(f"{number + 1} jobs", partial(more_than, service, number))
    assert service.completed() == last
    sizes = {}
    for part in ("worker", "engine"):
        [process] = service.part(part)
        sizes[part] = int(process.memory_info().rss)
    return sizes


def more_than(service: Served, count: int) -> bool:
    """True once more videos than that are completed."""
    return service.completed() > count
