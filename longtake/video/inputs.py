"""Start images, clips and stored latents: read once, before anything is made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtake.errors import Interrupted, MediaError, ResumeError
from longtake.schedulers.chunks import latent_frames, pixel_frames
from longtake.video.codec import StreamingEncoder, from_uint8
from longtake.video.components import CausalModel
from longtake.video.latents import ROLLOUT_NAME, LatentFolder
from longtake.video.media import fit_image, read_clip, read_image
from longtake.video.numerics import file_hash
from longtake.video.plan import Inputs, Plan
from longtake.video.request import VideoRequest

MAX_CLIP_FRAMES = 4096
ENCODE_FRAMES = 4  # latent frames encoded at a time


@dataclass(frozen=True, slots=True)
class Given:
    """What a request starts from.

    Attributes:
        inputs: counted, for the plan.
        pixels: uint8 [T, H, W, 3], or None.
        latents: [1, C, F, h, w] of a stored video, or None; weights those that made them.
        notes: what was read and what was changed, for the receipt.
    """

    inputs: Inputs
    pixels: np.ndarray[Any, np.dtype[np.uint8]] | None
    latents: torch.Tensor | None
    notes: dict[str, Any]
    weights: Mapping[str, str] = field(default_factory=dict)


def input_hash(request: VideoRequest) -> str | None:
    """SHA-256 of the image or clip a request starts from; None of a folder, or if it is gone."""
    path = Path(request.image or request.video or "")
    return file_hash(path) if path.is_file() else None


def read_given(
    request: VideoRequest,
    size: tuple[int, int],
    fps: float,
    stride: int,
    latent_shape: tuple[int, int, int],
) -> Given:
    """Read the request's image, clip or stored latents at the video's size and rate.

    Args:
        request: names the input.
        size, fps: of the video to be made.
        stride: pixel frames of a later latent frame.
        latent_shape: channels, height and width of the video's latents.

    Raises:
        MediaError: it cannot be read, or stored latents have another shape.
    """
    if request.image is not None:
        image, note = fit_image(read_image(Path(request.image)), size)
        notes: dict[str, Any] = {"image": request.image, "changes": [note] if note else []}
        return Given(Inputs("image", 1), image[None], None, notes)
    if request.video is None:
        return Given(Inputs(), None, None, {})
    kind = "continue" if request.strength is None else "redraw"
    path = Path(request.video)
    if path.is_dir():
        return _stored(path, kind, stride, latent_shape)
    pixels, info = read_clip(path, size, fps, MAX_CLIP_FRAMES, field="video")
    notes = {
        "video": request.video,
        "num_frames": info.frames,
        "size": f"{info.size[0]}x{info.size[1]}",
        "fps": float(info.fps),
        "changes": list(info.changes),
    }
    return Given(Inputs(kind, len(pixels)), pixels, None, notes)


def encode_given(
    given: Given, model: CausalModel, plan: Plan, stop: Callable[[], bool]
) -> torch.Tensor | None:
    """Clean latents [1, C, F, h, w] of the pixel frames of an input that the plan uses.

    Raises:
        MediaError: stored latents of another VAE.
        Interrupted: ``stop`` was raised.
    """
    if given.latents is not None:
        vaes = [
            {v for k, v in w.items() if k.startswith("vae/")} for w in (given.weights, model.hashes)
        ]
        if vaes[0] != vaes[1]:
            raise MediaError("video", plan.request.video, "holds latents of another VAE")
        return given.latents
    if given.pixels is None:
        return None
    used = plan.input_frames
    stride = model.shape.vae.stride_time
    encoder = StreamingEncoder(model.vae)
    parts: list[torch.Tensor] = []
    start = 0
    while start < used:
        if stop():
            raise Interrupted("stopped while the input was encoded; nothing was written")
        count = 1 + stride * (ENCODE_FRAMES - 1) if start == 0 else stride * ENCODE_FRAMES
        frames = torch.from_numpy(given.pixels[start : min(start + count, used)].copy())
        parts.append(encoder.encode(from_uint8(frames[None])).to(model.wan.dtype))
        start += count
    return torch.cat(parts, dim=2)


def _vae_hashes(weights: Mapping[str, str]) -> set[str]:
    return {value for name, value in weights.items() if name.startswith("vae/")}


def _stored(path: Path, kind: str, stride: int, latent_shape: tuple[int, int, int]) -> Given:
    """Latents of a stored video, without what was made past its end."""
    if not (path / ROLLOUT_NAME).is_file():
        raise MediaError("video", str(path), f"is a folder without {ROLLOUT_NAME}")
    folder = LatentFolder(path)
    try:
        described = folder.describe()
        known = [c for c in map(folder.read, range(folder.count)) if c is not None]
    except ResumeError as error:
        raise MediaError("video", str(path), f"is damaged: {error}") from error
    if not known:
        raise MediaError("video", str(path), "holds no stored chunk")
    for chunk in known:
        shape = (chunk.shape[1], *chunk.shape[3:])
        if shape != latent_shape:
            reason = f"holds latents of {shape}, this video has {latent_shape}"
            raise MediaError("video", str(path), reason)
    length = latent_frames(described.num_frames, stride)
    latents = torch.cat(known, dim=2)[:, :, :length]
    sizes = list(itertools.accumulate(chunk.shape[2] for chunk in known))
    ends = [min(end, latents.shape[2]) for end in sizes]
    chunks = tuple(b - a for a, b in itertools.pairwise([0, *ends]) if b > a)
    frames = pixel_frames(latents.shape[2], stride)
    notes = {"video": str(path), "num_frames": frames, "changes": []}
    inputs = Inputs(kind, frames, chunks if kind == "continue" else ())
    return Given(inputs, None, latents, notes, described.weights)
