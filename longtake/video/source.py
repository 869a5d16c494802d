"""Find a model by name: bundled, in a folder, by manifest file, or by hub id.

Only small text files are read (or downloaded) here; torch is not imported.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtake.errors import ModelError
from longtake.video.manifest import (
    BUNDLED,
    CATALOGUE,
    DEFAULT_MODEL,
    MANIFEST_NAME,
    PIPELINE_INDEX,
    ComponentRef,
    Manifest,
    read_manifest,
)

HUB_ID = re.compile(r"^[\w][\w.-]*/[\w][\w.-]*$")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found but not loaded.

    Attributes:
        name: what the caller wrote.
        manifest: how to roll it out chunk by chunk; None for a plain pipeline.
        pipeline: folder or hub id that ``DiffusionPipeline.from_pretrained`` takes, or None.
    """

    name: str
    manifest: Manifest | None
    pipeline: str | None

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes this model runs in, the default first."""
        hybrid = ("hybrid",) if self.manifest else ()
        return (*hybrid, "clip") if self.pipeline else hybrid


def catalogue() -> dict[str, Path]:
    """Models known by a short name, with their manifests."""
    shipped = {path.stem: path for path in sorted(CATALOGUE.glob("*.json"))}
    return {DEFAULT_MODEL: BUNDLED / MANIFEST_NAME, **shipped}


def find_model(name: str) -> ModelSource:
    """Find a model by short name, folder, manifest file or hub id.

    Raises:
        ModelError: there is no such model, or its manifest is wrong.
    """
    known = catalogue()
    if name in known:
        return _from_folder(name, known[name])
    path = _local(name)
    if path is not None and path.is_dir():
        return _from_folder(name, path / MANIFEST_NAME)
    if path is not None and path.is_file():
        return ModelSource(name, read_manifest(path), None)
    if HUB_ID.match(name) and not name.startswith((".", "~")):
        return _from_hub(name)
    raise ModelError(
        f"model={name!r}: no such folder or manifest; known names: {', '.join(known)}; "
        "or a hub id such as 'owner/repository'"
    )


def component_file(manifest: Manifest, ref: ComponentRef, name: str) -> Path:
    """Path of one small file of a component, downloaded if the component is on the hub."""
    folder = local_folder(manifest, ref)
    if folder is not None:
        path = folder / (ref.subfolder or "") / name
        if not path.is_file():
            raise ModelError(f"model {manifest.name}: {path} does not exist")
        return path
    return Path(hub_file(ref.source, name, ref.subfolder, ref.revision))


def component_config(manifest: Manifest, component: str) -> dict[str, Any]:
    """A component's ``config.json``."""
    path = component_file(manifest, manifest.components[component], "config.json")
    return read_json(path)


def local_folder(manifest: Manifest, ref: ComponentRef) -> Path | None:
    """The component's folder on disk; None where ``source`` is a hub id."""
    path = _local(ref.source, manifest.folder)
    if path is not None and path.is_dir():
        return path.resolve()
    if HUB_ID.match(ref.source):
        return None
    shown = path.resolve() if path is not None else ref.source
    raise ModelError(f"model {manifest.name}: folder {shown} does not exist")


def hub_file(repository: str, name: str, subfolder: str | None, revision: str | None) -> str:
    """Download one file from the hub (or take it from its cache) and return its path."""
    from huggingface_hub import hf_hub_download

    try:
        found = hf_hub_download(repository, name, subfolder=subfolder, revision=revision)
    except Exception as error:  # the hub client raises a dozen unrelated types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model {repository}: {name} could not be fetched: {reason}") from error
    return str(found)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model; any fault is a ModelError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: got {type(data).__name__}, expected an object")
    return data


def _local(name: str, folder: Path = Path()) -> Path | None:
    """``name`` as a path from ``folder``, None where it cannot be one (too long, no such user)."""
    try:
        path = folder / Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError):
        return None
    return path


def _from_folder(name: str, manifest_path: Path) -> ModelSource:
    folder = manifest_path.parent
    pipeline = str(folder) if (folder / PIPELINE_INDEX).is_file() else None
    manifest = read_manifest(manifest_path) if manifest_path.is_file() else None
    if manifest is None and pipeline is None:
        raise ModelError(
            f"model={name!r}: the folder holds neither {MANIFEST_NAME} nor {PIPELINE_INDEX}"
        )
    return ModelSource(name, manifest, pipeline)


def _from_hub(name: str) -> ModelSource:
    try:
        manifest = read_manifest(Path(hub_file(name, MANIFEST_NAME, None, None)))
    except ModelError:
        hub_file(name, PIPELINE_INDEX, None, None)
        return ModelSource(name, None, name)
    return ModelSource(name, manifest, name)
