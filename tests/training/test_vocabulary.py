"""The closed vocabulary: what is held out, and that every caption is made of known words."""

from __future__ import annotations

import numpy as np
import pytest

from training.papercut import vocabulary
from training.papercut.text import make_tokenizer


def test_every_combination_has_its_own_index() -> None:
    cells = vocabulary.combinations()
    assert [cell.index for cell in cells] == list(range(750))


def test_about_eight_per_cent_are_held_out_and_no_value_is_missing_from_training() -> None:
    cells = vocabulary.combinations()
    held_out = [cell for cell in cells if cell.held_out]
    assert 0.07 < len(held_out) / len(cells) < 0.09
    for name in ("colour", "subject", "motion", "place"):
        assert {getattr(c, name) for c in held_out} == {getattr(c, name) for c in cells}


@pytest.mark.parametrize("held_out", [False, True])
def test_draws_keep_to_their_side(held_out: bool) -> None:
    rng = np.random.default_rng(0)
    drawn = [vocabulary.draw_combination(rng, held_out=held_out) for _ in range(200)]
    assert {cell.held_out for cell in drawn} == {held_out}


def test_captions_need_no_unknown_word() -> None:
    tokenizer = make_tokenizer()
    for cell in vocabulary.combinations()[::7]:
        for form in range(vocabulary.CAPTION_FORMS):
            tokens = tokenizer(vocabulary.caption(cell, form)).input_ids
            assert tokenizer.unk_token_id not in tokens


def test_an_unknown_word_is_seen_as_such() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.unk_token_id in tokenizer("a red dragon bouncing over a meadow").input_ids


def test_article_follows_the_colour() -> None:
    cell = vocabulary.Combination("orange", "fish", "circle", "sea")
    assert vocabulary.caption(cell) == "an orange fish circling on the sea"
