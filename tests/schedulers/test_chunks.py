"""Chunk layouts: what is made, what is seen."""

from __future__ import annotations

import pytest

from longtake.schedulers.chunks import ChunkLayout, latent_frames, pixel_frames


def test_last_chunk_is_whole_and_trimmed() -> None:
    chunks = list(ChunkLayout(7, 3))
    assert [(c.start, c.frames, c.keep) for c in chunks] == [(0, 3, 3), (3, 3, 3), (6, 3, 1)]


def test_first_chunk_may_differ() -> None:
    assert [c.frames for c in ChunkLayout(8, 3, first_chunk=1)] == [1, 3, 3, 3]


def test_given_chunks_come_first_and_replace_the_first_chunk() -> None:
    chunks = list(ChunkLayout(8, 3, first_chunk=1, given=(3, 2)))
    assert [(c.frames, c.given) for c in chunks] == [(3, True), (2, True), (3, False)]


def test_window_counts_sink_and_own_chunk() -> None:
    layout = ChunkLayout(20, 2, window=7, sink=2)
    for spec in layout:
        assert len(spec.past) + spec.frames <= 7
        assert spec.past[:2] == tuple(range(min(2, spec.start)))
    assert list(layout)[5].past == (0, 1, 7, 8, 9)


def test_everything_is_seen_until_the_window_is_full() -> None:
    chunks = list(ChunkLayout(9, 3, window=9, sink=1))
    assert [c.past for c in chunks] == [(), (0, 1, 2), (0, 1, 2, 3, 4, 5)]


def test_global_plan_sees_all() -> None:
    assert list(ChunkLayout(9, 3))[2].past == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("latents", range(1, 12))
@pytest.mark.parametrize("first", [None, 1])
@pytest.mark.parametrize("given", [(), (1,), (3, 2)])
def test_count_is_the_number_of_chunks(
    latents: int, first: int | None, given: tuple[int, ...]
) -> None:
    # a plan never has an input that fills the video
    latents += sum(given)
    layout = ChunkLayout(latents, 3, first_chunk=first, given=given)
    chunks = list(layout)
    assert layout.count == len(chunks)
    assert sum(c.keep for c in chunks) == latents


def test_a_day_costs_no_memory_to_plan() -> None:
    layout = ChunkLayout(345_600, 2, window=6)
    assert layout.count == 172_800
    assert layout.capacity == 6


def test_frames_and_latents() -> None:
    assert [latent_frames(n, 4) for n in (1, 5, 81)] == [1, 2, 21]
    assert [pixel_frames(n, 4) for n in (0, 1, 2, 21)] == [0, 1, 5, 81]
