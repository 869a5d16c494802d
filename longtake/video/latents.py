"""Stored chunk latents: what a stopped video goes on from.

A folder holds ``rollout.json`` (what was asked for and what ran) and one safetensors file a chunk,
each written whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from longtake.errors import OutputError, RequestError, ResumeError
from longtake.video.plan import Inputs, Plan
from longtake.video.request import VideoRequest, request_from_mapping, request_to_mapping
from longtake.video.rollout import Chunk

ROLLOUT_NAME = "rollout.json"
VERSION = 1
# a longer video goes on from the same latents; all else must be as it was
MAY_DIFFER = ("seconds", "num_frames")


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """What ``rollout.json`` says.

    Attributes:
        request: with the seed that was drawn.
        inputs: what lay before the rollout.
        weights: SHA-256 by file of what made the latents.
        dtype: compute dtype.
        fingerprint: numerics of the machine, by operation.
    """

    request: VideoRequest
    inputs: Inputs
    weights: Mapping[str, str]
    dtype: str
    fingerprint: Mapping[str, str]


class LatentFolder:
    """A folder of stored chunks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check_empty(self) -> None:
        """Refuse a folder that holds something already, or that could not be made.

        Raises:
            OutputError: not empty, not a folder, or its parent does not exist.
        """
        try:
            if not self.path.exists():
                if not self.path.parent.is_dir():
                    reason = f"the folder {self.path.parent} does not exist"
                    raise OutputError("keep_latents", self.path, reason)
            elif any(self.path.iterdir()):
                raise OutputError("keep_latents", self.path, "the folder is not empty")
        except OSError as error:
            raise OutputError("keep_latents", self.path, str(error.strerror)) from error

    def describe_as(self, stored: StoredRollout) -> None:
        """Write ``rollout.json``, making the folder if need be."""
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError("keep_latents", self.path, str(error.strerror)) from error
        data = {
            "version": VERSION,
            "request": request_to_mapping(stored.request),
            "inputs": {
                "kind": stored.inputs.kind,
                "frames": stored.inputs.frames,
                "chunks": list(stored.inputs.chunks),
            },
            "weights": dict(stored.weights),
            "dtype": stored.dtype,
            "fingerprint": dict(stored.fingerprint),
        }
        self._write(ROLLOUT_NAME, json.dumps(data, indent=2).encode())

    def describe(self) -> StoredRollout:
        """Read ``rollout.json``.

        Raises:
            ResumeError: not there, damaged, or of another version.
        """
        path = self.path / ROLLOUT_NAME
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["version"] != VERSION:
                raise ResumeError(f"resume={self.path}: version {data['version']}, not {VERSION}")
            inputs = data["inputs"]
            return StoredRollout(
                request=request_from_mapping(data["request"]),
                inputs=Inputs(inputs["kind"], inputs["frames"], tuple(inputs["chunks"])),
                weights=dict(data["weights"]),
                dtype=data["dtype"],
                fingerprint=dict(data["fingerprint"]),
            )
        except OSError as error:
            reason = f"no stored rollout there ({error.strerror})"
            raise ResumeError(f"resume={self.path}: {reason}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RequestError) as error:
            raise ResumeError(f"resume={self.path}: {ROLLOUT_NAME} is damaged: {error}") from error

    def write(self, chunk: Chunk) -> None:
        """Store a chunk's latents.

        Raises:
            OutputError: no space, or not writable.
        """
        latents = chunk.latents.cpu().contiguous()
        metadata = {"chunk": str(chunk.spec.index), "start": str(chunk.spec.start)}
        self._write(self._name(chunk.spec.index), save({"latents": latents}, metadata))

    def read(self, index: int) -> torch.Tensor | None:
        """Latents of a chunk, None if it is not stored.

        Raises:
            ResumeError: the file is damaged.
        """
        path = self.path / self._name(index)
        if not self.holds(index):
            return None
        try:
            with safe_open(path, framework="pt") as file:
                latents: torch.Tensor = file.get_tensor("latents")
                return latents
        except (SafetensorError, OSError) as error:
            raise ResumeError(f"resume={path}: the chunk cannot be read: {error}") from error

    def holds(self, index: int) -> bool:
        """True if the chunk is stored."""
        return (self.path / self._name(index)).exists()

    @property
    def count(self) -> int:
        """Chunks stored without a gap from the first."""
        index = 0
        while self.holds(index):
            index += 1
        return index

    @staticmethod
    def _name(index: int) -> str:
        return f"chunk-{index:06d}.safetensors"

    def _write(self, name: str, data: bytes) -> None:
        target = self.path / name
        part = self.path / f".{name}.part"
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise OutputError("keep_latents", target, str(error.strerror)) from error


def check_same_request(stored: VideoRequest, asked: VideoRequest) -> None:
    """A resumed request may name another length and nothing else.

    Raises:
        ResumeError: names the field, what was stored and what is asked for.
    """
    before, now = request_to_mapping(stored), request_to_mapping(asked)
    for field in sorted({*before, *now} - set(MAY_DIFFER)):
        if field == "seed" and field not in now:
            continue
        if before.get(field) != now.get(field):
            raise ResumeError(
                f"{field}={now.get(field)!r}: the stored rollout has {before.get(field)!r}; "
                f"only {' and '.join(MAY_DIFFER)} may differ"
            )


def check_same_model(stored: StoredRollout, plan: Plan, weights: Mapping[str, str]) -> None:
    """Latents only go on with the very weights that made them.

    Weight files are compared by content, so a renamed or moved copy is the same model.

    Raises:
        ResumeError: another model.
    """
    if sorted(stored.weights.values()) != sorted(weights.values()):
        raise ResumeError(
            f"model={plan.request.model!r}: its weights are not those that made the latents"
        )


def rollout_metadata(plan: Plan, inputs: Inputs, **ran: Any) -> StoredRollout:
    """What to store beside a plan's chunks: the request with its seed, and what ran."""
    data = {**request_to_mapping(plan.request), "seed": plan.seed}
    return StoredRollout(request=request_from_mapping(data), inputs=inputs, **ran)
