"""Sigma schedules against published numbers, diffusers and the closed form."""

from __future__ import annotations

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler

from longtake.schedulers.noise import (
    from_strength,
    listed_sigmas,
    shift_sigma,
    uniform_sigmas,
    warped_sigmas,
)

# facts of the published systems: list, warp, shift -> timesteps the model really sees
PUBLISHED = {
    "Self-Forcing": (warped_sigmas([1000, 750, 500, 250], 5.0), [1000, 937.5, 833.333, 625]),
    "Rolling Forcing": (
        warped_sigmas([1000, 800, 600, 400, 200], 5.0),
        [1000, 952.381, 882.353, 769.231, 555.556],
    ),
    "CausVid": (listed_sigmas([1000, 757, 522, 0]), [1000, 757, 522]),
    "Krea": (
        warped_sigmas([1000, 750, 500, 250, 0], 5.0),
        [1000, 937.5, 833.333, 625],
    ),
    "Self-Forcing at shift 8": (
        warped_sigmas([1000, 750, 500, 250], 8.0),
        [1000, 960, 888.889, 727.273],
    ),
}


@pytest.mark.parametrize("system", PUBLISHED)
def test_published_timesteps(system: str) -> None:
    sigmas, timesteps = PUBLISHED[system]
    assert [1000 * s for s in sigmas[:-1]] == pytest.approx(timesteps, abs=1e-3)
    assert sigmas[-1] == 0.0


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("steps", [1, 4, 7])
def test_uniform_levels_equal_diffusers(steps: int, shift: float) -> None:
    even = [1 - i / steps for i in range(steps)]
    for scheduler in (
        FlowMatchLCMScheduler(shift=shift),
        FlowMatchEulerDiscreteScheduler(shift=shift),
    ):
        scheduler.set_timesteps(sigmas=even)
        assert scheduler.sigmas.tolist() == pytest.approx(uniform_sigmas(steps, shift), abs=1e-6)


def test_shift_closed_form() -> None:
    assert shift_sigma(1.0, 5.0) == 1.0
    assert shift_sigma(0.0, 5.0) == 0.0
    assert shift_sigma(0.5, 1.0) == 0.5
    assert shift_sigma(0.75, 5.0) == pytest.approx(0.9375)


def test_strength_begins_exactly_there() -> None:
    sigmas = uniform_sigmas(4, 3.0)
    assert from_strength(sigmas, 1.0) == sigmas
    assert from_strength(sigmas, 0.6) == (0.6, 0.5, 0.0)
    assert from_strength(sigmas, 0.5) == (0.5, 0.0)
    assert from_strength(sigmas, 0.0) == (0.0,)
