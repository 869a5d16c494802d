"""What the form to make a video offers: models, their sizes, lengths and words."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from tokenizers import Tokenizer

from longtake.errors import LongtakeError
from longtake.queue.catalogue import Catalogue, KnownModel
from longtake.video.manifest import Manifest
from longtake.video.request import format_size
from longtake.video.source import component_file

LOG = logging.getLogger("longtake.gallery")


@dataclass(frozen=True, slots=True)
class Choice:
    """A model as the form offers it.

    Attributes:
        size: its own, as WIDTHxHEIGHT; ``sizes`` are the only ones it makes, if it says so.
        words: the only words it knows, empty for a model that reads any text.
        example: a prompt that it is good at.
    """

    name: str
    description: str
    modes: tuple[str, ...]
    size: str
    sizes: tuple[str, ...]
    fps: float | None
    seconds: float | None
    words: tuple[str, ...]
    example: str


class Choices:
    """Reads each model once; one that is not on this machine is left out, not waited for."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._known: dict[str, Choice] = {}
        self._lock = threading.Lock()

    @property
    def default(self) -> str:
        """Name of the model of a request that names none."""
        return self._catalogue.default

    def all(self) -> list[Choice]:
        """Models at hand, the default first."""
        found = []
        for name in self._catalogue.names:
            choice = self._known.get(name) or self._read(name)
            if choice is not None:
                found.append(choice)
        return found

    def _read(self, name: str) -> Choice | None:
        with self._lock:
            try:
                if not self._catalogue.at_hand(name):
                    return None
                self._known[name] = _choice(self._catalogue.find(name))
            except LongtakeError as error:
                LOG.warning("model %s is not offered: %s", name, error)
                return None
            return self._known[name]


def _choice(known: KnownModel) -> Choice:
    manifest = known.source.manifest
    if manifest is None:
        return Choice(known.name, "", known.modes, "", (), None, None, (), "")
    words = known_words(manifest)
    return Choice(
        name=known.name,
        description=manifest.description,
        modes=known.modes,
        size=format_size(manifest.size),
        sizes=tuple(format_size(size) for size in manifest.sizes or ()),
        fps=manifest.fps,
        seconds=manifest.num_frames / manifest.fps,
        words=words,
        example="a red ball bouncing over a green meadow" if "ball" in words else "",
    )


def known_words(manifest: Manifest) -> tuple[str, ...]:
    """The vocabulary of a model that has a closed one, letters only, in order of the alphabet."""
    if not manifest.closed_vocabulary:
        return ()
    path = component_file(manifest, manifest.components["tokenizer"], "tokenizer.json")
    vocabulary: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab()
    return tuple(sorted(word for word in vocabulary if word.isalpha()))
