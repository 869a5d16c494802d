"""Stored chunk latents: what a stopped video goes on from.

A folder holds ``rollout.json`` (what was asked for and what ran) and one safetensors file a chunk,
each written whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from longtake.errors import OutputError, RequestError, ResumeError
from longtake.video.plan import Inputs, Plan
from longtake.video.request import (
    REQUEST_FIELDS,
    VideoRequest,
    request_from_mapping,
    request_to_mapping,
)
from longtake.video.rollout import Chunk, Denoised

ROLLOUT_NAME = "rollout.json"
VERSION = 1
# of a plan, what its latents depend on; a longer video goes on from the same ones
DECIDES = (
    "seed",
    "size",
    "fps",
    "attention",
    "attention_plan",
    "window",
    "sink",
    "kv_cache",
    "sampler",
    "sigmas",
    "guidance_scale",
    "negative_prompt",
    "context_noise",
    "context_noise_added",
    "recache",
    "prompts",
)


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """What ``rollout.json`` says.

    Attributes:
        request: with the seed that was drawn.
        plan: what the latents depend on, from ``decisive``.
        num_frames: length of the video.
        inputs: what lay before the rollout; input_hash its SHA-256 where it was a file.
        weights: SHA-256 by file of what made the latents.
        dtype: compute dtype.
        fingerprint: numerics of the machine, by operation.
    """

    request: VideoRequest
    plan: Mapping[str, Any]
    num_frames: int
    inputs: Inputs
    input_hash: str | None
    weights: Mapping[str, str]
    dtype: str
    fingerprint: Mapping[str, str]


class LatentFolder:
    """A folder of stored chunks; with ``sync`` each is on the disk when ``write`` returns."""

    def __init__(self, path: Path, *, sync: bool = True) -> None:
        self.path = path
        self._sync = sync

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
            "plan": dict(stored.plan),
            "num_frames": stored.num_frames,
            "input_hash": stored.input_hash,
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
                plan=dict(data["plan"]),
                num_frames=int(data["num_frames"]),
                input_hash=data["input_hash"],
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

    def write(self, chunk: Chunk | Denoised) -> None:
        """Store a chunk's latents.

        Raises:
            OutputError: no space, or not writable.
        """
        latents = chunk.latents.cpu().contiguous()
        metadata = {"chunk": str(chunk.spec.index), "start": str(chunk.spec.start)}
        self._write(self.file_name(chunk.spec.index), save({"latents": latents}, metadata))

    def read(self, index: int) -> torch.Tensor | None:
        """Latents of a chunk, None if it is not stored.

        Raises:
            ResumeError: the file is damaged.
        """
        path = self.path / self.file_name(index)
        if not self.holds(index):
            return None
        try:
            with safe_open(path, framework="pt") as file:
                latents: torch.Tensor = file.get_tensor("latents")
                return latents
        except (SafetensorError, OSError) as error:
            raise ResumeError(f"resume={path}: the chunk cannot be read: {error}") from error

    def read_before_gap(self) -> Callable[[int], torch.Tensor | None]:
        """``read`` for the chunks up to the first missing one, None from there on."""
        count = self.count
        return lambda index: self.read(index) if index < count else None

    def holds(self, index: int) -> bool:
        """True if the chunk is stored."""
        return (self.path / self.file_name(index)).exists()

    @property
    def count(self) -> int:
        """Chunks stored without a gap from the first."""
        index = 0
        while self.holds(index):
            index += 1
        return index

    @staticmethod
    def file_name(index: int) -> str:
        """Name of a chunk's file."""
        return f"chunk-{index:06d}.safetensors"

    def _write(self, name: str, data: bytes) -> None:
        target = self.path / name
        part = self.path / f".{name}.part"
        try:
            with part.open("wb") as file:
                file.write(data)
                if self._sync:
                    file.flush()
                    os.fsync(file.fileno())
            part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise OutputError("keep_latents", target, str(error.strerror)) from error


def decisive(plan: Plan) -> dict[str, Any]:
    """The part of a plan that its chunks' latents depend on, in JSON form."""
    data = plan.as_dict()
    layout = plan.layout
    return {name: data[name] for name in DECIDES} | {
        "prompt": plan.request.prompt,
        "strength": plan.request.strength,
        "chunk": layout.chunk,
        "first_chunk": layout.first_chunk,
        "input": plan.input_kind,
        "given": list(layout.given),
    }


def merge_request(stored: VideoRequest, asked: VideoRequest | None) -> VideoRequest:
    """The stored request with what the caller names now; a length replaces a stored length."""
    if asked is None:
        return stored
    changes = {
        name: getattr(asked, name)
        for name in REQUEST_FIELDS
        if getattr(asked, name) not in (None, ())
    }
    if "seconds" in changes or "num_frames" in changes:
        changes = {"seconds": None, "num_frames": None} | changes
    return replace(stored, **changes)


def check_same_plan(stored: StoredRollout, plan: Plan) -> None:
    """Stored latents go on under the plan that made them; only the length may be another.

    Raises:
        ResumeError: names the field, what was stored and what is asked for.
    """
    now = json.loads(json.dumps(decisive(plan)))
    for field, before in stored.plan.items():
        if now.get(field) != before:
            raise ResumeError(f"{field}={now.get(field)!r}: the stored rollout has {before!r}")
    if plan.input_kind == "redraw" and plan.num_frames != stored.num_frames:
        raise ResumeError(
            f"num_frames={plan.num_frames}: a redrawn clip keeps its length, {stored.num_frames}"
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
    for name in ("model", "image", "video"):
        if name in data and Path(data[name]).exists():
            # a later run may be started in another folder
            data[name] = str(Path(data[name]).resolve())
    return StoredRollout(
        request=request_from_mapping(data),
        plan=decisive(plan),
        num_frames=plan.num_frames,
        inputs=inputs,
        **ran,
    )
