"""Words a model does not know are named, once each, as they were written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longtake.errors import ModelError, RequestError
from longtake.schedulers.prompts import TimedPrompt
from longtake.video.manifest import ComponentRef, Manifest
from longtake.video.request import VideoRequest
from longtake.video.source import find_model
from longtake.video.vocabulary import check_lengths, unknown_words, vocabulary_warnings


@pytest.fixture
def bundled() -> Manifest:
    """A model with a closed vocabulary."""
    manifest = find_model("papercut").manifest
    assert manifest is not None
    return manifest


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (["a red ball bouncing over a green meadow"], ()),
        (["a red dragon"], ("dragon",)),
        (["A Red DRAGON, a dragon"], ("dragon",)),
        (["a dragon", "a red castle", "a dragon"], ("dragon", "castle")),
        ([""], ()),
        ([], ()),
        (["ein roter Ball"], ("ein", "roter")),
        (["a caf\N{LATIN SMALL LETTER E WITH ACUTE}"], ("caf\N{LATIN SMALL LETTER E WITH ACUTE}",)),
    ],
)
def test_unknown_words(bundled: Manifest, prompts: list[str], words: tuple[str, ...]) -> None:
    assert unknown_words(bundled, prompts) == words


def test_one_warning_names_them_all(bundled: Manifest) -> None:
    assert vocabulary_warnings(bundled, ["a red ball"]) == ()
    said = vocabulary_warnings(bundled, ["a dragon over a castle", "a dragon"])
    assert said == ("papercut does not know: dragon, castle",)


def test_an_open_vocabulary_knows_every_word(bundled: Manifest) -> None:
    opened = replace(bundled, closed_vocabulary=False)
    assert vocabulary_warnings(opened, ["a dragon"]) == ()


def test_a_prompt_that_is_too_long_names_its_field(bundled: Manifest) -> None:
    long = "ball " * 40
    check_lengths(bundled, VideoRequest(prompt="ball " * 30))
    for field, request in [
        ("prompt", VideoRequest(prompt=long)),
        ("negative_prompt", VideoRequest(prompt="a", negative_prompt=long)),
        ("prompts", VideoRequest(prompt="a", prompts=(TimedPrompt(1.0, long),))),
    ]:
        with pytest.raises(RequestError, match=r"has 4\d tokens, papercut reads 32") as caught:
            check_lengths(bundled, request)
        assert caught.value.field == field
        check_lengths(replace(bundled, closed_vocabulary=False), request)


def test_without_a_tokenizer_nothing_can_be_said(bundled: Manifest) -> None:
    elsewhere = dict(bundled.components) | {"tokenizer": ComponentRef(".", "vae")}
    with pytest.raises(ModelError, match=r"tokenizer.json does not exist"):
        unknown_words(replace(bundled, components=elsewhere), ["a"])
