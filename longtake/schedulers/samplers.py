"""One denoising step of flow matching. ``x = (1 - sigma) * x0 + sigma * noise``, v = noise - x0.

Written for anything with arithmetic (a tensor, an array, a float), so nothing is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class Arithmetic(Protocol):
    """Sums with its like and products with a number."""

    def __add__(self, other: Any, /) -> Any:
        """Sum."""

    def __sub__(self, other: Any, /) -> Any:
        """Difference."""

    def __rmul__(self, other: Any, /) -> Any:
        """Product with a number on the left."""


Latents = TypeVar("Latents", bound=Arithmetic)


def euler_step(x: Latents, velocity: Latents, sigma: float, sigma_next: float) -> Latents:
    """Follow the velocity to the next level (``FlowMatchEulerDiscreteScheduler``)."""
    following: Latents = x + (sigma_next - sigma) * velocity
    return following


def lcm_step(
    x: Latents,
    velocity: Latents,
    sigma: float,
    sigma_next: float,
    noise: Callable[[], Latents],
) -> Latents:
    """Jump to x0 and noise it afresh to the next level (``FlowMatchLCMScheduler``).

    ``noise`` is only called where ``sigma_next`` is above 0.
    """
    x0: Latents = x - sigma * velocity
    return x0 if sigma_next == 0.0 else add_noise(x0, noise(), sigma_next)


def add_noise(x0: Latents, noise: Latents, sigma: float) -> Latents:
    """Latents at level ``sigma``."""
    noisy: Latents = (1.0 - sigma) * x0 + sigma * noise
    return noisy
