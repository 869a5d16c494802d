"""Which latent frames are made, in what order, and what each chunk sees of the past."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """One chunk of a rollout; all numbers count latent frames.

    Attributes:
        index: position in the rollout, from 0.
        start: first latent frame.
        frames: how many latent frames are denoised together.
        keep: how many of them belong to the video (the last chunk is made whole, then trimmed).
        given: True where the latents come from an input and are only committed.
        past: latent frames that the chunk sees besides its own, in slot order.
    """

    index: int
    start: int
    frames: int
    keep: int
    given: bool
    past: tuple[int, ...]

    @property
    def own(self) -> tuple[int, ...]:
        """The chunk's latent frames."""
        return tuple(range(self.start, self.start + self.frames))


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Chunks of one video, made on demand so that a day of video costs nothing to plan.

    Attributes:
        latent_frames: length of the video.
        chunk: latent frames a chunk.
        first_chunk: latent frames of the first chunk, where the checkpoint wants another number.
        given: sizes of the chunks that come from an input, in order.
        window: most latent frames a query sees, sink and own chunk included; None for all.
        sink: first latent frames, never evicted.
    """

    latent_frames: int
    chunk: int
    first_chunk: int | None = None
    given: tuple[int, ...] = ()
    window: int | None = None
    sink: int = 0

    @property
    def count(self) -> int:
        """Number of chunks."""
        rest, count = self._after_given()
        if rest > 0 and not self.given and self.first_chunk is not None:
            rest, count = rest - self.first_chunk, count + 1
        return count + max(0, -(-rest // self.chunk))

    @property
    def capacity(self) -> int:
        """Most latent frames that are in the cache at once, own chunk included."""
        largest = max(self.chunk, self.first_chunk or 0, *self.given, 0)
        return self.total if self.window is None else min(max(self.window, largest), self.total)

    @property
    def total(self) -> int:
        """Latent frames that are made, those past the video's end included."""
        first = 0 if self.given else self.first_chunk or 0
        rest = max(0, self.latent_frames - sum(self.given) - first)
        return sum(self.given) + first + -(-rest // self.chunk) * self.chunk

    def __iter__(self) -> Iterator[ChunkSpec]:
        start = index = 0
        for frames in self._sizes():
            if start >= self.latent_frames:
                return
            keep = min(frames, self.latent_frames - start)
            given = index < len(self.given)
            yield ChunkSpec(index, start, frames, keep, given, self.past(start, frames))
            start, index = start + frames, index + 1

    def past(self, start: int, frames: int) -> tuple[int, ...]:
        """Latent frames before ``start`` that a chunk of ``frames`` sees: sink, then newest."""
        if self.window is None or start + frames <= self.window:
            return tuple(range(start))
        sink = min(self.sink, start)
        newest = max(0, self.window - sink - frames)
        return (*range(sink), *range(max(sink, start - newest), start))

    def _after_given(self) -> tuple[int, int]:
        return self.latent_frames - sum(self.given), len(self.given)

    def _sizes(self) -> Iterator[int]:
        yield from self.given
        if not self.given and self.first_chunk is not None:
            yield self.first_chunk
        while True:
            yield self.chunk


def latent_frames(num_frames: int, stride: int) -> int:
    """Latent frames of a video of ``num_frames`` = 1 + stride * k pixel frames."""
    return 1 + (num_frames - 1) // stride


def pixel_frames(latents: int, stride: int) -> int:
    """Pixel frames of ``latents`` latent frames; 0 of none."""
    return 1 + stride * (latents - 1) if latents > 0 else 0
