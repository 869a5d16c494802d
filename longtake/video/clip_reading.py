"""What a query of a clip reads: everything, everything in chunks, or overlapping windows. No torch.

A bidirectional model attends to the whole clip, so its cost grows with the square of the length.
``attention=window`` gives every token the windows it lies in, each ``window`` latent frames long
and a quarter shared with the next, and blends what they say (as temporal MultiDiffusion does with
latents, arXiv 2302.08113); cost then grows with the length. ``attention=chunked`` is exact and
bounds memory alone.
"""

from __future__ import annotations

from typing import Any

from longtake.errors import RequestError
from longtake.schedulers.chunks import latent_frames
from longtake.video.attention_plan import Scope, resolve_attention
from longtake.video.attention_readings import Chunked, Windows
from longtake.video.clip_models import Pipeline, geometry_of
from longtake.video.request import VideoRequest

LEGAL = "chunked[:TOKENS] or window"


ClipReading = Chunked | Windows


def resolve_clip_reading(
    request: VideoRequest, pipeline: Pipeline, num_frames: int
) -> ClipReading | None:
    """How a clip of ``num_frames`` reads itself; None to leave diffusers' own attention alone.

    Raises:
        RequestError: of ``attention`` or ``window``: not for this pipeline, or not in clip mode.
    """
    text = request.attention
    if text is None:
        if request.window is not None:
            reason = "a clip has a window only with attention=window"
            raise RequestError("window", request.window, reason, "leave it out, or name both")
        return None
    if not pipeline.name.startswith("Wan"):
        reason = f"the attention of {pipeline.name} is not replaced"
        raise RequestError("attention", text, reason, "leave it out")
    total = latent_frames(num_frames, _stride(pipeline))
    if text == "window":
        frames = request.window or _own_length(pipeline)
        if frames < 2 or frames > total:
            reason = f"the clip has {total} latent frames"
            raise RequestError("window", frames, reason, f"2 to {total}, or a longer clip")
        return Windows(frames, total)
    kind, _, _ = text.partition(":")
    if kind != "chunked" or "," in text:
        raise RequestError("attention", text, "a clip is not read so", LEGAL)
    if request.window is not None:
        raise RequestError("window", request.window, f"attention={text} has none", "leave it out")
    scope = Scope(window=total, sink=0, chunk=total, tokens=1, layers=1, steps=1)
    reading = resolve_attention(text, scope).reading
    return reading if isinstance(reading, Chunked) else None


def reading_as_dict(reading: ClipReading | None) -> dict[str, Any] | None:
    """JSON form for plan and receipt."""
    if reading is None:
        return None
    if isinstance(reading, Chunked):
        return {"kind": reading.kind, "exact": True, "tokens": reading.tokens}
    spans = [list(span) for span in reading.spans]
    return {"kind": reading.kind, "exact": False, "frames": reading.frames, "spans": spans}


def _stride(pipeline: Pipeline) -> int:
    """Pixel frames of a latent frame."""
    config = pipeline.config("vae")
    stride = config.get("scale_factor_temporal")
    return int(stride) if stride else 2 ** sum(config.get("temperal_downsample", (True, True)))


def _own_length(pipeline: Pipeline) -> int:
    """Latent frames of a clip of the model's own length."""
    manifest = pipeline.source.manifest
    frames = manifest.num_frames if manifest else geometry_of(pipeline).num_frames
    frames = frames or pipeline.parameters.get("num_frames")
    return latent_frames(frames, _stride(pipeline)) if isinstance(frames, int) else 21
