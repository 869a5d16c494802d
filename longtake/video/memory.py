"""Memory: telling that it ran out, giving it back, and how much this process holds."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

# torch has a type for a full accelerator alone; a full CPU is a RuntimeError with one of these
_SAID = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
_STATM = Path("/proc/self/statm")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error means that the accelerator or the machine has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(said in text for said in _SAID)


def release_memory() -> None:
    """Give back what nothing refers to any more, to the device and to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _trim()


def keep_loaded() -> None:
    """Have later collections pass over what is there now, which is modules and a loaded model.

    Looking through them again takes half a second after every video. ``gc.unfreeze`` undoes it.
    """
    gc.collect()
    gc.freeze()


def resident_bytes() -> int:
    """Memory of this process that lies in RAM; elsewhere than on Linux its highest value."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most memory that a call takes beyond what was taken before it, its result included.

    Tensors alone on CUDA, the whole process on Linux (a page at a time, so 0 of a small call); None
    elsewhere.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    _trim()  # or what was freed earlier could be taken again unseen
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
        before = _status_bytes("VmRSS")
    except (OSError, KeyError):
        return None
    call()
    return max(0, _status_bytes("VmHWM") - before)


def _trim() -> None:
    """Give freed blocks back: glibc keeps those of a long job between others still in use."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _status_bytes(name: str) -> int:
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[name].split()[0]) * 1024
