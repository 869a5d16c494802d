"""The model of the last video, kept loaded for the next one; at most one at a time.

A model is the same while its manifest, its files on disk, device, dtype and backend are. Files are
told apart by path, size and time of change, as ``make`` does: hashing gigabytes before every video
would cost more than the video.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from longtake.video.clip import ClipModel, load_pipeline
from longtake.video.components import CausalModel, load_model, load_tokenizer
from longtake.video.manifest import Manifest
from longtake.video.memory import keep_loaded, release_memory
from longtake.video.numerics import fingerprint
from longtake.video.source import ModelSource, local_folder

Model = TypeVar("Model", CausalModel, ClipModel)
Files = tuple[tuple[str, int, int], ...]


class ModelCache:
    """Loads models and keeps the last one.

    Attributes:
        name: what the loaded model was asked for by, None before the first.

    Args:
        settle: the process makes many videos: see ``keep_loaded``, called after each load.
    """

    def __init__(self, *, settle: bool = False) -> None:
        self._settle = settle
        self.name: str | None = None
        self._key: Any = None
        self._model: CausalModel | ClipModel | None = None
        self._marks: dict[tuple[str, torch.dtype], dict[str, str]] = {}

    def causal(
        self, source: ModelSource, manifest: Manifest, how: tuple[torch.device, str, str]
    ) -> CausalModel:
        """The causal model of a manifest, loaded now or before.

        Args:
            source: whose manifest it is.
            manifest: read anew by the caller, so a changed one is noticed.
            how: device, dtype and self-attention backend.

        Raises:
            ModelError: see ``load_model``.
        """
        device, dtype, backend = how
        key = ("causal", manifest, str(device), dtype, backend, _manifest_files(manifest))
        return self._get(
            source.name,
            key,
            CausalModel,
            lambda: load_model(manifest, device=device, dtype=dtype, backend=backend),
        )

    def pipeline(self, source: ModelSource, device: torch.device, dtype: str) -> ClipModel:
        """The pipeline of a source, loaded now or before; errors as of ``load_pipeline``."""
        key = ("pipeline", source, str(device), dtype, _pipeline_files(source))
        return self._get(
            source.name,
            key,
            ClipModel,
            lambda: load_pipeline(source, device=device, dtype=dtype),
        )

    def tokenizer(self, manifest: Manifest) -> Any:
        """The manifest's tokenizer; that of the loaded model where it is of that manifest."""
        model = self._model
        if not isinstance(model, CausalModel) or self._key[1] != manifest:
            return load_tokenizer(manifest)
        unchanged = self._key[-1] == _manifest_files(manifest)
        return model.tokenizer if unchanged else load_tokenizer(manifest)

    def fingerprint(self, device: torch.device, dtype: torch.dtype) -> Mapping[str, str]:
        """``numerics.fingerprint``, computed once for each device and dtype."""
        key = (str(device), dtype)
        if key not in self._marks:
            self._marks[key] = fingerprint(device, dtype)
        return self._marks[key]

    def drop(self) -> None:
        """Forget the loaded model."""
        self.name, self._key, self._model = None, None, None
        gc.unfreeze()
        release_memory()

    def _get(self, name: str, key: Any, kind: type[Model], load: Callable[[], Model]) -> Model:
        model = self._model
        if isinstance(model, kind) and key == self._key:
            self.name = name
            return model
        if model is not None:
            del model
            self.drop()  # before the next one is loaded: two may not fit
        loaded = load()
        self.name, self._key, self._model = name, key, loaded
        if self._settle:
            keep_loaded()
        return loaded


def _manifest_files(manifest: Manifest) -> Files:
    """Files of the components that lie in folders; the hub's are fixed by their revision."""
    paths: list[Path] = []
    for ref in manifest.components.values():
        folder = local_folder(manifest, ref)
        if folder is not None:
            paths += (folder / (ref.subfolder or "")).glob("*")
        if ref.file is not None:
            paths.append(manifest.folder / Path(ref.file).expanduser())
    return _files(paths)


def _pipeline_files(source: ModelSource) -> Files:
    folder = Path(source.pipeline or "")
    if source.pipeline is None or not folder.is_dir():
        return ()
    return _files([*folder.glob("*"), *folder.glob("*/*")])


def _files(paths: list[Path]) -> Files:
    found = []
    for path in sorted(paths):
        try:
            state = path.stat()
        except OSError:
            continue
        found.append((str(path), state.st_size, state.st_mtime_ns))
    return tuple(found)
