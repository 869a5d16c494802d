"""The figures this project claims, each measured side by side with what it is compared to.

``python -m benchmarks`` (or ``make bench``) prints all of them, ``python -m benchmarks overhead
service`` those that are named. ``python -m benchmarks.gpu_rollout`` and ``gpu_attention`` are for a
machine with a GPU.

Importing this package fixes the numerics, as ``longtake`` does, before torch first multiplies.
"""

from longtake.video.numerics import configure

configure()
