"""The models that requests may name, read once and kept. No torch.

A request names a model by its public name only: one of the catalogue that ships, or one that the
settings list. A folder or file in the settings never shows its path.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from longtake.errors import ModelError, RequestError, ServiceError
from longtake.settings import Settings
from longtake.video.manifest import MANIFEST_NAME, Manifest, read_manifest
from longtake.video.shapes import ModelShape, read_shape
from longtake.video.source import HUB_ID, ModelSource, catalogue, find_model, local_folder

LOG = logging.getLogger(__name__)
# whose config.json decides what a model can make
READ_COMPONENTS = ("transformer", "vae", "text_encoder")
FAILED_S = 60.0  # how long a model that could not be read is not tried again


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model whose small files are read.

    Attributes:
        name: as requests have it.
        spec: what ``find_model`` takes: a short name, path or hub id.
        source: where it is.
        shape: sizes of a causal model; None for a plain pipeline.
    """

    name: str
    spec: str
    source: ModelSource
    shape: ModelShape | None

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes it runs in, the default first."""
        return self.source.modes


class Catalogue:
    """Models by public name; thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._specs = _specs(settings)
        self._known: dict[str, KnownModel] = {}
        self._failed: dict[str, tuple[float, ModelError]] = {}
        self._locks = {name: threading.Lock() for name in self._specs}
        self.default = _public_name(settings.default_model)

    @property
    def names(self) -> tuple[str, ...]:
        """Public names, the default first."""
        rest = (name for name in self._specs if name != self.default)
        return (self.default, *rest)

    def find(self, name: str | None) -> KnownModel:
        """The model of a request, read if it was not yet; the default for None.

        Raises:
            RequestError: no such model; names the nearest.
            ModelError: it is listed and cannot be read here.
        """
        name = self.default if name is None else name
        known = self._known.get(name)
        if known is not None:
            return known
        if name not in self._specs:
            near = get_close_matches(name, self._specs, n=1, cutoff=0.5)
            listed = f"nearest {near[0]}" if near else f"models: {', '.join(self.names)}"
            raise RequestError("model", name, "no such model here", listed)
        with self._locks[name]:
            return self._known.get(name) or self._read(name)

    def at_hand(self, name: str) -> bool:
        """True if the model can be read without a network."""
        if name in self._known:
            return True
        spec = self._specs[name]
        manifest = self.manifest(name)
        if manifest is None:
            return not HUB_ID.match(spec) or Path(spec).expanduser().exists()
        return all(_is_local(manifest, component) for component in READ_COMPONENTS)

    def manifest(self, name: str) -> Manifest | None:
        """The manifest of a model, if it is a local file."""
        spec = self._specs[name]
        path = catalogue().get(spec) or _manifest_path(spec)
        return read_manifest(path) if path.is_file() else None

    def _read(self, name: str) -> KnownModel:
        failed = self._failed.get(name)
        if failed is not None and time.monotonic() < failed[0]:
            raise failed[1]
        spec = self._specs[name]
        try:
            source = find_model(spec)
            shape = read_shape(source.manifest) if source.manifest is not None else None
        except ModelError as error:
            LOG.warning("model %s: %s", name, error)
            self._failed[name] = (time.monotonic() + FAILED_S, error)
            raise
        known = KnownModel(name, spec, source, shape)
        self._known[name] = known
        return known


def _specs(settings: Settings) -> Mapping[str, str]:
    """Public name -> what ``find_model`` takes."""
    specs = {name: name for name in catalogue()}
    for spec in (settings.default_model, *settings.models):
        name = _public_name(spec)
        if specs.setdefault(name, spec) != spec:
            raise ServiceError(f"two models are called {name!r}: {specs[name]} and {spec}")
    return specs


def _is_local(manifest: Manifest, component: str) -> bool:
    """True if the small file of a component lies in its folder or in the hub's cache."""
    ref = manifest.components[component]
    try:
        if local_folder(manifest, ref) is not None:
            return True
    except ModelError:
        return True  # reading it says what is wrong
    path = f"{ref.subfolder}/config.json" if ref.subfolder else "config.json"
    return isinstance(try_to_load_from_cache(ref.source, path, revision=ref.revision), str)


def _manifest_path(spec: str) -> Path:
    path = Path(spec).expanduser()
    return path / MANIFEST_NAME if path.is_dir() else path


def _public_name(spec: str) -> str:
    """The manifest's name for a folder or file, the folder's where it has none, else the same."""
    if spec in catalogue():
        return spec
    path = Path(spec).expanduser()
    manifest = _manifest_path(spec)
    if manifest.is_file():
        return read_manifest(manifest).name
    if path.is_dir():
        return path.resolve().name
    if not HUB_ID.match(spec):
        raise ServiceError(f"model {spec!r} in the settings is no name, folder, file or hub id")
    return spec
