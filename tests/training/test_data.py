"""Clips: pure functions of time, in range, and doing what their caption says."""

from __future__ import annotations

import numpy as np
import pytest

from training.papercut import data
from training.papercut.judge import judge
from training.papercut.vocabulary import MOTIONS, PLACES, SUBJECTS, Combination


def scene(motion: str = "left", subject: str = "star", place: str = "sea") -> data.Scene:
    what = Combination("yellow", subject, motion, place)
    return data.draw_scene(what, np.random.default_rng(3))


def test_a_frame_depends_on_its_time_alone() -> None:
    whole = data.render(scene(), data.frame_times(0, 40))
    later = data.render(scene(), data.frame_times(30, 10))
    np.testing.assert_array_equal(whole[30:], later)


def test_shading_never_wraps_around_in_a_byte() -> None:
    for subject in SUBJECTS:
        frames = data.render(scene("still", subject, "snow"), data.frame_times(0, 1))
        assert frames[0, 0].min() > 100


@pytest.mark.parametrize(("motion", "sign"), [("left", -1), ("right", 1)])
def test_sideways_motion_has_a_direction(motion: str, sign: int) -> None:
    x, _ = data.track(scene(motion), data.frame_times(0, 160))
    assert np.sign(x[-1] - x[0]) == sign


@pytest.mark.parametrize("motion", ["bounce", "circle", "still"])
def test_other_motions_stay_in_the_picture_for_an_hour(motion: str) -> None:
    x, y = data.track(scene(motion), data.frame_times(0, 3600 * data.FPS)[::7])
    assert x.min() > 10
    assert x.max() < data.WIDTH - 10
    assert y.min() > 10
    assert y.max() < data.HEIGHT - 10


def test_the_judge_reads_rendered_clips() -> None:
    rng = np.random.default_rng(5)
    motions, places = list(MOTIONS), list(PLACES)
    for index, subject in enumerate(SUBJECTS):
        what = Combination("blue", subject, motions[index], places[-index])
        frames = data.render(data.draw_scene(what, rng), data.frame_times(200, 81))
        verdict = judge(frames)
        assert all(verdict.right(what).values()), (what, verdict)


def test_the_judge_finds_nothing_in_an_empty_scene() -> None:
    empty = data.place_picture("meadow", 0.0).astype(np.uint8)
    verdict = judge(np.repeat(empty[None], 20, 0))
    assert (verdict.place, verdict.colour, verdict.subject) == ("meadow", "none", "none")
