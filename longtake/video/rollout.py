"""The main loop: for every chunk denoise, commit to the cache, decode, yield.

Latents are the truth: a chunk's clean latents, the seed and the plan determine the rest. The caller
owns input and output; nothing here touches a file.

Shapes: B batch (1), C channels, F latent frames, h w latent size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from longtake.errors import DecodeMemoryError, ResumeError
from longtake.schedulers.chunks import ChunkSpec
from longtake.schedulers.samplers import add_noise, euler_step, lcm_step
from longtake.video.attention_reader import Reader
from longtake.video.causal_wan import Session, TextCache
from longtake.video.codec import DecoderState, StreamingDecoder, to_uint8
from longtake.video.components import CausalModel
from longtake.video.kv_cache import CacheState
from longtake.video.memory import is_out_of_memory
from longtake.video.numerics import draw_noise
from longtake.video.plan import Plan

StopFlag = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Progress: ``step`` of ``steps`` denoising steps of chunk ``chunk`` of ``chunks`` is done.

    ``picture`` makes one of the video as far as it is, [1, H, W, 3] uint8, where that can be done.
    """

    chunk: int
    chunks: int
    step: int
    steps: int
    picture: Callable[[], Any] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Denoised:
    """A chunk before VAE decode: the latents that all the rest follows from.

    Attributes: as of ``Chunk``.
    """

    spec: ChunkSpec
    latents: torch.Tensor
    prompt: int
    attempt: int
    reused: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """One finished chunk.

    Attributes:
        spec: where it stands in the video.
        latents: clean latents [1, C, F, h, w] in the compute dtype, the whole chunk untrimmed.
        frames: decoded pixels [T, H, W, 3], uint8, trimmed to the video.
        prompt: index into the plan's prompts.
        attempt: how often the chunk had been made before.
        reused: True if the latents were stored earlier and not made now.
        timings: seconds for denoise, clean and decode.
    """

    spec: ChunkSpec
    latents: torch.Tensor
    frames: torch.Tensor
    prompt: int
    attempt: int
    reused: bool
    timings: dict[str, float]


@dataclass(frozen=True, slots=True)
class RolloutState:
    """State between two chunks: indices and references, no copies of tensors."""

    chunk: int
    cache: CacheState
    decoder: DecoderState
    prompt: int
    text: TextCache
    recent: dict[int, torch.Tensor]


OnStep = Callable[[StepEvent], None]
OnLatents = Callable[[Denoised], None]


class _Stopped(Exception):
    """The stop flag was raised between two denoising steps."""


class Rollout:
    """One video being made. ``make_chunk`` advances it; ``snapshot`` and ``restore`` go back.

    Args:
        plan: what to make.
        model: loaded components.
        inputs: clean latents [1, C, F, h, w] of a start image or clip, as the plan's input kind
            needs them.
        reader: reads the cache in place of the plan's own.
    """

    def __init__(
        self,
        plan: Plan,
        model: CausalModel,
        inputs: torch.Tensor | None = None,
        reader: Reader | None = None,
    ) -> None:
        self.plan = plan
        self._model = model
        self._inputs = inputs
        self._decoder = StreamingDecoder(model.vae)
        self._specs = list(plan.chunks)
        self._prompt = 0
        reader = reader or model.wan.reader(plan.reading)
        means = reader is not None and reader.ranks
        batch, frames = 2 if plan.guided else 1, plan.layout.capacity
        cache = model.wan.new_cache(
            batch, frames, plan.latent_shape[1:], means=means, storage=plan.kv_cache
        )
        self._session = Session(cache, self._text(0), reader)
        self._switch_at = {s.chunk: i for i, s in enumerate(plan.switches, start=1)}
        self._recent: dict[int, torch.Tensor] = {}
        self._chunk = 0

    @property
    def finished(self) -> bool:
        """True after the last chunk."""
        return self._chunk >= len(self._specs)

    def make_chunk(
        self,
        stored: torch.Tensor | None = None,
        *,
        attempt: int = 0,
        stop: StopFlag | None = None,
        on_start: OnStep | None = None,
        on_step: OnStep | None = None,
        on_latents: OnLatents | None = None,
    ) -> Chunk | None:
        """Make the next chunk, or None if ``stop`` was raised meanwhile.

        Args:
            stored: clean latents made earlier: nothing is denoised, only committed and decoded.
            attempt: another number draws other noise.
            stop: read before every denoising step, and before VAE decode where ``on_latents``
                has taken the latents.
            on_start: told before every denoising step, how many are done.
            on_step: told after every denoising step.
            on_latents: given the chunk's latents before VAE decode.

        Raises:
            DecodeMemoryError: no memory for VAE decode; making the chunk again from its latents
                goes on from there.
        """
        self._enter()
        spec = self._specs[self._chunk]
        started = perf_counter()
        known = self._known(spec) if stored is None else self._checked(spec, stored)
        if known is not None and stop is not None and stop():
            return None
        self._session.cache.begin(spec.past, spec.own)
        try:
            latents = known
            if latents is None:
                latents = self._denoise(spec, attempt, (stop, on_start, on_step))
        except _Stopped:
            return None
        self._sync()
        denoised = perf_counter()
        self._commit(spec, latents, attempt)
        self._sync()
        committed = perf_counter()
        made = Denoised(spec, latents, self._prompt, attempt, stored is not None or spec.given)
        if on_latents is not None:
            on_latents(made)
            if stop is not None and stop():
                return None
        taken = perf_counter()
        frames = self._decode(spec, latents)
        timings = {
            "denoise": denoised - started,
            "clean": committed - denoised,
            "decode": perf_counter() - taken,
        }
        self._chunk += 1
        return Chunk(spec, latents, frames, made.prompt, attempt, made.reused, timings)

    def snapshot(self) -> RolloutState:
        """Remember the state before the next chunk, its prompt switch included."""
        self._enter()
        return RolloutState(
            chunk=self._chunk,
            cache=self._session.cache.snapshot(),
            decoder=self._decoder.snapshot(),
            prompt=self._prompt,
            text=self._session.text,
            recent=dict(self._recent),
        )

    def restore(self, state: RolloutState) -> None:
        """Go back to a snapshot, at most one chunk old (StateError at the next chunk if older)."""
        self._chunk = state.chunk
        self._session.cache.restore(state.cache)
        self._decoder.restore(state.decoder)
        self._prompt = state.prompt
        self._session.text = state.text
        self._recent = dict(state.recent)

    def _text(self, prompt: int) -> TextCache:
        texts = [self.plan.prompts[prompt]]
        if self.plan.guided:
            texts.append(self.plan.negative_prompt)
        embeddings = [self._model.embed(text) for text in texts]
        return self._model.wan.encode_text(embeddings, self.plan.text_length)

    def _known(self, spec: ChunkSpec) -> torch.Tensor | None:
        """Latents of a chunk that is not denoised: given, or redrawn with strength 0."""
        if spec.given or (self.plan.input_kind == "redraw" and self.plan.steps == 0):
            return self._input(spec)
        return None

    def _input(self, spec: ChunkSpec) -> torch.Tensor:
        """The input's latents of a chunk; past its end the last frame stands in (trimmed away)."""
        if self._inputs is None:
            raise ResumeError(f"chunk {spec.index} comes from an input, and there is none")
        last = self._inputs.shape[2] - 1
        index = torch.tensor([min(frame, last) for frame in spec.own], device=self._inputs.device)
        return self._place(self._inputs[:, :, index])

    def _checked(self, spec: ChunkSpec, stored: torch.Tensor) -> torch.Tensor:
        expected = self._shape(spec.frames)
        if tuple(stored.shape) != expected or stored.dtype != self._model.wan.dtype:
            got = f"{list(stored.shape)} {stored.dtype}"
            wanted = f"{list(expected)} {self._model.wan.dtype}"
            raise ResumeError(f"chunk {spec.index}: got latents {got}, expected {wanted}")
        return self._place(stored)

    def _denoise(
        self,
        spec: ChunkSpec,
        attempt: int,
        told: tuple[StopFlag | None, OnStep | None, OnStep | None],
    ) -> torch.Tensor:
        stop, on_start, on_step = told
        sigmas = self.plan.sigmas
        x = self._noise(spec, attempt, "start")
        if self.plan.input_kind == "redraw":
            x = add_noise(self._input(spec).float(), x, sigmas[0])
        for step in range(self.plan.steps):
            if stop is not None and stop():
                raise _Stopped
            if on_start is not None:
                on_start(StepEvent(spec.index, len(self._specs), step, self.plan.steps))
            self._session.step = step
            velocity = self._velocity(x, sigmas[step])
            if self.plan.sampler == "euler":
                x = euler_step(x, velocity, sigmas[step], sigmas[step + 1])
            else:
                x = lcm_step(
                    x,
                    velocity,
                    sigmas[step],
                    sigmas[step + 1],
                    lambda use=f"step-{step}": self._noise(spec, attempt, use),  # type: ignore[misc]
                )
            if on_step is not None:
                on_step(StepEvent(spec.index, len(self._specs), step + 1, self.plan.steps))
        return x.to(self._model.wan.dtype)

    def _velocity(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        """The model's velocity, guided where the plan says so: u + g * (c - u)."""
        if not self.plan.guided:
            return self._model.wan.forward(self._session, x, sigma)
        both = self._model.wan.forward(self._session, torch.cat([x, x]), sigma)
        prompted, unprompted = both.chunk(2)
        return unprompted + self.plan.guidance_scale * (prompted - unprompted)

    def _commit(self, spec: ChunkSpec, latents: torch.Tensor, attempt: int) -> None:
        """The clean pass: leaves the chunk's clean keys and values in the cache."""
        self._clean_pass(latents, lambda: self._noise(spec, attempt, "context"))
        if self.plan.recache:
            cached = self._session.cache.frames
            self._recent = {f: x for f, x in self._recent.items() if f in cached}
            self._recent |= {f: latents[:, :, place] for place, f in enumerate(spec.own)}

    def _decode(self, spec: ChunkSpec, latents: torch.Tensor) -> torch.Tensor:
        """Pixels [T, H, W, 3] of what the video shows of a chunk."""
        try:
            frames = to_uint8(self._decoder.decode(latents[:, :, : spec.keep]))[0]
            self._sync()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise DecodeMemoryError(spec.index) from error
            raise
        return frames

    def _clean_pass(self, latents: torch.Tensor, noise: Callable[[], torch.Tensor]) -> None:
        x = latents.float()
        if self.plan.context_noise_added and self.plan.context_noise > 0:
            x = add_noise(x, noise(), self.plan.context_noise)
        x = torch.cat([x, x]) if self.plan.guided else x
        cache, self._session.step = self._session.cache, None
        cache.recording = True
        try:
            self._model.wan.forward(self._session, x, self.plan.context_noise)
        finally:
            cache.recording = False

    def _enter(self) -> None:
        """Switch the prompt if the next chunk has another one; does nothing the second time."""
        prompt = self._switch_at.get(self._chunk)
        if prompt is None or prompt == self._prompt:
            return
        self._prompt = prompt
        self._session.text = self._text(prompt)
        if self.plan.recache:
            self._recache()

    def _recache(self) -> None:
        """Compute the cached frames anew under the new prompt; the sink stays.

        LongLive 1 ``_recache_after_switch``: one forward at the context noise over all frames that
        are in the cache, bidirectional among them.
        """
        cached = self._session.cache.frames
        sink = tuple(frame for frame in cached if frame < self.plan.layout.sink)
        recent = cached[len(sink) :]
        if not recent:
            return
        latents = torch.stack([self._recent[frame] for frame in recent], dim=2)
        self._session.cache.begin(sink, recent)
        shape = tuple(latents.shape)
        self._clean_pass(latents, lambda: self._draw(shape, self._chunk, 0, "recache"))

    def _noise(self, spec: ChunkSpec, attempt: int, use: str) -> torch.Tensor:
        return self._draw(self._shape(spec.frames), spec.index, attempt, use)

    def _draw(self, shape: tuple[int, ...], chunk: int, attempt: int, use: str) -> torch.Tensor:
        return draw_noise(shape, self.plan.seed, chunk, attempt, use).to(self._model.device)

    def _shape(self, frames: int) -> tuple[int, ...]:
        channels, high, wide = self.plan.latent_shape
        return 1, channels, frames, high, wide

    def _place(self, latents: torch.Tensor) -> torch.Tensor:
        return latents.to(self._model.device, self._model.wan.dtype)

    def _sync(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)


def rollout(
    plan: Plan,
    model: CausalModel,
    *,
    inputs: torch.Tensor | None = None,
    stored: Sequence[torch.Tensor] | Callable[[int], torch.Tensor | None] = (),
    stop: StopFlag | None = None,
    on_start: OnStep | None = None,
    on_step: OnStep | None = None,
    on_latents: OnLatents | None = None,
) -> Iterator[Chunk]:
    """Make a video chunk by chunk; ends early, after whole chunks, once ``stop`` is raised.

    Args:
        plan, model, inputs: as for ``Rollout``.
        stored: latents of the first chunks, made earlier: a sequence, or a function from chunk
            index to latents (None from the first missing one on).
        stop, on_start, on_step, on_latents: as for ``Rollout.make_chunk``.
    """
    run = Rollout(plan, model, inputs)
    index = 0
    while not run.finished:
        if callable(stored):
            latents = stored(index)
        else:
            latents = stored[index] if index < len(stored) else None
        chunk = run.make_chunk(
            latents, stop=stop, on_start=on_start, on_step=on_step, on_latents=on_latents
        )
        if chunk is None:
            return
        yield chunk
        index += 1
