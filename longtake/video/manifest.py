"""Model manifests: where each component of a model comes from and how it wants to be run.

A manifest is a small JSON file, ``longtake.json``. No weights are read here and torch is not
imported, so the API can answer questions about a model without loading it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from longtake.errors import ModelError
from longtake.schedulers.noise import (
    TRAIN_TIMESTEPS,
    listed_sigmas,
    uniform_sigmas,
    warped_sigmas,
)

MANIFEST_NAME = "longtake.json"
PIPELINE_INDEX = "model_index.json"
BUNDLED = Path(__file__).parent / "papercut"
CATALOGUE = Path(__file__).parent / "manifests"
DEFAULT_MODEL = "papercut"
COMPONENTS = ("transformer", "vae", "text_encoder", "tokenizer")
SAMPLERS = ("euler", "lcm")


@dataclass(frozen=True, slots=True)
class ComponentRef:
    """Where one component lies.

    Attributes:
        source: folder (relative to the manifest's own) or hub id.
        subfolder: folder inside ``source``.
        revision: hub revision; None for the default branch.
        file: single checkpoint file (.pt or .safetensors) that replaces the folder's weights:
            a path relative to the manifest, or ``owner/repository/path`` on the hub.
        key: entry of a .pt checkpoint that holds the weights, e.g. ``generator_ema``.
    """

    source: str
    subfolder: str | None = None
    revision: str | None = None
    file: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a chunk is denoised.

    Attributes:
        sampler: ``euler`` (ODE step) or ``lcm`` (x0, then noised afresh).
        steps: forwards a chunk, the clean pass not counted.
        shift: flow shift.
        timesteps: published list (1000 .. 0) in place of evenly spaced levels.
        warp: whether ``timesteps`` are positions in the shifted table or used as they stand.
    """

    sampler: Literal["euler", "lcm"]
    steps: int
    shift: float
    timesteps: tuple[float, ...] | None = None
    warp: bool = True

    def __post_init__(self) -> None:
        for name, value in {"steps": self.steps, "shift": self.shift}.items():
            if not 0 < value < math.inf:
                raise ModelError(f"schedule: {name}={value} must be above 0")
        listed = [t for t in self.timesteps or () if t != 0]
        if self.timesteps is None:
            return
        falling = all(a > b for a, b in itertools.pairwise([*listed, 0.0]))
        if len(listed) != self.steps or not falling or listed[0] > TRAIN_TIMESTEPS:
            raise ModelError(
                f"schedule: timesteps={list(self.timesteps)} must be {self.steps} (steps) "
                f"falling numbers from at most {TRAIN_TIMESTEPS} to above 0"
            )

    def sigmas(self, steps: int | None = None, shift: float | None = None) -> tuple[float, ...]:
        """Noise levels for the checkpoint's own number of steps, or for another one."""
        shift = self.shift if shift is None else shift
        if self.timesteps is None or (steps is not None and steps != self.steps):
            return uniform_sigmas(steps or self.steps, shift)
        if self.warp:
            return warped_sigmas(self.timesteps, shift)
        return listed_sigmas(self.timesteps)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint needs to be run as it was trained.

    Attributes:
        name: short name, also shown in receipts.
        components: where transformer, vae, text_encoder and tokenizer come from.
        schedule: sampler, steps and shift.
        chunk: latent frames a chunk; first_chunk where the first one differs.
        window: latent frames a query sees, sink and own chunk included.
        sink: first latent frames, never evicted.
        guidance_scale: 1 means no second forward.
        context_noise: sigma of the clean pass; context_noise_added says whether noise of that
            level is also added to the latents in it.
        recache: whether a prompt switch recomputes the cached recent frames (LongLive).
        text_length: tokens the text embedding is padded to.
        vae_dtype: dtype the VAE must run in, where it is not the transformer's.
        size: default width and height; sizes lists the legal ones, None for any multiple.
        fps: frames per second the model was trained at.
        num_frames: default length.
        max_latent_frames: longest rollout with the global plan (the rope table's end).
        closed_vocabulary: True if words outside the tokenizer's are unknown to the model.
        description, licence: for people.
    """

    name: str
    components: Mapping[str, ComponentRef]
    schedule: Schedule
    chunk: int
    window: int
    sink: int
    size: tuple[int, int]
    fps: float
    num_frames: int
    first_chunk: int | None = None
    guidance_scale: float = 1.0
    negative_prompt: str = ""
    context_noise: float = 0.0
    context_noise_added: bool = False
    recache: bool = True
    text_length: int = 512
    vae_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    sizes: tuple[tuple[int, int], ...] | None = None
    max_latent_frames: int = 1024
    closed_vocabulary: bool = False
    description: str = ""
    licence: str = ""
    folder: Path = field(default=Path(), metadata={"external": True})

    def __post_init__(self) -> None:
        absent = [name for name in COMPONENTS if name not in self.components]
        if absent:
            raise ModelError(f"manifest {self.name}: components lack {', '.join(absent)}")
        largest = max(self.chunk, self.first_chunk or 0)
        positive: dict[str, float] = {
            "chunk": self.chunk,
            "first_chunk": 1 if self.first_chunk is None else self.first_chunk,
            "fps": self.fps,
            "num_frames": self.num_frames,
            "text_length": self.text_length,
            "size": min(self.size),
        }
        for name, value in positive.items():
            if not 0 < value < math.inf:
                raise ModelError(f"manifest {self.name}: {name}={value} must be above 0")
        for name, value in {"sink": self.sink, "guidance_scale": self.guidance_scale}.items():
            if not 0 <= value < math.inf:
                raise ModelError(f"manifest {self.name}: {name}={value} must be 0 or more")
        if not 0 <= self.context_noise < 1:
            reason = f"context_noise={self.context_noise} must be from 0 to below 1"
            raise ModelError(f"manifest {self.name}: {reason}")
        if self.window < self.sink + largest:
            raise ModelError(
                f"manifest {self.name}: window={self.window} cannot hold sink={self.sink} "
                f"and a chunk of {largest}"
            )


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest file.

    Raises:
        ModelError: not readable, not JSON, or a key missing, unknown or of the wrong type.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"manifest {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"manifest {path}: not valid JSON: {error}") from error
    manifest: Manifest = _build(Manifest, data, str(path), folder=path.parent)
    return manifest


def _build(cls: type, data: Any, where: str, **external: Any) -> Any:
    """A dataclass from JSON, each key checked against the annotation."""
    if not isinstance(data, dict):
        raise ModelError(f"{where}: got {type(data).__name__}, expected an object")
    hints = get_type_hints(cls)
    known = {f.name: f for f in fields(cls) if not f.metadata.get("external")}
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ModelError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(known)}")
    required = [n for n, f in known.items() if f.default is MISSING and n not in data]
    if required:
        raise ModelError(f"{where}: missing key {required[0]!r}")
    values = {key: _convert(hints[key], value, f"{where}: {key}") for key, value in data.items()}
    return cls(**values, **external)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint in (ComponentRef, Schedule):
        return _build(hint, value, where)
    if origin in (UnionType, Union):
        return None if value is None else _convert(args[0], value, where)
    if origin is Literal:
        if value not in args:
            raise ModelError(f"{where}={value!r}: not one of {', '.join(args)}")
        return value
    if origin is tuple and isinstance(value, list):
        if Ellipsis not in args and len(value) != len(args):
            raise ModelError(f"{where}: got {len(value)} values, expected {len(args)}")
        return tuple(_convert(args[0], item, where) for item in value)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        return {key: _convert(args[1], item, f"{where}.{key}") for key, item in value.items()}
    numeric = hint is float and isinstance(value, int) and not isinstance(value, bool)
    if numeric or (type(value) is hint):
        return float(value) if hint is float else value
    expected = getattr(hint, "__name__", str(hint))
    raise ModelError(f"{where}: got {type(value).__name__} {value!r}, expected {expected}")
