"""How fast this machine is at a model's shapes: a short measurement, cached."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import platformdirs
import torch

from longtake.video.cost import Rates
from longtake.video.numerics import device_name, torch_dtype
from longtake.video.shapes import ModelShape

REPEATS = 3
BUDGET_S = 0.15  # for one kind of operation
MAX_TOKENS = 4096


def measured_rates(
    shape: ModelShape,
    size: tuple[int, int],
    frames: tuple[int, int],
    *,
    device: torch.device,
    dtype: str,
) -> Rates:
    """Rates of this machine for one model at one size, measured once and kept on disk.

    Args:
        shape, size: the model and the video's width and height.
        frames: latent frames of a chunk, and of what it sees.
        device, dtype: where and how it will run.
    """
    path = _cache_path(shape, size, frames, device, dtype)
    try:
        return Rates(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        rates = probe(shape, size, frames, device=device, dtype=dtype)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(rates)), encoding="utf-8")
    except OSError:
        pass  # a read-only home only costs the next plan a second
    return rates


@torch.inference_mode()
def probe(
    shape: ModelShape,
    size: tuple[int, int],
    frames: tuple[int, int],
    *,
    device: torch.device,
    dtype: str,
) -> Rates:
    """Measure matrix products, attention and convolutions; under a second on a CPU."""
    kind = torch_dtype(dtype)
    model, tokens = shape.transformer, shape.frame_tokens(size)
    query = min(frames[0] * tokens, MAX_TOKENS)
    keys = min(frames[1] * tokens, 4 * MAX_TOKENS)

    def make(*dims: int) -> torch.Tensor:
        return torch.randn(dims, device=device, dtype=kind)

    x, up, down = (
        make(query, model.dim),
        make(model.dim, model.ffn_dim),
        make(model.ffn_dim, model.dim),
    )
    linear = _rate(lambda: x @ up @ down, 4.0 * query * model.dim * model.ffn_dim, device)
    q = make(1, model.heads, query, model.head_dim)
    k = make(1, model.heads, keys, model.head_dim)
    attention = _rate(
        lambda: torch.nn.functional.scaled_dot_product_attention(q, k, k),
        4.0 * query * keys * model.dim,
        device,
    )
    high, wide = shape.latent_size(size)
    heaviest = max(shape.vae.decoder, key=lambda conv: conv.flops if conv.kernel > 1 else 0.0)
    side = int(heaviest.area**0.5)
    rows, columns = min(high * side, 256), min(wide * side, 256)
    picture = make(1, 3 * heaviest.inside, rows, columns)
    weight = make(heaviest.outside, 3 * heaviest.inside, 3, 3)
    flops = 2.0 * 27 * heaviest.inside * heaviest.outside * rows * columns
    conv = _rate(lambda: torch.nn.functional.conv2d(picture, weight, padding=1), flops, device)
    return Rates(linear, attention, conv, _device(device))


def _rate(run: Callable[[], torch.Tensor], flops: float, device: torch.device) -> float:
    """Best flops per second of a few rounds, each long enough to time."""

    def timed(repeats: int) -> float:
        started = perf_counter()
        for _ in range(repeats):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter() - started

    timed(1)
    repeats = max(1, int(BUDGET_S / REPEATS / max(timed(1), 1e-6)))
    return flops * repeats / min(timed(repeats) for _ in range(REPEATS))


def _device(device: torch.device) -> str:
    """The device as rates depend on it; of a CPU with the threads that are used."""
    name = device_name(device)
    return name if device.type == "cuda" else f"{name}, {torch.get_num_threads()} threads"


def _cache_path(
    shape: ModelShape,
    size: tuple[int, int],
    frames: tuple[int, int],
    device: torch.device,
    dtype: str,
) -> Path:
    key = repr((shape, size, frames, dtype, _device(device), torch.__version__))
    name = hashlib.sha256(f"{key}{platform.node()}".encode()).hexdigest()[:16]
    return Path(platformdirs.user_cache_dir("longtake")) / "rates" / f"{name}.json"
