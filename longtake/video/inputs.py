"""Start images, clips and stored latents: read once, before anything is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtake.errors import MediaError
from longtake.schedulers.chunks import latent_frames, pixel_frames
from longtake.video.codec import StreamingEncoder, from_uint8
from longtake.video.components import CausalModel
from longtake.video.latents import ROLLOUT_NAME, LatentFolder
from longtake.video.media import fit_image, read_clip, read_image
from longtake.video.plan import Inputs
from longtake.video.request import VideoRequest

MAX_CLIP_FRAMES = 4096
ENCODE_FRAMES = 4  # latent frames encoded at a time


@dataclass(frozen=True, slots=True)
class Given:
    """What a request starts from.

    Attributes:
        inputs: counted, for the plan.
        pixels: uint8 [T, H, W, 3], or None.
        latents: [1, C, F, h, w] of a stored video, or None.
        notes: what was read and what was changed, for the receipt.
    """

    inputs: Inputs
    pixels: np.ndarray[Any, np.dtype[np.uint8]] | None
    latents: torch.Tensor | None
    notes: dict[str, Any]


def read_given(request: VideoRequest, size: tuple[int, int], fps: float, stride: int) -> Given:
    """Read the request's image, clip or stored latents at the video's size and rate.

    Raises:
        MediaError: it cannot be read.
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
        return _stored(path, kind, stride)
    pixels, info = read_clip(path, size, fps, MAX_CLIP_FRAMES, field="video")
    notes = {
        "video": request.video,
        "num_frames": info.frames,
        "size": f"{info.size[0]}x{info.size[1]}",
        "fps": float(info.fps),
        "changes": list(info.changes),
    }
    return Given(Inputs(kind, len(pixels)), pixels, None, notes)


def encode_given(given: Given, model: CausalModel, used: int) -> torch.Tensor | None:
    """Clean latents [1, C, F, h, w] of the first ``used`` pixel frames of an input."""
    if given.latents is not None or given.pixels is None:
        return given.latents
    stride = model.shape.vae.stride_time
    encoder = StreamingEncoder(model.vae)
    parts: list[torch.Tensor] = []
    start = 0
    while start < used:
        count = 1 + stride * (ENCODE_FRAMES - 1) if start == 0 else stride * ENCODE_FRAMES
        frames = torch.from_numpy(given.pixels[start : min(start + count, used)].copy())
        parts.append(encoder.encode(from_uint8(frames[None])).to(model.wan.dtype))
        start += count
    return torch.cat(parts, dim=2)


def _stored(path: Path, kind: str, stride: int) -> Given:
    if not (path / ROLLOUT_NAME).is_file():
        raise MediaError("video", str(path), f"is a folder without {ROLLOUT_NAME}")
    folder = LatentFolder(path)
    chunks = [folder.read(index) for index in range(folder.count)]
    known = [chunk for chunk in chunks if chunk is not None]
    if not known:
        raise MediaError("video", str(path), "holds no stored chunk")
    latents = torch.cat(known, dim=2)
    frames = pixel_frames(latents.shape[2], stride)
    sizes = tuple(chunk.shape[2] for chunk in known)
    notes = {"video": str(path), "latent_frames": latent_frames(frames, stride), "changes": []}
    return Given(Inputs(kind, frames, sizes if kind == "continue" else ()), None, latents, notes)
