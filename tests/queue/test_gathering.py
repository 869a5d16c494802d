"""Calls that come together run together, and each has its own outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from longtake.errors import ServiceError
from longtake.queue.gathering import MOST, Call, Gatherer

Calls = Sequence[Call[int, int]]


def _all_at_once(gatherer: Gatherer[int, int], count: int, go: threading.Event) -> list[object]:
    """Call from ``count`` threads while the first group is held up; what each got."""
    outcomes: list[object] = [None] * count

    def work(number: int) -> None:
        try:
            outcomes[number] = gatherer(number)
        except (ValueError, ServiceError) as error:
            outcomes[number] = str(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    return outcomes


def _recording(
    sizes: list[int], go: threading.Event, answer: Callable[[Calls], None]
) -> Gatherer[int, int]:
    def run(group: Calls) -> None:
        go.wait()
        sizes.append(len(group))
        answer(group)

    return Gatherer(run)


def test_groups_form_while_one_runs_and_are_bounded() -> None:
    sizes: list[int] = []
    go = threading.Event()

    def answer(group: Calls) -> None:
        for call in group:
            call.answer(call.wanted * 2)

    count = 2 * MOST + 10
    outcomes = _all_at_once(_recording(sizes, go, answer), count, go)
    assert outcomes == [2 * number for number in range(count)]
    assert sum(sizes) == count
    assert len(sizes) < count
    assert max(sizes) <= MOST


def test_a_group_that_fails_is_run_one_by_one() -> None:
    sizes: list[int] = []
    go = threading.Event()

    def answer(group: Calls) -> None:
        for call in group:
            if call.wanted == 3:
                raise ValueError("three")
            call.answer(call.wanted)

    outcomes = _all_at_once(_recording(sizes, go, answer), 8, go)
    assert outcomes == [0, 1, 2, "three", 4, 5, 6, 7]


def test_nothing_runs_again_when_the_database_is_away() -> None:
    sizes: list[int] = []
    go = threading.Event()

    def answer(group: Calls) -> None:
        if len(group) > 1:
            raise ServiceError("away")
        group[0].answer(0)

    outcomes = _all_at_once(_recording(sizes, go, answer), 6, go)
    assert sum(sizes) == 6
    assert outcomes.count("away") == 6 - outcomes.count(0)


def test_calls_left_for_later_are_taken_up() -> None:
    sizes: list[int] = []
    go = threading.Event()

    def answer(group: Calls) -> None:
        group[0].answer(group[0].wanted)

    assert _all_at_once(_recording(sizes, go, answer), 6, go) == [0, 1, 2, 3, 4, 5]
    assert len(sizes) == 6


def test_an_error_is_raised_in_its_own_thread() -> None:
    def run(group: Calls) -> None:
        group[0].refuse(ValueError("no"))

    gatherer: Gatherer[int, int] = Gatherer(run)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            gatherer(1)
