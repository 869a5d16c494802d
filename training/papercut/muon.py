"""Muon in fp32: orthogonalised momentum for matrices (Jordan et al., 2024), shared over processes.

Equally shaped matrices go through Newton-Schulz as one batch; each process does its share of them
and one all-reduce hands the updates round. ``torch.optim.Muon`` works in bf16, which is hopeless
on CPUs without bf16 units.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Push the singular values of a batch of wide matrices towards one."""
    x: Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x


class Muon:
    """The optimizer; its learning rate is set from outside before each step."""

    def __init__(
        self, parameters: list[Tensor], *, momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        self.parameters = parameters
        self.momentum, self.decay = momentum, decay
        self.rate = 0.0
        self.buffers = [torch.zeros_like(parameter) for parameter in parameters]
        shapes: dict[tuple[int, int], list[int]] = {}
        for index, parameter in enumerate(parameters):
            low, high = sorted(parameter.shape)
            shapes.setdefault((low, high), []).append(index)
        self.families = list(shapes.values())

    def state_dict(self) -> dict[str, Any]:
        """Momentum buffers."""
        return {"buffers": self.buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take saved momentum buffers."""
        for mine, saved in zip(self.buffers, state["buffers"], strict=True):
            mine.copy_(saved)

    @torch.no_grad()
    def step(self, rank: int, size: int) -> None:
        """Update all parameters from their averaged gradients."""
        updates = [torch.zeros_like(parameter) for parameter in self.parameters]
        for family in self.families:
            mine = family[rank::size]
            if not mine:
                continue
            made = orthogonalise(torch.stack([self._direction(index) for index in mine]))
            for index, update in zip(mine, made, strict=True):
                updates[index] = update.T if self._tall(index) else update
        if size > 1:
            flat = torch.cat([update.flatten() for update in updates])
            dist.all_reduce(flat)
            parts = flat.split([update.numel() for update in updates])
            updates = [part.view_as(update) for part, update in zip(parts, updates, strict=True)]
        for index, (parameter, update) in enumerate(zip(self.parameters, updates, strict=True)):
            gradient = parameter.grad
            if gradient is not None:
                self.buffers[index].lerp_(gradient, 1 - self.momentum)
            parameter.mul_(1 - self.rate * self.decay)
            parameter.add_(update, alpha=-self.rate * 0.2 * max(parameter.shape) ** 0.5)

    def _tall(self, index: int) -> bool:
        rows, columns = self.parameters[index].shape
        return rows > columns

    def _direction(self, index: int) -> Tensor:
        gradient = self.parameters[index].grad
        buffer = self.buffers[index]
        if gradient is None:
            return buffer.T if self._tall(index) else buffer
        blended = buffer.lerp(gradient, 1 - self.momentum)
        nesterov = gradient.lerp(blended, self.momentum)
        return nesterov.T if self._tall(index) else nesterov
