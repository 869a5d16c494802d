"""Memory: telling that it ran out, giving it back, and how much this process holds."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch

# torch has a type for a full accelerator alone; a full CPU is a RuntimeError with one of these
_SAID = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
_STATM = Path("/proc/self/statm")


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
    if sys.platform == "linux":
        # glibc keeps freed blocks of a long job between those still in use
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def resident_bytes() -> int:
    """Memory of this process that lies in RAM; elsewhere than on Linux its highest value."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
