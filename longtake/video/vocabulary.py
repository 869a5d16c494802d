"""Words that a model with a closed vocabulary does not know. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from longtake.errors import ModelError
from longtake.video.manifest import ComponentRef, Manifest
from longtake.video.source import component_file

_PLACES: dict[tuple[Path, ComponentRef], Path] = {}


def unknown_words(manifest: Manifest, prompts: Iterable[str]) -> tuple[str, ...]:
    """Words of ``prompts`` outside the tokenizer's vocabulary, in order, each once.

    Empty for a model that reads any text.
    """
    if not manifest.closed_vocabulary:
        return ()
    ref = manifest.components["tokenizer"]
    place = (manifest.folder, ref)
    # looked up once: the service asks at every submission
    path = _PLACES.get(place) or component_file(manifest, ref, "tokenizer.json")
    _PLACES[place] = path
    try:
        tokenizer = _tokenizer(path, path.stat().st_mtime_ns)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"model {manifest.name}: {path} cannot be read: {error}") from error
    unknown = tokenizer.token_to_id("<unk>")
    words: dict[str, None] = {}
    for prompt in prompts:
        encoding = tokenizer.encode(prompt)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token == unknown:
                words[prompt[start:end].lower()] = None
    return tuple(words)


@lru_cache(maxsize=8)
def _tokenizer(path: Path, _changed_at: int) -> Tokenizer:
    """The tokenizer of a file, read once."""
    return Tokenizer.from_file(str(path))


def vocabulary_warnings(manifest: Manifest, prompts: Iterable[str]) -> tuple[str, ...]:
    """``"papercut does not know: dragon"``, or nothing."""
    words = unknown_words(manifest, prompts)
    return (f"{manifest.name} does not know: {', '.join(words)}",) if words else ()
