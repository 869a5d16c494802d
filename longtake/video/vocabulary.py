"""What a model with a closed vocabulary can read: which words, and how many. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from html import unescape
from pathlib import Path

from ftfy import fix_text
from tokenizers import Tokenizer

from longtake.errors import ModelError, RequestError
from longtake.video.manifest import ComponentRef, Manifest
from longtake.video.request import VideoRequest
from longtake.video.source import component_file

_PLACES: dict[tuple[Path, ComponentRef], Path] = {}


def unknown_words(manifest: Manifest, prompts: Iterable[str]) -> tuple[str, ...]:
    """Words of ``prompts`` outside the tokenizer's vocabulary, in order, each once.

    Empty for a model that reads any text.
    """
    if not manifest.closed_vocabulary:
        return ()
    tokenizer = _tokenizer_of(manifest)
    unknown = tokenizer.token_to_id("<unk>")
    words: dict[str, None] = {}
    for prompt in prompts:
        encoding = tokenizer.encode(prompt)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token == unknown:
                words[prompt[start:end].lower()] = None
    return tuple(words)


def check_lengths(manifest: Manifest, request: VideoRequest) -> None:
    """Refuse prompts with more tokens than a model with a closed vocabulary reads.

    Tokenizers of models that read any text are large and may not be here: the engine counts with
    the loaded one (``components.check_text_length``).

    Raises:
        RequestError: of the prompt's field.
    """
    if not manifest.closed_vocabulary:
        return
    tokenizer, limit = _tokenizer_of(manifest), manifest.text_length
    texts = [("prompt", request.prompt), ("negative_prompt", request.negative_prompt or "")]
    for field, text in (*texts, *(("prompts", timed.prompt) for timed in request.prompts)):
        # as diffusers' Wan pipelines clean a prompt
        cleaned = unescape(unescape(fix_text(text))).strip()
        count = len(tokenizer.encode(cleaned).ids)
        if count > limit:
            reason = f"has {count} tokens, {manifest.name} reads {limit}"
            raise RequestError(field, text, reason, f"at most {limit} tokens")


def _tokenizer_of(manifest: Manifest) -> Tokenizer:
    ref = manifest.components["tokenizer"]
    place = (manifest.folder, ref)
    # looked up once: the service asks at every submission
    path = _PLACES.get(place)
    if path is None or not path.is_file():
        path = _PLACES[place] = component_file(manifest, ref, "tokenizer.json")
    try:
        return _tokenizer(path, path.stat().st_mtime_ns)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"model {manifest.name}: {path} cannot be read: {error}") from error


@lru_cache(maxsize=8)
def _tokenizer(path: Path, _changed_at: int) -> Tokenizer:
    """The tokenizer of a file, read once."""
    return Tokenizer.from_file(str(path))


def vocabulary_warnings(manifest: Manifest, prompts: Iterable[str]) -> tuple[str, ...]:
    """``"papercut does not know: dragon"``, or nothing."""
    words = unknown_words(manifest, prompts)
    return (f"{manifest.name} does not know: {', '.join(words)}",) if words else ()
