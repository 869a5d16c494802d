"""The figures this project claims, each measured side by side with what it is compared to.

``python -m benchmarks`` (or ``make bench``) prints all of them; ``python -m benchmarks.overhead``,
``.length``, ``.speed``, ``.memory`` and ``.vae_decode`` print one. ``python -m
benchmarks.gpu_rollout`` is for a machine with a GPU.

Importing this package fixes the numerics, as ``longtake`` does, before torch first multiplies.
"""

from longtake.video.numerics import configure

configure()
