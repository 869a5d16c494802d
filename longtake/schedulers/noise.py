"""Sigma schedules of flow matching: which noise levels a chunk passes through.

A latent at level ``sigma`` is ``(1 - sigma) * x0 + sigma * noise``; the model's timestep is
``1000 * sigma``. Every function returns the levels before each step and the final 0, so n steps
give n + 1 numbers. Sources: flow shift from SD3 (arXiv:2403.03206, eq. 23); warped few-step lists
from Self-Forcing (arXiv:2506.08009, ``denoising_step_list`` with ``warp_denoising_step``).
"""

from __future__ import annotations

from collections.abc import Sequence

TRAIN_TIMESTEPS = 1000


def shift_sigma(sigma: float, shift: float) -> float:
    """``shift * s / (1 + (shift - 1) * s)``: more time at high noise for ``shift`` > 1."""
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def uniform_sigmas(steps: int, shift: float) -> tuple[float, ...]:
    """``steps`` levels evenly spaced from 1, shifted, and the final 0."""
    return (*(shift_sigma(1.0 - i / steps, shift) for i in range(steps)), 0.0)


def warped_sigmas(timesteps: Sequence[float], shift: float) -> tuple[float, ...]:
    """A published list of timesteps (1000 .. 0) read as positions in a shifted table.

    A trailing 0 stands for the clean pass, as in Krea's list, and adds no step.
    """
    return (*(shift_sigma(t / TRAIN_TIMESTEPS, shift) for t in timesteps if t > 0), 0.0)


def listed_sigmas(timesteps: Sequence[float]) -> tuple[float, ...]:
    """A published list of timesteps used as it stands (CausVid); a trailing 0 adds no step."""
    return (*(t / TRAIN_TIMESTEPS for t in timesteps if t > 0), 0.0)


def from_strength(sigmas: Sequence[float], strength: float) -> tuple[float, ...]:
    """The part of a schedule below ``strength``, begun exactly there.

    1 keeps the whole schedule of a model that starts at pure noise; 0 leaves no step.
    """
    if strength >= sigmas[0]:
        return tuple(sigmas)
    if strength <= 0.0:
        return (0.0,)
    return (strength, *(sigma for sigma in sigmas if sigma < strength))
