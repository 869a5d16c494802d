"""Two single-thread processes on a CPU, one on a GPU: launching, averaging and keeping time.

On two shared cores two processes with one gloo all-reduce a step beat two threads of one process
(prototype README, "Machine figures"), so that is what every training here does.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

CHECKPOINT_S = 180.0
LONGEST_STEP_S = 60.0  # what passes beyond it was a pause, not training


@dataclass(frozen=True, slots=True)
class Group:
    """This process's place among the training's processes."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """True for the one process that logs and saves."""
        return self.rank == 0

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the processes, in place, in one message."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.size
        for tensor, part in zip(
            tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(part.view_as(tensor))

    def agree(self, value: float) -> float:
        """The leader's value, in every process: decisions about time must not differ."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, 0)
        return float(shared)

    def wait(self) -> None:
        """Return once every process is here."""
        if self.size > 1:
            dist.barrier()


Worker = Callable[[Group, Any], None]


def launch(
    worker: Worker, options: Any, *, device: str = "auto", processes: int | None = None
) -> None:
    """Run ``worker(group, options)``: one process on a GPU, one a core (at most 2) on a CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cores = os.cpu_count() or 1
    size = processes or (1 if device != "cpu" else min(2, cores))
    threads = max(1, min(cores, 8) // size)
    if size == 1:
        _enter(0, 1, 0, threads, device, worker, options)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(  # type: ignore[attr-defined, no-untyped-call]
        _enter, (size, port, threads, device, worker, options), nprocs=size
    )


def _enter(
    rank: int, size: int, port: int, threads: int, device: str, worker: Worker, options: Any
) -> None:
    torch.set_num_threads(threads)
    log_to_stderr()
    if size > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    worker(Group(rank, size, torch.device(device)), options)
    if size > 1:
        dist.destroy_process_group()


def log_to_stderr() -> None:
    """One line an event, with the time of day."""
    shape = "%(asctime)s %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=shape, datefmt="%H:%M:%S")


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that a cut never leaves half a file."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def clip_gradients(parameters: Sequence[Tensor], ceiling: float) -> float:
    """Clip the joint norm of the gradients; returns the norm before."""
    return float(torch.nn.utils.clip_grad_norm_(parameters, ceiling))
