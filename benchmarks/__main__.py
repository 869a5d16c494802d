"""All figures that a CPU can show, or those that are named.

Run ``python -m benchmarks [PART ...] [--quick] [--json] [--threads N]``.
"""

from __future__ import annotations

import sys

from benchmarks import (
    attention,
    attention_cost,
    gallery,
    length,
    memory,
    overhead,
    parallel,
    service,
    speed,
    vae_decode,
)
from benchmarks.report import run

if __name__ == "__main__":
    sys.exit(
        run(
            __doc__ or "",
            {
                "overhead": overhead.figure,
                "memory": memory.figure,
                "length": length.figure,
                "speed": speed.figure,
                "parallel": parallel.figure,
                "vae_decode": vae_decode.figure,
                "attention": attention.figure,
                "attention_cost": attention_cost.figure,
                "service": service.figure,
                "gallery": gallery.figure,
            },
        )
    )
