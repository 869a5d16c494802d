"""The closed world of papercut: what a prompt may say, and what is never trained on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

SUBJECTS = ("ball", "ring", "star", "fish", "triangle")
MOTIONS = {
    "left": "moving left",
    "right": "moving right",
    "bounce": "bouncing",
    "circle": "circling",
    "still": "staying still",
}
COLOURS = {
    "red": (214, 40, 44),
    "orange": (246, 134, 24),
    "yellow": (250, 222, 58),
    "green": (22, 140, 58),
    "blue": (40, 84, 226),
    "purple": (156, 48, 190),
}
# Plain, and with the words that people add: a colour in a place must not tint the subject.
PLACES = {
    "meadow": ("over a meadow", "over a green meadow"),
    "night": ("over hills at night", "over dark hills at night"),
    "sea": ("on the sea", "on the blue sea"),
    "desert": ("in the desert", "in the desert at sunset"),
    "snow": ("in the snow", "in the white snow"),
}
GRAMMAR_WORDS = ("a", "an", "the", "video", "of", "and", ",", ".")
HELDOUT_SHARE = 0.08
CAPTION_FORMS = 8
_HASH_STEP = 2654435761  # Knuth's multiplicative hash: spreads the combinations evenly


@dataclass(frozen=True, slots=True)
class Combination:
    """One cell of the closed vocabulary: which subject, colour, motion and place."""

    colour: str
    subject: str
    motion: str
    place: str

    @property
    def index(self) -> int:
        """Position in the fixed order of all combinations."""
        colour = tuple(COLOURS).index(self.colour)
        motion = tuple(MOTIONS).index(self.motion)
        place = tuple(PLACES).index(self.place)
        index = colour * len(SUBJECTS) + SUBJECTS.index(self.subject)
        return (index * len(MOTIONS) + motion) * len(PLACES) + place

    @property
    def held_out(self) -> bool:
        """True for the share of combinations that training never sees."""
        return (self.index * _HASH_STEP % 2**32) / 2**32 < HELDOUT_SHARE


def combinations() -> list[Combination]:
    """All combinations, in index order."""
    cells = product(COLOURS, SUBJECTS, MOTIONS, PLACES)
    return [Combination(*cell) for cell in cells]


def caption(scene: Combination, form: int = 0) -> str:
    """The prompt that asks for a combination, in one of ``CAPTION_FORMS`` wordings.

    The first four name the place plainly, the others with an adjective.
    """
    article = "an" if scene.colour[0] in "aeiou" else "a"
    thing = f"{scene.colour} {scene.subject}"
    motion, place = MOTIONS[scene.motion], PLACES[scene.place][form // 4]
    forms = (
        f"{article} {thing} {motion} {place}",
        f"{thing} {motion} {place}",
        f"{place}, {article} {thing} {motion}",
        f"a video of {article} {thing}, {motion}, {place}",
    )
    return forms[form % 4]


def words() -> list[str]:
    """Every word the tokenizer knows, sorted."""
    places = (phrase for both in PLACES.values() for phrase in both)
    phrases = (*COLOURS, *SUBJECTS, *MOTIONS.values(), *places, *GRAMMAR_WORDS)
    return sorted({word for phrase in phrases for word in phrase.split()})


def draw_combination(rng: np.random.Generator, *, held_out: bool = False) -> Combination:
    """A random combination, from the trained ones unless ``held_out``."""
    pool = [cell for cell in combinations() if cell.held_out == held_out]
    return pool[int(rng.integers(len(pool)))]
