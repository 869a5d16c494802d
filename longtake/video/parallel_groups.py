"""Ranks and what they send each other: own collectives over torch.distributed, every byte counted.

NCCL between CUDA devices, gloo between CPU processes. Shares may differ in size, so nothing is
padded. Control never travels with data: rank 0 tells the others one integer at a time over a gloo
group of its own, and a rank that waits there can always be told that the attempt is over.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from longtake.errors import ParallelError
from longtake.video.parallel_layout import Layout, Place

# told in place of a stop flag: an attempt begins (and how many chunks are stored), or is over
OVER = -1


@dataclass(frozen=True, slots=True)
class Limits:
    """How long ranks wait for each other before they take it that one is lost.

    The service derives them from its own limits (``EngineSettings.of``); these are for commands.

    Attributes:
        start_s: until all have met.
        data_s: for one exchange of data, which waits for the slowest rank's share of a step.
        control_s: for what rank 0 says next, while it loads a model, decodes or writes files.
    """

    start_s: float = 300.0
    data_s: float = 1800.0
    control_s: float = 7200.0


COMMAND_LIMITS = Limits()


class Abandoned(Exception):
    """Rank 0 has left the attempt; ``told`` is what it said instead of going on."""

    def __init__(self, told: int) -> None:
        super().__init__("rank 0 has left the attempt")
        self.told = told


@contextmanager
def _reaching_others() -> Iterator[None]:
    """Name what a backend only calls a RuntimeError: another rank is gone or does not answer."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ParallelError(f"another rank is gone or does not answer: {error}") from error


class Group:
    """Some ranks that exchange tensors. Of one rank, every method hands back what it was given.

    Attributes:
        size, index: how many there are, and which of them this one is.
        sent: bytes that this rank has sent to others.
    """

    def __init__(self, ranks: Sequence[int], handle: Any) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.index = self.ranks.index(dist.get_rank()) if self.size > 1 else 0
        self.sent = 0
        self._handle = handle
        self._given, self._came = Buffer(), Buffer()
        self._out = torch.empty(0)
        self._sizes: list[int] = []

    def exchange(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[torch.Tensor]:
        """Give ``parts[i]`` to rank i of the group; from it comes a tensor of ``shapes[i]``.

        What comes is used or copied before the group's next exchange, which writes over it.
        """
        if self.size == 1:
            return [parts[0]]
        slots = self.outgoing([part.shape for part in parts], parts[0])
        for slot, part in zip(slots, parts, strict=True):
            slot.copy_(part)
        counts = [torch.Size(shape).numel() for shape in shapes]
        pieces = self.trade(counts).split(counts)
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def outgoing(
        self, shapes: Sequence[tuple[int, ...]], like: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Where to write what ``trade`` gives to each rank: one tensor of each shape."""
        self._sizes = [torch.Size(shape).numel() for shape in shapes]
        self._out = self._given.take(sum(self._sizes), like)
        slots = self._out.split(self._sizes)
        return tuple(slot.view(shape) for slot, shape in zip(slots, shapes, strict=True))

    def trade(self, counts: Sequence[int]) -> torch.Tensor:
        """Send what was written to ``outgoing``; ``counts[i]`` numbers from rank i, in one row.

        Used or copied before the next exchange, as in ``exchange``.
        """
        incoming = self._came.take(sum(counts), self._out)
        with _reaching_others():
            dist.all_to_all_single(
                incoming, self._out, list(counts), self._sizes, group=self._handle
            )
        others = self._out.numel() - self._sizes[self.index]
        self.sent += others * self._out.element_size()
        return incoming

    def gather(self, part: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Every rank's part, in the group's order; ``shapes`` are theirs."""
        return self.exchange([part] * self.size, shapes)

    def pass_on(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> Passing:
        """Start sending to the next rank what the rank before this one sends in ``shape``."""
        incoming = tensor.new_empty(shape)
        to, source = ((self.index + step) % self.size for step in (1, -1))
        with _reaching_others():
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, tensor, self.ranks[to], self._handle),
                    dist.P2POp(dist.irecv, incoming, self.ranks[source], self._handle),
                ]
            )
        self.sent += tensor.numel() * tensor.element_size()
        return Passing(works, tensor, incoming)

    def swap(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """Exchange tensors of one shape with one rank of the group."""
        incoming = torch.empty_like(tensor)
        # the lower one sends first where sends and receives are matched in order
        mine = dist.P2POp(dist.isend, tensor, self.ranks[rank], self._handle)
        other = dist.P2POp(dist.irecv, incoming, self.ranks[rank], self._handle)
        with _reaching_others():
            for work in dist.batch_isend_irecv([mine, other]):
                work.wait()
        self.sent += tensor.numel() * tensor.element_size()
        return incoming


class Buffer:
    """Memory that is used again: fresh pages cost a CPU as much as what is written to them."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """``count`` numbers of the type and on the device of ``like``, of any value."""
        size = count * like.element_size()
        if self._bytes.numel() < size or self._bytes.device != like.device:
            # written to in and out of inference mode
            with torch.inference_mode(False):
                self._bytes = torch.empty(size, dtype=torch.uint8, device=like.device)
        return self._bytes[:size].view(like.dtype)


class Passing:
    """A tensor on its way round; it must not be written to before ``arrived``."""

    def __init__(
        self, works: Sequence[Any], outgoing: torch.Tensor, incoming: torch.Tensor
    ) -> None:
        self._works, self._outgoing, self._incoming = works, outgoing, incoming

    def arrived(self) -> torch.Tensor:
        """Wait until both directions are through; what came."""
        with _reaching_others():
            for work in self._works:
                work.wait()
        return self._incoming


class Ranks:
    """All ranks of this run, this one among them.

    Args:
        rank, size: which one this is, of how many.
        store: where ranks find each other, as ``torch.distributed`` takes it; None reads the
            environment (torchrun's variables).
        device: this rank's device.
        limits: how long it waits for others.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        device: torch.device,
        limits: Limits = COMMAND_LIMITS,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._limit = timedelta(seconds=limits.data_s)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        where: dict[str, Any] = {"init_method": "env://"} if store is None else {"store": store}
        dist.init_process_group(
            self.backend,
            rank=rank,
            world_size=size,
            timeout=self._limit,
            **where,
        )
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=limits.control_s))
        self._told = torch.tensor([OVER])
        self._groups: dict[tuple[int, ...], Group] = {}
        self.world = self._group(range(size))

    @property
    def leader(self) -> bool:
        """True for rank 0, which alone reports, stores and encodes."""
        return self.rank == 0

    @property
    def sent(self) -> int:
        """Bytes of data that this rank has sent so far."""
        return sum(group.sent for group in self._groups.values())

    def agree(self, value: int) -> int:
        """Rank 0's value on every rank.

        Raises:
            Abandoned: rank 0 said something negative: it is elsewhere by now.
        """
        told = self.hear(value)
        if told < 0 and not self.leader:
            raise Abandoned(told)
        return told

    def hear(self, value: int = 0) -> int:
        """Rank 0's value on every rank, whatever it is.

        Raises:
            ParallelError: rank 0 is gone, or says nothing for too long.
        """
        if self.size == 1:
            return value
        number = torch.tensor([value], dtype=torch.int64)
        with _reaching_others():
            dist.broadcast(number, 0, group=self._control)
        return int(number)

    def leave(self) -> None:
        """Rank 0: the attempt is over. Does not wait: the others may be past hearing it."""
        if self.size > 1:
            self._told = torch.tensor([OVER], dtype=torch.int64)
            dist.broadcast(self._told, 0, group=self._control, async_op=True)

    def stop_flag(self, stopping: Callable[[], bool]) -> Callable[[], bool]:
        """A stop flag that all ranks see alike: rank 0's."""
        return lambda: bool(self.agree(int(stopping()) if self.leader else 0))

    def check_same(self, what: str, number: int) -> None:
        """Refuse to go on where ranks would do different things (``number`` is not negative).

        Raises:
            ParallelError: this rank has another number than rank 0.
        """
        if self.agree(number) != number:
            raise ParallelError(f"rank {self.rank} has another {what} than rank 0")

    def groups(self, layout: Layout) -> dict[str, Group]:
        """This rank's groups of a layout: ulysses, ring, cfg and frame (ulysses x ring).

        All ranks must ask for the same layouts in the same order.
        """
        degrees = {"ulysses": layout.ulysses, "ring": layout.ring, "cfg": layout.cfg}
        varying = {**{name: (name,) for name in degrees}, "frame": ("ring", "ulysses")}
        return {name: self._along(layout, degrees, axes) for name, axes in varying.items()}

    def close(self) -> None:
        """Leave; the others may go on only to leave as well."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _along(self, layout: Layout, degrees: dict[str, int], axes: tuple[str, ...]) -> Group:
        """The group in which these indices vary and the others are this rank's."""
        fixed = [name for name in degrees if name not in axes]
        mine = layout.place(self.rank)
        found: Group | None = None
        for values in product(*(range(degrees[name]) for name in fixed)):
            at = dict(zip(fixed, values, strict=True))
            members = [
                layout.rank(Place(**at, **dict(zip(axes, indices, strict=True))))
                for indices in product(*(range(degrees[name]) for name in axes))
            ]
            group = self._group(members)
            if all(getattr(mine, name) == value for name, value in at.items()):
                found = group
        if found is None:
            raise ParallelError(f"rank {self.rank} has no place in {layout.text}")
        return found

    def _group(self, members: Sequence[int]) -> Group:
        """Groups are made by all ranks together, once each."""
        key = tuple(members)
        if key not in self._groups:
            if len(key) == self.size:
                handle = dist.group.WORLD
            elif len(key) > 1:
                handle = dist.new_group(list(key), timeout=self._limit)
            else:
                handle = None
            inside = self.rank in key
            self._groups[key] = Group(key, handle) if inside else _Outside()
        return self._groups[key]


class _Outside(Group):
    """A group of other ranks."""

    def __init__(self) -> None:
        self.ranks, self.size, self.index, self.sent = (), 0, -1, 0


def under_launcher() -> bool:
    """True where torchrun (or another launcher that sets its variables) started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
