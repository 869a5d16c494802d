"""The evaluation: made by the engine, judged off pixels, printed in rows a program can read."""

from __future__ import annotations

import re

import numpy as np
import pytest

from training.papercut import data, evaluate
from training.papercut.judge import Verdict
from training.papercut.vocabulary import Combination

CELL = Combination("red", "ball", "still", "snow")


def test_prompts_are_held_out_and_fixed() -> None:
    cells = evaluate.prompts_for(120)
    assert all(cell.held_out for cell in cells)
    assert cells[:24] == evaluate.prompts_for(24)
    assert len(set(cells)) == 61


def test_a_take_is_made_by_the_engine_and_judged_at_both_ends() -> None:
    judged = evaluate.make(evaluate.Take(0, CELL, 89, "papercut", None))
    assert judged.shown.shape == (8, 3, data.HEIGHT, data.WIDTH)
    assert judged.short.place == "snow"
    assert judged.long is not None
    assert judged.long.place == "snow"


def test_the_same_take_is_the_same_video() -> None:
    takes = [evaluate.Take(1, CELL, 81, "papercut", 2.0) for _ in range(2)]
    first, second = (evaluate.make(take).shown for take in takes)
    assert np.array_equal(first, second)


def test_rows_have_one_figure_a_column() -> None:
    right = Verdict("red", "ball", "still", "snow", 0.9)
    wrong = Verdict("red", "star", "still", "snow", 0.9)
    lines = evaluate.table([(CELL, right), (CELL, wrong)], [(CELL, wrong)]).splitlines()
    assert len(lines) == 5
    assert all(re.fullmatch(r"[a-z ]+ \| \d+\.\d % \| \d+\.\d %", line) for line in lines)
    assert lines[1] == "kind of subject right | 50.0 % | 0.0 %"
    assert lines[4] == "all four right | 50.0 % | 0.0 %"


def test_a_take_is_long_enough_to_judge() -> None:
    with pytest.raises(SystemExit, match="at least 81 frames"):
        evaluate.make(evaluate.Take(0, CELL, 41, "papercut", None))
