"""Keys and values of past latent frames, per layer: sink + ring of un-roped keys.

One slot holds one latent frame. Keys are kept as they come out of the projection and given a
position when a chunk begins, in slot order, so positions never exceed the window and a rollout has
no length limit (relative RoPE: LongLive ``causal_model_infinity.py``, infinity-rope).

Shapes: B batch, S tokens, H heads, D head dimension; ``frame_tokens`` tokens make one frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longtake.errors import StateError


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Size of a cache; ``frames`` is the number of slots."""

    layers: int
    batch: int
    frames: int
    frame_tokens: int
    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotations by position: cos and sin of [frames, frame_tokens, head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: Sequence[int]) -> RopeTable:
        """Tables of the frames at ``positions``, as [tokens, 1, head_dim / 2]."""
        index = torch.tensor(list(positions), device=self.cos.device, dtype=torch.long)
        return RopeTable(*(t[index].flatten(0, 1).unsqueeze(1) for t in (self.cos, self.sin)))

    def rotate(self, x_BSHD: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate pairs of channels, as diffusers' Wan processor does."""
        x1, x2 = x_BSHD[..., 0::2], x_BSHD[..., 1::2]
        out = torch.empty_like(x_BSHD) if out is None else out
        out[..., 0::2] = x1 * self.cos - x2 * self.sin
        out[..., 1::2] = x1 * self.sin + x2 * self.cos
        return out


@dataclass(frozen=True, slots=True)
class CacheState:
    """What was in the cache at a moment: no tensors, only which slot held what."""

    frames: tuple[int | None, ...]
    writes: tuple[int, ...]


class KVCache:
    """The cache of one rollout. Per chunk: ``begin``, then any number of forwards.

    Args:
        shape, rope: sizes and rotations.
        dtype, device: of the buffers.
        means: keep the mean roped key of every past frame, for plans that rank frames.

    Attributes:
        begun: how often ``begin`` was called; what depends on what a chunk sees depends on this.
        recording: True in the clean pass, whose keys and values stay.
    """

    def __init__(
        self,
        shape: CacheShape,
        rope: RopeTable,
        *,
        dtype: torch.dtype,
        device: torch.device,
        means: bool = False,
    ) -> None:
        self.shape = shape
        self.rope = rope
        tokens = shape.frames * shape.frame_tokens
        size = (shape.layers, shape.batch, tokens, shape.heads, shape.head_dim)
        self._buffers = self._allocate(size, dtype, device)
        summary = (shape.layers, shape.batch, shape.frames if means else 0, shape.heads)
        self._means = torch.zeros((*summary, shape.head_dim), device=device)
        self._frames: list[int | None] = [None] * shape.frames
        self._writes = [0] * shape.frames
        # position that a slot's roped keys have; None where they are not those of its raw keys
        self._roped_at: list[int | None] = [None] * shape.frames
        self._own_slots: list[int] = []
        self._own_rope = rope.at([0])
        self._tokens = 0
        self.begun = 0
        self.recording = False

    @property
    def frames(self) -> tuple[int, ...]:
        """Latent frames that are in the cache, in increasing order."""
        return tuple(sorted(f for f in self._frames if f is not None))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.numel() * b.element_size() for b in (*self._buffers, self._means))

    @property
    def seen(self) -> tuple[int, ...]:
        """Latent frames that the chunk sees, own ones included, in the order of their slots."""
        used = self._frames[: self._tokens // self.shape.frame_tokens]
        return tuple(-1 if frame is None else frame for frame in used)

    @property
    def own(self) -> tuple[int, ...]:
        """The chunk's own latent frames."""
        return tuple(self.seen[slot] for slot in self._own_slots)

    def means(self, layer: int) -> torch.Tensor:
        """Mean roped key [B, slots, H, D] of each past frame in ``seen``; float32."""
        return self._means[layer, :, : self._tokens // self.shape.frame_tokens]

    def begin(self, past: Sequence[int], own: Sequence[int]) -> None:
        """Prepare a chunk: place its frames and give every key it sees its position.

        Args:
            past: latent frames to attend to, in slot order; they get positions 0, 1, ...
            own: the chunk's latent frames, at the positions after them. A frame that is in the
                cache already keeps its slot (its keys and values are made again).

        Raises:
            StateError: a past frame is no longer in the cache.
        """
        lost = sorted(set(past) - set(self._frames))
        if lost:
            raise StateError(f"latent frames {lost[:5]} are no longer in the KV cache")
        self._place(past, own)
        seen = [*past, *own]
        slot_of = {frame: slot for slot, frame in enumerate(self._frames)}
        position = {slot_of[frame]: place for place, frame in enumerate(seen)}
        self._own_slots = [slot_of[frame] for frame in own]
        self._own_rope = self.rope.at(range(len(past), len(seen)))
        self._tokens = len(seen) * self.shape.frame_tokens
        self.begun += 1
        for slot in self._own_slots:
            self._roped_at[slot] = None
        self._rotate_past({slot_of[frame]: position[slot_of[frame]] for frame in past})

    def exchange(
        self, layer: int, k_BSHD: torch.Tensor, v_BSHD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the chunk's own un-roped keys and values in place; return all that it sees.

        The noisy passes overwrite each other; with ``recording`` set (the clean pass) the un-roped
        keys are kept as well, for the chunks to come.
        """
        self._write(self._k[layer], self._own_rope.rotate(k_BSHD))
        self._write(self._v[layer], v_BSHD)
        if self.recording:
            self._write(self._raw_k[layer], k_BSHD)
            self._record(layer)
        return self._seen(self._k, layer), self._seen(self._v, layer)

    def rotate_query(self, q_BSHD: torch.Tensor) -> torch.Tensor:
        """Give the chunk's queries their positions."""
        return self._own_rope.rotate(q_BSHD)

    def snapshot(self) -> CacheState:
        """Remember the cache as it is; costs nothing and copies no tensor."""
        return CacheState(tuple(self._frames), tuple(self._writes))

    def restore(self, state: CacheState) -> None:
        """Go back to a snapshot. Frames whose slots were written since are gone.

        A chunk only overwrites frames that it does not see itself, so the chunk right after the
        snapshot can always be made again; ``begin`` raises if an older one is tried.
        """
        same = zip(state.frames, state.writes, self._writes, strict=True)
        self._frames = [frame if before == now else None for frame, before, now in same]

    def _place(self, past: Sequence[int], own: Sequence[int]) -> None:
        kept = {*past, *own}
        self._frames = [frame if frame in kept else None for frame in self._frames]
        missing = [frame for frame in own if frame not in self._frames]
        free = [slot for slot, frame in enumerate(self._frames) if frame is None]
        if len(missing) > len(free):
            need = len(past) + len(own)
            raise StateError(f"KV cache of {self.shape.frames} frames cannot hold {need}")
        for frame, slot in zip(missing, free, strict=False):
            self._frames[slot] = frame
        for slot, held in enumerate(self._frames):
            if held in own:
                self._writes[slot] += 1

    def _allocate(
        self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Make the buffers, each [layers, B, S, H, D]."""
        self._raw_k = torch.zeros(size, dtype=dtype, device=device)
        self._k = torch.zeros(size, dtype=dtype, device=device)
        self._v = torch.zeros(size, dtype=dtype, device=device)
        return self._raw_k, self._k, self._v

    def _rotate_past(self, positions: dict[int, int]) -> None:
        """Give the keys in these slots their positions, where they have other ones by now."""
        moved = [slot for slot in sorted(positions) if self._roped_at[slot] != positions[slot]]
        tokens = self.shape.frame_tokens
        for first, last in runs(moved):
            table = self.rope.at([positions[slot] for slot in range(first, last)])
            part = slice(first * tokens, last * tokens)
            for layer in range(self.shape.layers):
                table.rotate(self._raw_k[layer, :, part], self._k[layer, :, part])
                self._summarise(layer, first, last)
        for slot in moved:
            self._roped_at[slot] = positions[slot]

    def _record(self, layer: int) -> None:
        """The clean keys are roped already, at the chunk's own positions."""
        for first, last in runs(sorted(self._own_slots)):
            self._summarise(layer, first, last)
        if layer == self.shape.layers - 1:
            past = len(self.seen) - len(self._own_slots)
            for place, slot in enumerate(self._own_slots):
                self._roped_at[slot] = past + place

    def _summarise(self, layer: int, first: int, last: int) -> None:
        if self._means.shape[2] == 0:
            return
        tokens = self.shape.frame_tokens
        keys = self._k[layer, :, first * tokens : last * tokens].unflatten(1, (-1, tokens))
        self._means[layer, :, first:last] = keys.mean(2, dtype=torch.float32)

    def _write(self, buffer_BSHD: torch.Tensor, new_BSHD: torch.Tensor) -> None:
        """Copy the chunk's frames into their slots, neighbouring slots in one go."""
        tokens, place = self.shape.frame_tokens, 0
        for first, last in runs(self._own_slots):
            count = (last - first) * tokens
            target = buffer_BSHD[:, first * tokens : last * tokens]
            target.copy_(new_BSHD[:, place : place + count])
            place += count

    def _seen(self, buffer: torch.Tensor, layer: int) -> torch.Tensor:
        return buffer[layer, :, : self._tokens]


def runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring slots as ranges (first, last + 1), in the order given."""
    ranges: list[tuple[int, int]] = []
    for slot in slots:
        if ranges and ranges[-1][1] == slot:
            ranges[-1] = (ranges[-1][0], slot + 1)
        else:
            ranges.append((slot, slot + 1))
    return ranges
