"""Make equal inputs give equal bits, and say when they do.

The environment is read by torch's libraries when they load, so ``longtake.video`` calls
``fix_environment`` when it is imported: import it before torch. What was measured is in
docs/architecture.md, "Same bytes".
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from longtake.errors import DeviceError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
# products with one row (the time embedder) depend on the alignment of weights without this
MKL_MODE = "AVX2,STRICT"
CPU_INFO = Path("/proc/cpuinfo")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def fix_environment() -> None:
    """Set what torch's libraries read when they load; does nothing if they have loaded."""
    if "torch" not in sys.modules:
        os.environ.setdefault("MKL_CBWR", MKL_MODE)
        # idle threads that spin take the core from the one they wait for on a shared machine
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def numerics_fixed() -> bool:
    """True if ``fix_environment`` (or the caller) was in time."""
    return os.environ.get("MKL_CBWR") == MKL_MODE


def configure(threads: int | None = None) -> None:
    """Fix torch's own switches, and the number of threads.

    Args:
        threads: CPU threads of one operation; None leaves torch's own choice.
    """
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def choose_device(name: str | None) -> torch.device:
    """The device called ``name``; without one the best that is there.

    Raises:
        DeviceError: no such device here.
    """
    import torch

    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    usable = [kind for kind, available in there.items() if available]
    if name is None or name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if there[kind]))
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or not there.get(device.type, False):
        raise DeviceError(f"device={name!r}: not available here; usable: {', '.join(usable)}")
    if device.type != "cuda" and device.index:
        raise DeviceError(f"device={name!r}: there is one {device.type} device; {device.type}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"device={name!r}: there are {torch.cuda.device_count()} CUDA devices")
    return device


def choose_dtype(name: str | None, device: torch.device) -> str:
    """``fp32``, ``bf16`` or ``fp16``; without a name what the device is fast at.

    Raises:
        DeviceError: no such dtype, or not usable on the device.
    """
    import torch

    if name is None or name == "auto":
        return "fp32" if device.type == "cpu" else "bf16"
    if name not in DTYPES:
        raise DeviceError(f"dtype={name!r}: no such dtype; {', '.join(DTYPES)}")
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise DeviceError(f"dtype=bf16: {device_name(device)} has none; fp16")
    return name


@cache
def device_name(device: torch.device) -> str:
    """The name of the hardware; of a CPU its model where the system tells it."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{platform.machine()} {device.type}"
    try:
        told = re.search(r"^model name\s*:\s*(.+)$", CPU_INFO.read_text(encoding="utf-8"), re.M)
    except OSError:
        told = None
    return f"{platform.machine()} cpu, {told[1].strip() if told else 'model unknown'}"


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a short name."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose storage starts at a multiple of 64 bytes.

    Weights read from a file lie at odd offsets, and some CPU kernels give other last bits there.
    """
    import torch

    spare = ALIGNMENT // tensor.element_size()
    store = torch.empty(tensor.numel() + spare, dtype=tensor.dtype)
    offset = (-store.data_ptr() % ALIGNMENT) // tensor.element_size()
    place = store[offset : offset + tensor.numel()].view(tensor.shape)
    place.copy_(tensor)
    return place


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def draw_noise(
    shape: tuple[int, ...], seed: int, chunk: int, attempt: int, use: str
) -> torch.Tensor:
    """Standard normal noise on the CPU that depends on its key alone.

    Args:
        shape: shape of the whole chunk's noise.
        seed, chunk, attempt: the video, the chunk and the how-manieth try at it.
        use: what it is for: ``start``, ``step-2``, ``context``, ``recache``.
    """
    import torch

    key = f"{seed}/{chunk}/{attempt}/{use}".encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
    generator = torch.Generator("cpu").manual_seed(number)
    return torch.randn(shape, generator=generator)


def fingerprint(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Short hashes of fixed operations on this device: equal ones allow a claim of equal bytes."""
    import torch

    def make(*shape: int) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(sum(shape))
        return aligned(torch.randn(shape, generator=generator)).to(device, dtype)

    nn = torch.nn.functional
    q = make(1, 4, 96, 48)
    operations: dict[str, Callable[[], torch.Tensor]] = {
        "matmul_rows": lambda: make(320, 192) @ make(192, 768),
        "matmul_one_row": lambda: nn.linear(make(1, 256), make(192, 256), make(192)),
        "matmul_batch": lambda: make(2, 80, 192) @ make(192, 192),
        "conv2d": lambda: nn.conv2d(make(1, 96, 10, 16), make(96, 96, 3, 3), padding=1),
        "conv3d": lambda: nn.conv3d(make(1, 24, 3, 10, 16), make(24, 24, 3, 3, 3)),
        "sdpa": lambda: nn.scaled_dot_product_attention(
            q, make(1, 4, 240, 48), q.new_ones(1, 4, 240, 48)
        ),
        "sdpa_bias": lambda: nn.scaled_dot_product_attention(
            q, make(1, 4, 16, 48), make(1, 4, 16, 48), attn_mask=make(1, 1, 1, 16)
        ),
        "layer_norm": lambda: nn.layer_norm(make(80, 192), (192,)),
        "rms_norm": lambda: nn.rms_norm(make(80, 192), (192,)),
        "gelu": lambda: nn.gelu(make(80, 768), approximate="tanh"),
        "silu": lambda: nn.silu(make(80, 768)),
        "rotation": lambda: make(80, 48).cos() * make(80, 48).sin(),
        "random": lambda: draw_noise((16, 16), 7, 1, 0, "start"),
    }
    with torch.inference_mode():
        return {name: _digest(run()) for name, run in operations.items()}


def fingerprint_hash(parts: dict[str, str]) -> str:
    """One short hash of a fingerprint."""
    return hashlib.sha256("".join(f"{k}{v}" for k, v in parts.items()).encode()).hexdigest()[:16]


def _digest(tensor: torch.Tensor) -> str:
    import torch

    raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:12]
