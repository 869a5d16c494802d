"""What a chunk has in reach and what its queries read of it: a request's window, sink, attention.

No torch.
"""

from __future__ import annotations

from longtake.errors import RequestError
from longtake.schedulers.chunks import ChunkLayout, pixel_frames
from longtake.video.attention_plan import AttentionPlan, Scope, layout_of, resolve_attention
from longtake.video.manifest import Manifest
from longtake.video.request import VideoRequest
from longtake.video.shapes import ModelShape


def resolve_layout(
    request: VideoRequest,
    manifest: Manifest,
    given: tuple[int, ...],
    latents: int,
    stride: int,
) -> ChunkLayout:
    """The chunks, and what is in reach of each.

    Args:
        request, manifest: what is asked for, and of which model.
        given: sizes of the chunks that come from an input.
        latents: length of the video in latent frames.
        stride: pixel frames of a latent frame.

    Raises:
        RequestError: of ``window``, ``sink`` or ``attention``.
    """
    largest = max(manifest.chunk, manifest.first_chunk or 0, *given, 0)
    plan_global = _layout_name(request) == "global"
    if plan_global:
        _check_global(request)
    window = manifest.window if request.window is None else request.window
    sink = manifest.sink if request.sink is None else request.sink
    if not plan_global and window < sink + largest:
        field, value = ("sink", sink) if request.window is None else ("window", window)
        reason = f"window={window} must hold sink={sink} and a chunk of {largest} latent frames"
        legal = f"window {sink + largest} or more"
        if 0 <= window - largest < sink:
            legal += f", or sink {window - largest} or less"
        raise RequestError(field, value, reason, legal)
    layout = ChunkLayout(
        latent_frames=latents,
        chunk=manifest.chunk,
        first_chunk=manifest.first_chunk,
        given=given,
        window=None if plan_global else window,
        sink=0 if plan_global else sink,
    )
    if layout.capacity > manifest.max_latent_frames:
        raise _beyond_positions(layout, manifest, stride)
    return layout


def _beyond_positions(layout: ChunkLayout, manifest: Manifest, stride: int) -> RequestError:
    """A cache with more slots than the rope table has positions."""
    limit = manifest.max_latent_frames
    reason = f"{layout.capacity} latent frames exceed this model's {limit} positions"
    if layout.window is not None:
        return RequestError("window", layout.window, reason, f"at most {limit}")
    before = sum(layout.given) or layout.first_chunk or 0
    longest = pixel_frames(before + (limit - before) // layout.chunk * layout.chunk, stride)
    legal = f"at most {longest} frames; attention=window has no length limit"
    return RequestError("attention", "global", reason, legal)


def _layout_name(request: VideoRequest) -> str:
    return layout_of(request.attention or "window", window_given=request.window is not None)


def resolve_reading(
    request: VideoRequest,
    model: tuple[Manifest, ModelShape],
    size: tuple[int, int],
    layout: ChunkLayout,
    steps: int,
) -> AttentionPlan:
    """The attention plan, resolved against the model's own window and sink.

    Args:
        request: what is asked for.
        model: its manifest and sizes.
        size: width and height of the video.
        layout: what is in reach.
        steps: denoising steps of a chunk.

    Raises:
        RequestError: of ``attention``.
    """
    manifest, shape = model
    largest = max(manifest.chunk, manifest.first_chunk or 0, *layout.given, 0)
    sink = manifest.sink if request.sink is None else request.sink
    scope = Scope(
        window=max(layout.window or manifest.window, sink + largest),
        sink=sink,
        chunk=largest,
        tokens=shape.frame_tokens(size),
        layers=shape.transformer.layers,
        steps=max(1, steps),
    )
    text = request.attention or "window"
    return resolve_attention(text, scope, window_given=request.window is not None)


def _check_global(request: VideoRequest) -> None:
    """Without a window there is nothing to set; a sink is for readings that leave frames out."""
    text = request.attention or ""
    if request.window is not None:
        raise RequestError("window", request.window, f"attention={text} has none", _windowed(text))
    base = text.split(",", 1)[0].removeprefix("global+")
    everything = base.partition(":")[0] in ("global", "full", "chunked")
    if request.sink is not None and everything and "," not in text:
        raise RequestError("sink", request.sink, f"attention={text} has none", "attention=window")


def _windowed(text: str) -> str:
    """The same plan over a window."""
    return f"attention=window{text.removeprefix('global')}"
