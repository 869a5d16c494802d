"""Block masks for FlexAttention: bands of queries, and the keys each band reads.

Every plan that leaves keys out has this form: all queries of a band read the same keys (one band
for ranked frames, a band for each part of a frame where the window shrinks with distance). So a
mask is one row of keys a band, never queries x keys.

FlexAttention: arXiv 2412.05496. Shapes: B batch, H heads, S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from longtake.errors import BackendError
from longtake.video.attention_flex import flex_function

BLOCK = 128  # side of a block of scores; what FlexAttention's kernels are made for


@dataclass(frozen=True, slots=True)
class BandMask:
    """Which keys each query reads.

    Attributes:
        band_of: [S_q] band of each query.
        keep: [B or 1, H or 1, bands, S_k], True where the band's queries read the key.
    """

    band_of: torch.Tensor
    keep: torch.Tensor

    @classmethod
    def of_frames(cls, slots_BHN: torch.Tensor, frames: int, tokens: int, queries: int) -> BandMask:
        """All queries read the same whole frames, others in each head.

        Args:
            slots_BHN: the frames, by slot.
            frames: how many slots there are, of ``tokens`` keys each.
            queries: number of queries.
        """
        keep = torch.zeros(*slots_BHN.shape[:2], frames, dtype=torch.bool, device=slots_BHN.device)
        keep = keep.scatter(2, slots_BHN, value=True).repeat_interleave(tokens, 2)
        band_of = torch.zeros(queries, dtype=torch.long, device=slots_BHN.device)
        return cls(band_of, keep.unsqueeze(2))

    @classmethod
    def of_bands(
        cls, keys: Sequence[torch.Tensor], count: int, parts: Sequence[slice], frames: int
    ) -> BandMask:
        """Queries of a band of every own frame read the keys listed for it.

        Args:
            keys: indices by band.
            count: number of keys.
            parts: of a frame's tokens, by band.
            frames: own frames.
        """
        device = keys[0].device
        keep = torch.zeros(1, 1, len(keys), count, dtype=torch.bool, device=device)
        for band, index in enumerate(keys):
            keep[0, 0, band, index] = True
        sizes = torch.tensor([part.stop - part.start for part in parts], device=device)
        band_of = torch.arange(len(parts), device=device).repeat_interleave(sizes)
        return cls(band_of.repeat(frames), keep)

    def dense(self) -> torch.Tensor:
        """The whole mask [B or 1, H or 1, S_q, S_k]; for small cases."""
        return self.keep[:, :, self.band_of]

    def blocks(self) -> BlockMask:
        """The mask by blocks: those that are read whole, and those that are read in part.

        Raises:
            BackendError: a query reads nothing.
        """
        if not bool(self.keep.any(-1).all()):
            raise BackendError("attention: a query whose keys are all masked has no answer")
        queries, keys = self.band_of.shape[0], self.keep.shape[-1]
        rows = -(-queries // BLOCK)
        padding = (0, -keys % BLOCK)
        # keys past the end are never there; in a full block they count as read
        some = functional.pad(self.keep, padding, value=False).unflatten(-1, (-1, BLOCK)).any(-1)
        every = functional.pad(self.keep, padding, value=False).unflatten(-1, (-1, BLOCK)).all(-1)
        filled = functional.pad(self.band_of, (0, rows * BLOCK - queries), value=-1)
        bands = torch.arange(self.keep.shape[2], device=self.keep.device)
        present = (filled.unflatten(0, (rows, BLOCK)).unsqueeze(-1) == bands).any(1)
        touched = (some.unsqueeze(2) & present[:, :, None]).any(3)
        whole = (every.unsqueeze(2) | ~present[:, :, None]).all(3)
        return BlockMask.from_kv_blocks(
            *_listed(touched & ~whole),
            *_listed(touched & whole),
            BLOCK_SIZE=BLOCK,
            mask_mod=self._mask_mod(),
            seq_lengths=(queries, keys),
        )

    def _mask_mod(self) -> Any:
        keep, band_of = self.keep, self.band_of
        shared_batch, shared_head = keep.shape[0] == 1, keep.shape[1] == 1

        def mask_mod(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
        ) -> torch.Tensor:
            return keep[b * 0 if shared_batch else b, h * 0 if shared_head else h, band_of[q], kv]

        return mask_mod


class FlexMasks:
    """FlexAttention with band masks; the last mask's blocks are kept for the next layer."""

    def __init__(self) -> None:
        self._run: Any = None
        self._last: tuple[BandMask, BlockMask] | None = None

    def attend(
        self, q_BSHD: torch.Tensor, k_BSHD: torch.Tensor, v_BSHD: torch.Tensor, mask: BandMask
    ) -> torch.Tensor:
        """Attention of each query to the keys that its band reads."""
        if self._run is None:
            self._run = flex_function(q_BSHD.device)
        if self._last is None or self._last[0] is not mask:
            self._last = (mask, mask.blocks())
        out: torch.Tensor = self._run(q_BSHD, k_BSHD, v_BSHD, self._last[1]).out
        return out


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number and places of the true blocks of each row; the rest of the list is not read."""
    count = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return count, order.to(torch.int32)
