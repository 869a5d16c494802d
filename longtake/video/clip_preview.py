"""A picture of a clip while it is made: its middle, as denoising leaves it to be expected.

Two successive latents of a flow point at the clean ones: x(sigma) = x0 + sigma v, with v their
difference over that of their sigmas. Exact for the euler step, near enough for others. One latent
frame is decoded, by the pipeline's own VAE; nothing is drawn, so the clip stays what it would be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DIMENSIONS = 5  # [1, C, F, h, w]


class ClipPictures:
    """Remembers the latents of the step before; of one run, for Wan's pipelines."""

    def __init__(self) -> None:
        self._before: torch.Tensor | None = None

    def after(self, pipeline: Any, step: int, latents: Any) -> Callable[[], Any] | None:
        """What makes a picture [1, H, W, 3] (uint8) once ``step`` steps are done.

        None where there cannot be one: after the first step, and of other families.
        """
        known = type(pipeline).__name__.startswith("Wan") and isinstance(latents, torch.Tensor)
        if not known or latents.ndim != DIMENSIONS:
            return None
        before, self._before = self._before, latents
        if before is None or step >= len(pipeline.scheduler.sigmas):
            return None
        return lambda: _decoded(pipeline.vae, _expected(pipeline.scheduler, step, before, latents))


def _expected(
    scheduler: Any, step: int, before: torch.Tensor, latents: torch.Tensor
) -> torch.Tensor:
    """The middle latent frame at sigma 0: [1, C, 1, h, w] in float32."""
    middle = latents.shape[2] // 2
    was, now = (each[:, :, middle : middle + 1].float() for each in (before, latents))
    sigma_was, sigma_now = (float(scheduler.sigmas[place]) for place in (step - 1, step))
    if sigma_was == sigma_now:
        return now
    return now - sigma_now * (now - was) / (sigma_now - sigma_was)


@torch.no_grad()
def _decoded(vae: Any, latents: torch.Tensor) -> Any:
    shape = (1, -1, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean, device=latents.device).view(shape)
    std = torch.tensor(vae.config.latents_std, device=latents.device).view(shape)
    video = vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0]
    pixels = ((video[0].float() / 2 + 0.5) * 255).round().clamp(0, 255)
    return pixels.permute(1, 2, 3, 0).to(torch.uint8).cpu().numpy()
