"""Profiles: what ``longtake tune`` found best for a model on a device, kept as a file.

A profile fills in what request and options leave open (backend ``auto``; no window, sink or
attention named) and nothing else. The one in the user's data folder that was made for this model,
device and dtype is used by itself; a file that is named must fit, or is refused. What was used
stands in plan and receipt.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from longtake.errors import RequestError
from longtake.video.attention_backends import MAKERS, why_not
from longtake.video.attention_plan import check_attention
from longtake.video.manifest import Manifest
from longtake.video.numerics import device_name, torch_dtype
from longtake.video.partfile import PartFile, output_error
from longtake.video.request import VideoRequest
from longtake.video.shapes import ModelShape, read_shape
from longtake.video.source import local_folder

if TYPE_CHECKING:
    import torch

    from longtake.video.options import EngineOptions

VERSION = 1
NONE = "none"
LEGAL = "a file that longtake tune wrote, or none"
TAIL_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Target:
    """What a profile is for.

    Attributes:
        model: the manifest's name.
        mark: hash of the model's sizes, window and transformer weights.
        device: the device's own name.
        dtype: short name.
    """

    model: str
    mark: str
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Profile:
    """What was found.

    Attributes:
        target: what it is for.
        backend: of self-attention.
        attention: attention plan by its text; None for the model's own.
        exact: True if every query gets the result of all keys in the model's window.
        error, error_bound: what the plan leaves out costs, and what was allowed: relative root
            mean square of a layer's output on the model's own activations.
        measured: everything that was tried.
    """

    target: Target
    backend: str
    attention: str | None
    exact: bool
    error: float
    error_bound: float
    measured: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A profile and the file it came from; ``digest`` is the start of the file's SHA-256."""

    profile: Profile
    name: str
    digest: str


def target_of(manifest: Manifest, shape: ModelShape, device: torch.device, dtype: str) -> Target:
    """What a profile must have been made for to fit."""
    facts = (shape, manifest.chunk, manifest.first_chunk, manifest.window, manifest.sink)
    told = f"{facts!r}{_weights_mark(manifest)}"
    mark = hashlib.sha256(told.encode()).hexdigest()[:16]
    return Target(manifest.name, mark, device_name(device), dtype)


def profile_path(model: str, device: str, dtype: str) -> Path:
    """Where the profile of a model, device (its own name) and dtype lies unless put elsewhere."""
    key = hashlib.sha256(repr((model, device, dtype)).encode()).hexdigest()
    name = re.sub(r"[^\w.-]+", "-", model)[:40]
    folder = Path(platformdirs.user_data_dir("longtake", appauthor=False))
    return folder / "profiles" / f"{name}-{dtype}-{key[:12]}.json"


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile whole or not at all, making its own folder.

    Raises:
        OutputError: not writable.
    """
    text = json.dumps({"longtake_profile": VERSION, **asdict(profile)}, indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = PartFile(path)
        try:
            part.path.write_text(text, encoding="utf-8")
            part.commit()
        finally:
            part.discard()
    except OSError as error:
        raise output_error("output", path, error) from error


def read_profile(path: Path) -> Found:
    """Read a profile.

    Raises:
        RequestError: of ``profile``: no such file, or it is none, or damaged.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise RequestError("profile", str(path), reason, LEGAL) from error
    try:
        profile = _from_json(json.loads(raw))
    except (ValueError, TypeError, KeyError, RequestError) as error:
        reason = f"is no profile, or damaged: {error}"
        raise RequestError("profile", str(path), reason, LEGAL) from error
    return Found(profile, path.name, hashlib.sha256(raw).hexdigest()[:16])


def find_profile(
    named: str | None, manifest: Manifest, shape: ModelShape, device: torch.device, dtype: str
) -> tuple[Found | None, tuple[str, ...]]:
    """The profile to use, if any, and warnings about one that cannot be used.

    Args:
        named: a file, ``none``, or None for the automatic one.
        manifest, shape: the model that it must fit.
        device, dtype: where and how its backend must run.

    Raises:
        RequestError: of ``profile``: the named one is no profile, or was made for something else.
        BackendError: the named one's backend does not run here.
    """
    if named == NONE:
        return None, ()
    automatic = profile_path(manifest.name, device_name(device), dtype)
    path = automatic if named is None else Path(named).expanduser()
    if named is None and not path.is_file():
        return None, ()
    try:
        found = read_profile(path)
        check_fits(found, target_of(manifest, shape, device, dtype), str(path))
    except RequestError as error:
        if named is not None:
            raise
        return None, (f"not used: {error}",)
    width = shape.transformer.head_dim
    reason = why_not(found.profile.backend, device, torch_dtype(dtype), head_dim=width)
    if reason is not None and named is None:
        text = f"profile={path}: its backend {found.profile.backend} cannot be used: {reason}"
        return None, (f"not used: {text}",)
    return found, ()


def profile_asked(engine: EngineOptions) -> str | None:
    """What the options say; ranks that share a video use none unless it is named.

    Each finds its own otherwise, and hosts may hold different ones.
    """
    return NONE if engine.profile is None and engine.parallel is not None else engine.profile


def chosen_backend(named: str, used: Mapping[str, Any] | None) -> str:
    """The backend of options and profile: what the options name, then what the profile found."""
    found = None if used is None else used["backend"]
    return str(found) if found is not None and named == "auto" else named


def expected_backend(
    engine: EngineOptions, manifest: Manifest, device: torch.device, dtype: str
) -> str:
    """The backend that a video of a model will run with, for loading it ahead.

    Raises:
        RequestError, BackendError: as of ``find_profile``.
    """
    if engine.backend != "auto":
        return engine.backend
    found, _ = find_profile(profile_asked(engine), manifest, read_shape(manifest), device, dtype)
    return "auto" if found is None else found.profile.backend


def check_fits(found: Found, target: Target, shown: str) -> None:
    """Refuse a profile that was made for something else.

    Raises:
        RequestError: of ``profile``.
    """
    made = found.profile.target
    again = "longtake tune, or none"
    for what in ("device", "dtype", "model"):
        was, now = getattr(made, what), getattr(target, what)
        if was != now:
            reason = f"was made for {what} {was!r}, this is {now!r}"
            raise RequestError("profile", shown, reason, again)
    if made.mark != target.mark:
        reason = f"was made for other weights or sizes of {made.model!r}"
        raise RequestError("profile", shown, reason, again)


def check_named(named: str | None, device: torch.device, dtype: str) -> None:
    """Refuse what can be refused before a model is known; for an engine that starts.

    Raises:
        RequestError: as of ``find_profile``, but for the model.
    """
    if named is not None and named != NONE:
        found = read_profile(Path(named).expanduser())
        target = replace(found.profile.target, device=device_name(device), dtype=dtype)
        check_fits(found, target, named)


def with_profile(
    request: VideoRequest, found: Found | None, backend: str, stored: VideoRequest | None
) -> tuple[VideoRequest, dict[str, Any] | None, tuple[str, ...]]:
    """The request with what it leaves open filled in, what was used for the receipt, warnings.

    Args:
        request: what is asked for.
        found: the profile.
        backend: what the options name; only ``auto`` is open.
        stored: of a rollout that is gone on with: what it was made with stays.
    """
    named = {name: getattr(request, name) for name in ("attention", "window", "sink")}
    free = all(value is None for value in named.values())
    if stored is not None:
        kept = {name: getattr(stored, name) for name in named}
        request, free = replace(request, **kept) if free else request, False
    if found is None:
        return request, None, ()
    profile = found.profile
    plan = profile.attention if free else None
    used = {
        "name": found.name,
        "sha256": found.digest,
        "backend": profile.backend if backend == "auto" else None,
        "attention": plan,
        "exact": profile.exact or plan is None,
    }
    if plan is None:
        return request, used, ()
    warnings: tuple[str, ...] = ()
    if not profile.exact:
        text = f"profile {found.name}: attention={plan}, whose error is {profile.error:.2g}"
        warnings = (f"{text} (--profile none reads the model's own window)",)
    return replace(request, attention=plan), used, warnings


def _from_json(data: Any) -> Profile:
    """Every field is there and of its type; anything else raises what it trips over."""
    if not isinstance(data, dict) or data.get("longtake_profile") != VERSION:
        raise ValueError(f"no longtake_profile of version {VERSION}")
    target = Target(**data["target"])
    texts = [*asdict(target).values(), data["backend"]]
    if not all(isinstance(text, str) for text in texts) or type(data["exact"]) is not bool:
        raise ValueError("a value of the wrong type")
    if data["backend"] not in MAKERS:
        raise ValueError(f"backend {data['backend']!r}")
    if data["attention"] is not None:
        check_attention(data["attention"])
    numbers = float(data["error"]), float(data["error_bound"])
    if not all(0 <= number < math.inf for number in numbers):
        raise ValueError(f"error {numbers[0]} or error_bound {numbers[1]}")
    return Profile(
        target=target,
        backend=data["backend"],
        attention=data["attention"],
        exact=data["exact"],
        error=numbers[0],
        error_bound=numbers[1],
        measured=tuple(dict(row) for row in data["measured"]),
    )


def _weights_mark(manifest: Manifest) -> str:
    """What tells the transformer's weights from others without reading gigabytes.

    The size and last bytes of every file; of weights on the hub their revision.
    """
    ref = manifest.components["transformer"]
    folder = local_folder(manifest, ref)
    paths = sorted((folder / (ref.subfolder or "")).glob("*.safetensors")) if folder else []
    if ref.file is not None:
        paths.append(manifest.folder / Path(ref.file).expanduser())
    parts = [f"{ref.source}@{ref.revision}" if folder is None else ""]
    for path in paths:
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
                parts.append(f"{size} {hashlib.sha256(file.read()).hexdigest()}")
        except OSError:
            parts.append(f"{ref.file}@{ref.revision}")  # on the hub, or found missing at loading
    return "\n".join(parts)
