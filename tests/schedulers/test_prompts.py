"""Prompt timeline: never earlier than asked, never two in one chunk."""

from __future__ import annotations

import pytest

from longtake.errors import RequestError
from longtake.schedulers.chunks import ChunkLayout
from longtake.schedulers.prompts import TimedPrompt, resolve_switches

LAYOUT = ChunkLayout(12, 3)  # chunks start at frames 0, 9, 21, 33


def test_switch_is_at_the_first_chunk_that_starts_then_or_later() -> None:
    (switch,) = resolve_switches([TimedPrompt(1.0, "blue")], LAYOUT, 16.0, 4)
    assert (switch.chunk, switch.starts) == (2, 21 / 16)
    (exact,) = resolve_switches([TimedPrompt(9 / 16, "blue")], LAYOUT, 16.0, 4)
    assert exact.chunk == 1


def test_given_chunks_keep_their_pictures() -> None:
    layout = ChunkLayout(12, 3, given=(3, 3))
    (switch,) = resolve_switches([TimedPrompt(0.1, "blue")], layout, 16.0, 4)
    assert switch.chunk == 2


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([0.0], "above 0"),
        ([1.0, 1.0], "increase"),
        ([2.0, 1.0], "increase"),
        ([float("nan")], "above 0"),
        ([0.7, 0.8], "same chunk"),
        ([9.0], "no chunk"),
        ([2.1], "no chunk"),
    ],
)
def test_bad_timelines(times: list[float], message: str) -> None:
    timeline = [TimedPrompt(t, "x") for t in times]
    with pytest.raises(RequestError, match=message) as raised:
        resolve_switches(timeline, LAYOUT, 16.0, 4)
    assert raised.value.field == "prompts"
