"""Attention plans as data: their text, what they resolve to, what they read."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest

from longtake.errors import RequestError
from longtake.schedulers.chunks import ChunkLayout
from longtake.video.attention_plan import (
    AttentionPlan,
    Scope,
    check_attention,
    layout_of,
    resolve_attention,
)
from longtake.video.attention_readings import Chunked, Full, Radial, TopK, Window

SCOPE = Scope(window=8, sink=2, chunk=2, tokens=1560, layers=6, steps=4)
TEXTS = {
    "window": "window",
    "global": "global",
    "full": "window",
    "chunked": "window+chunked:4096",
    "chunked:64": "window+chunked:64",
    "global+chunked:64": "global+chunked:64",
    "topk:0.5": "global+topk:0.5",
    "topk:1.0": "global+topk:1.0",
    "topk:.25": "global+topk:0.25",
    "topk:8": "global+topk:8",
    "window+topk:3": "window+topk:3",
    "radial": "global+radial:4",
    "radial:3": "global+radial:3",
    "global,layers:2-=window": "global,layers:2-=window:8",
    "radial:4,steps:0=full,layers:0-1=window:5": "global+radial:4,steps:0=full,layers:0-1=window:5",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_resolves_to_a_plan_whose_text_resolves_to_it(text: str) -> None:
    plan = resolve_attention(text, SCOPE)
    assert plan.text == TEXTS[text]
    assert resolve_attention(plan.text, SCOPE) == plan
    assert json.loads(json.dumps(plan.as_dict()))["layout"] == plan.layout
    check_attention(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "ring", "window+", "global+global", "window+ring", "full:3", "chunked:", "chunked:0",
        "chunked:1.5", "chunked:-1", "topk", "topk:", "topk:0", "topk:0.0", "topk:1.5", "topk:x",
        "radial:0", "radial:x", "window:5", "window,", "window,foo", "window,layers:0",
        "window,layers:0=ring", "window,steps=full", "window,steps:3-1=full", "window,heads:0=full",
        "WINDOW", " window", "topk:0.5;", "global+radial:\u0663", "topk:\u0663", "topk:1e2",
    ],
)  # fmt: skip
def test_what_is_no_plan_is_refused_for_any_model(text: str) -> None:
    with pytest.raises(RequestError, match=r"^attention=") as caught:
        check_attention(text)
    assert caught.value.field == "attention"
    assert caught.value.legal


def test_a_plan_is_refused_where_the_model_is_too_small_for_it() -> None:
    for text, legal in [
        ("window,layers:6=full", "layers:0-5 at most"),
        ("window,layers:0-6=full", "layers:0-5 at most"),
        ("window,steps:4=full", "steps:0-3 at most"),
        ("global+window:3", "window:4 or more"),
    ]:
        check_attention(text)
        with pytest.raises(RequestError, match=legal):
            resolve_attention(text, SCOPE)


def test_a_range_that_is_turned_round_is_told_so() -> None:
    for text in ("window,layers:3-1=full", "window,layers:1-0=full"):
        with pytest.raises(RequestError, match="ends before it begins; layers:"):
            check_attention(text)
    with pytest.raises(RequestError, match="names no layers or steps"):
        check_attention("window,layers:0\n=full")


def test_a_window_in_the_request_says_what_is_in_reach() -> None:
    assert layout_of("topk:0.5", window_given=False) == "global"
    assert layout_of("topk:0.5", window_given=True) == "window"
    assert layout_of("global+topk:0.5", window_given=True) == "global"
    assert layout_of("chunked", window_given=False) == "window"


def test_plain_and_exact_plans_are_known_as_such() -> None:
    plain = {text for text in TEXTS if resolve_attention(text, SCOPE).plain}
    exact = {text for text in TEXTS if resolve_attention(text, SCOPE).exact}
    assert plain == {"window", "global", "full"}
    assert exact == plain | {"chunked", "chunked:64", "global+chunked:64"}
    assert AttentionPlan().plain
    assert resolve_attention("window,steps:1=topk:2", SCOPE).ranks


def test_the_last_override_that_holds_wins() -> None:
    plan = resolve_attention("global,layers:2-4=chunked:9,steps:1=topk:2,layers:3=window:6", SCOPE)
    at = plan.reading_at
    assert at(0, 0) == Full()
    assert at(2, 0) == Chunked(9)
    assert at(4, None) == Chunked(9)
    assert at(0, 1) == at(2, 1) == TopK(2, None, 4, 2)
    assert at(3, 1) == at(3, None) == Window(6, 2)
    assert at(5, None) == Full()


@pytest.mark.parametrize("window", [4, 7, 8])
def test_the_window_reading_sees_what_the_window_layout_sees(window: int) -> None:
    reading = Window(window, 2)
    for spec in ChunkLayout(30, 2, window=window, sink=2):
        assert reading.kept(range(spec.start), spec.frames) == spec.past
        assert reading.frames_read(spec.start, spec.frames) == len(spec.past) + spec.frames


def test_early_chunks_are_dense_and_later_ones_read_their_share() -> None:
    share = TopK(None, 0.5, 4, 2)
    assert [share.number(past) for past in (0, 3, 4, 8, 9, 40)] == [0, 3, 4, 4, 5, 20]
    count = TopK(8, None, 4, 2)
    assert [count.number(past) for past in (0, 7, 8, 9, 400)] == [0, 7, 8, 8, 8]
    assert count.frames_read(402, 2) == 2 + 2 + 8
    assert share.frames_read(42, 2) == 2 + 2 + 20
    assert share.frames_read(1, 2) == 3


def test_density_halves_from_ring_to_ring() -> None:
    reading = Radial(4, 0, 16)
    assert [reading.ring(d) for d in (1, 4, 5, 8, 9, 16, 17)] == [0, 0, 1, 1, 2, 2, 3]
    rings = [range(5, 9), range(9, 17), range(17, 33), range(33, 65), range(65, 129)]
    rings += [range(129, 257), range(257, 513)]
    totals = [sum(map(reading.part, ring)) for ring in rings]
    # a ring twice as wide is read half as densely, so every ring costs the same: n log n in all
    assert totals == pytest.approx([2.0] * len(rings))
    assert {reading.part(d) for d in range(257, 513)} == {0.0, 1 / 16}
    read = [reading.frames_read(n, 2) for n in (64, 128, 256, 512)]
    assert [round(b - a, 6) for a, b in pairwise(read)] == [2.0] * 3


def test_layers_are_averaged_in_what_a_plan_reads() -> None:
    plan = resolve_attention("global,layers:0-2=window:8", SCOPE)
    assert plan.frames_read(98, 2, layers=6, step=0) == (100 + 8) / 2
    stepped = resolve_attention("global,steps:1-=topk:4", SCOPE)
    assert stepped.frames_read(98, 2, layers=6, step=0) == 100
    assert stepped.frames_read(98, 2, layers=6, step=None) == 100
    assert stepped.frames_read(98, 2, layers=6, step=3) == 2 + 2 + 4
    assert math.isclose(AttentionPlan().frames_read(5, 2, 6, None), 7)
