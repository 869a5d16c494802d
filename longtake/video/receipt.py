"""What really ran, as a JSON file beside the video."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from longtake import __version__
from longtake.errors import OutputError
from longtake.video.numerics import fingerprint_hash, numerics_fixed

LIBRARIES = ("torch", "diffusers", "transformers", "safetensors", "av", "numpy")
GUARANTEE = {
    "L1": "same weights, request and numerics fingerprint give the same decoded pixels",
    "L3": "another device, dtype or backend gives the same video within a tolerance",
}


def engine_section(
    *,
    device: torch.device,
    dtype: str,
    backend: Mapping[str, str],
    fingerprint: Mapping[str, str],
) -> dict[str, Any]:
    """Device, backends and numerics.

    A CPU in float32 is L1 if longtake was imported before torch; elsewhere nothing was proved: L3.
    """
    level = "L1" if device.type == "cpu" and dtype == "fp32" and numerics_fixed() else "L3"
    return {
        "device": str(device),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "backend": dict(backend),
        "guarantee": {"level": level, "means": GUARANTEE[level]},
        "fingerprint": {
            "hash": fingerprint_hash(dict(fingerprint)),
            "operations": dict(fingerprint),
        },
    }


def make_receipt(
    plan: Mapping[str, Any],
    *,
    state: str,
    frames: int,
    weights: Mapping[str, str],
    engine: Mapping[str, Any],
    chunks: list[dict[str, Any]],
    inputs: Mapping[str, Any],
    timings: Mapping[str, float],
) -> dict[str, Any]:
    """Put a receipt together.

    Args:
        plan: ``Plan.as_dict()``.
        state: ``done`` or ``stopped``.
        frames: pixel frames in the file.
        weights: SHA-256 of every weight file.
        engine: ``engine_section``.
        chunks: one entry a chunk: index, frames, prompt, attempt, reused, timings.
        inputs: what was read and what was changed on the way in.
        timings: seconds by stage, and frames per second.
    """
    return {
        "longtake": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "state": state,
        "num_frames": frames,
        "seconds": frames / float(plan["fps"]),
        "seed": plan["seed"],
        "plan": dict(plan),
        "warnings": list(plan["warnings"]),
        "weights": dict(weights),
        "engine": dict(engine),
        "input": dict(inputs),
        "chunks": chunks,
        "timings": dict(timings),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def write_receipt(path: Path, receipt: Mapping[str, Any]) -> None:
    """Write a receipt whole or not at all.

    Raises:
        OutputError: not writable.
    """
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        part.write_text(json.dumps(receipt, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OutputError("output", path, f"receipt: {error.strerror}") from error


def is_receipt(path: Path) -> bool:
    """True if the file is one that ``write_receipt`` made."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and "longtake" in data


@cache
def _versions() -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
