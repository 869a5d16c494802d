"""Sampler steps against diffusers' schedulers, given the same noise."""

from __future__ import annotations

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler

from longtake.schedulers.noise import uniform_sigmas, warped_sigmas
from longtake.schedulers.samplers import add_noise, euler_step, lcm_step

SHAPE = (1, 4, 3, 6, 8)


def velocity_of(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """A fixed, smooth stand-in for a model."""
    return torch.sin(3 * x) + sigma


@pytest.mark.parametrize(("steps", "shift"), [(4, 3.0), (7, 5.0)])
def test_euler_equals_diffusers(steps: int, shift: float) -> None:
    sigmas = uniform_sigmas(steps, shift)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = velocity_of(x, sigmas[step])
        ours = euler_step(x, velocity, sigmas[step], sigmas[step + 1])
        x = scheduler.step(velocity, timestep, x, return_dict=False)[0]
        assert (ours - x).abs().max() <= 1e-6


def test_lcm_equals_diffusers_given_the_same_noise() -> None:
    sigmas = warped_sigmas([1000, 750, 500, 250], 5.0)
    scheduler = FlowMatchLCMScheduler(shift=5.0)
    scheduler.set_timesteps(4, sigmas=[1.0, 0.75, 0.5, 0.25])
    mine, other = (torch.Generator().manual_seed(3) for _ in range(2))
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = velocity_of(x, sigmas[step])
        pair = sigmas[step], sigmas[step + 1]
        ours = lcm_step(x, velocity, *pair, lambda: torch.randn(SHAPE, generator=mine))
        x = scheduler.step(velocity, timestep, x, other, return_dict=False)[0]
        assert (ours - x).abs().max() <= 1e-6


def test_lcm_draws_no_noise_for_the_last_step() -> None:
    def refuse() -> float:
        raise AssertionError("noise was drawn")

    assert lcm_step(1.0, 0.5, 0.4, 0.0, refuse) == pytest.approx(0.8)


def test_add_noise_ends() -> None:
    assert add_noise(2.0, 5.0, 0.0) == 2.0
    assert add_noise(2.0, 5.0, 1.0) == 5.0
