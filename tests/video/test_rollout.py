"""The main loop: every way to start, stop, switch and go back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from longtake.errors import DecodeMemoryError, ResumeError, StateError
from longtake.schedulers.prompts import TimedPrompt
from longtake.schedulers.samplers import euler_step
from longtake.video.causal_wan import Session
from longtake.video.codec import StreamingDecoder, StreamingEncoder, to_uint8
from longtake.video.components import CausalModel
from longtake.video.numerics import draw_noise
from longtake.video.plan import Inputs, Plan, make_plan
from longtake.video.request import VideoRequest
from longtake.video.rollout import Chunk, Denoised, Rollout, StepEvent, rollout

LoadTiny = Callable[..., CausalModel]
BALL = "a red ball bouncing over a green meadow"
STAR = "a blue star moving left over dark hills at night"


@pytest.fixture(params=["window", "global"])
def attention(request: pytest.FixtureRequest) -> str:
    """Both attention plans."""
    name: str = request.param
    return name


def plan_for(model: CausalModel, inputs: Inputs | None = None, **fields: Any) -> Plan:
    """A plan of 33 frames (9 latent frames, 5 chunks) with seed 5, with changes."""
    values: dict[str, Any] = {"prompt": BALL, "seed": 5, "num_frames": 33, **fields}
    return make_plan(VideoRequest(**values), model.manifest, model.shape, inputs=inputs)


def run(plan: Plan, model: CausalModel, **options: Any) -> list[Chunk]:
    """All chunks of a rollout."""
    return list(rollout(plan, model, **options))


def pixels(chunks: list[Chunk]) -> torch.Tensor:
    """All frames of a rollout."""
    return torch.cat([chunk.frames for chunk in chunks])


def test_frames_are_the_decoded_latents_and_no_more(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    chunks = run(plan_for(model), model)
    latents = torch.cat([c.latents for c in chunks], 2)
    assert latents.shape == (1, 4, 10, 4, 8)
    whole = to_uint8(StreamingDecoder(model.vae).decode(latents[:, :, :9]))[0]
    assert torch.equal(pixels(chunks), whole)
    assert [len(c.frames) for c in chunks] == [5, 8, 8, 8, 4]


def test_same_seed_same_video_other_seed_other_video(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    first, again = (pixels(run(plan_for(model), model)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, pixels(run(plan_for(model, seed=6), model)))


def test_a_longer_video_begins_with_the_shorter_one(load_tiny: LoadTiny, attention: str) -> None:
    model = load_tiny()
    short = pixels(run(plan_for(model, num_frames=33, attention=attention), model))
    long = pixels(run(plan_for(model, num_frames=49, attention=attention), model))
    assert torch.equal(long[:33], short)


def test_guidance_equals_two_separate_forwards(load_tiny: LoadTiny, attention: str) -> None:
    model = load_tiny()
    plan = plan_for(model, num_frames=13, guidance_scale=2.5, attention=attention)
    chunks = run(plan, model)
    sides = []
    for text in (BALL, ""):
        cache = model.wan.new_cache(1, plan.layout.capacity, plan.latent_shape[1:])
        embedding = model.embed(text)
        sides.append(Session(cache, model.wan.encode_text([embedding], plan.text_length)))
    for spec, chunk in zip(plan.chunks, chunks, strict=True):
        x = draw_noise(tuple(chunk.latents.shape), 5, spec.index, 0, "start")
        for session in sides:
            session.cache.begin(spec.past, spec.own)
        for sigma, following in zip(plan.sigmas[:-1], plan.sigmas[1:], strict=True):
            prompted, unprompted = (model.wan.forward(s, x, sigma) for s in sides)
            velocity = unprompted + 2.5 * (prompted - unprompted)
            x = euler_step(x, velocity, sigma, following)
        assert (x - chunk.latents).abs().max() <= 1e-5
        noise = draw_noise(tuple(x.shape), 5, spec.index, 0, "context")
        for session in sides:
            session.cache.recording = True
            model.wan.forward(session, 0.95 * x + 0.05 * noise, 0.05)
            session.cache.recording = False


def test_image_start_is_the_first_frame(load_tiny: LoadTiny, attention: str) -> None:
    model = load_tiny()
    image = torch.rand(1, 3, 1, 16, 32) * 2 - 1
    latents = StreamingEncoder(model.vae).encode(image)
    plan = plan_for(model, Inputs("image", 1), attention=attention)
    chunks = run(plan, model, inputs=latents)
    assert [c.spec.given for c in chunks] == [True, False, False, False, False]
    round_trip = to_uint8(StreamingDecoder(model.vae).decode(latents))[0]
    assert torch.equal(chunks[0].frames, round_trip)
    assert pixels(chunks).shape[0] == 33
    other = run(plan, model, inputs=-latents)
    assert not torch.equal(chunks[1].latents, other[1].latents)


def test_continuing_stored_latents_equals_one_run(load_tiny: LoadTiny, attention: str) -> None:
    model = load_tiny()
    whole = run(plan_for(model, attention=attention), model)
    head = torch.cat([c.latents for c in whole[:2]], 2)
    plan = plan_for(model, Inputs("continue", 13, (2, 2)), attention=attention)
    chunks = run(plan, model, inputs=head)
    assert torch.equal(pixels(chunks), pixels(whole))


def test_strength_ends(load_tiny: LoadTiny, attention: str) -> None:
    model = load_tiny()
    clip = torch.rand(1, 3, 33, 16, 32) * 2 - 1
    latents = StreamingEncoder(model.vae).encode(clip)

    def redraw(strength: float) -> torch.Tensor:
        plan = plan_for(
            model, Inputs("redraw", 33), video="clip", strength=strength, attention=attention
        )
        return pixels(run(plan, model, inputs=latents))

    assert torch.equal(redraw(0.0), to_uint8(StreamingDecoder(model.vae).decode(latents))[0])
    assert torch.equal(redraw(1.0), pixels(run(plan_for(model, attention=attention), model)))
    near, far = (redraw(s).float() - redraw(0.0).float() for s in (0.2, 0.8))
    assert 0 < near.abs().mean() < far.abs().mean()


def test_timeline_changes_later_chunks_only(load_tiny: LoadTiny, attention: str) -> None:
    model = load_tiny(recache=False)
    plain = run(plan_for(model, attention=attention), model)
    timeline = (TimedPrompt(1.0, STAR),)
    switched = run(plan_for(model, prompts=timeline, attention=attention), model)
    assert [c.prompt for c in switched] == [0, 0, 1, 1, 1]
    assert torch.equal(pixels(switched[:2]), pixels(plain[:2]))
    assert not torch.equal(switched[2].latents, plain[2].latents)


def test_recache_equals_a_hand_made_one(load_tiny: LoadTiny, attention: str) -> None:
    """All cached frames, sink left out, pass once more under the new prompt."""
    model = load_tiny(context_noise_added=False)
    fields: dict[str, Any] = {"prompts": (TimedPrompt(2.0, STAR),), "attention": attention}
    plan = plan_for(model, **fields)
    chunks = run(plan, model)
    spec = list(plan.chunks)[3]
    assert spec.index == plan.switches[0].chunk
    sink = () if attention == "global" else (0,)
    recent = tuple(f for f in range(6) if f not in sink)
    cache = model.wan.new_cache(1, plan.layout.capacity, plan.latent_shape[1:])
    texts = [model.wan.encode_text([model.embed(t)], plan.text_length) for t in (BALL, STAR)]
    session = Session(cache, texts[0])
    latents = torch.cat([c.latents for c in chunks], 2)

    def clean(own: tuple[int, ...], past: tuple[int, ...]) -> None:
        cache.begin(past, own)
        cache.recording = True
        model.wan.forward(session, latents[:, :, list(own)], 0.05)
        cache.recording = False

    for earlier in list(plan.chunks)[:3]:
        clean(earlier.own, earlier.past)
    session.text = texts[1]
    clean(recent, sink)
    cache.begin(spec.past, spec.own)
    x = draw_noise((1, 4, 2, 4, 8), 5, 3, 0, "start")
    for sigma, following in zip(plan.sigmas[:-1], plan.sigmas[1:], strict=True):
        x = euler_step(x, model.wan.forward(session, x, sigma), sigma, following)
    assert (x - chunks[3].latents).abs().max() <= 1e-5


@pytest.mark.parametrize("stopped_after", [1, 2, 3, 4])
def test_resume_equals_an_undisturbed_run(
    load_tiny: LoadTiny, attention: str, stopped_after: int
) -> None:
    model = load_tiny(guidance_scale=2.0)
    fields: dict[str, Any] = {"prompts": (TimedPrompt(1.0, STAR),), "attention": attention}
    whole = run(plan_for(model, **fields), model)
    stored = [c.latents.clone() for c in whole[:stopped_after]]
    resumed = run(plan_for(model, **fields), model, stored=stored)
    assert [c.reused for c in resumed] == [i < stopped_after for i in range(5)]
    assert torch.equal(pixels(resumed), pixels(whole))


def test_redo_after_restore(load_tiny: LoadTiny, attention: str) -> None:
    model = load_tiny()
    plan = plan_for(model, attention=attention)
    undisturbed = run(plan, model)
    redone = Rollout(plan, model)
    for index in range(5):
        before = redone.snapshot()
        rejected = redone.make_chunk(attempt=1)
        assert rejected is not None
        redone.restore(before)
        chunk = redone.make_chunk()
        assert chunk is not None
        assert not torch.equal(rejected.latents, chunk.latents)
        assert torch.equal(chunk.latents, undisturbed[index].latents)
        assert torch.equal(chunk.frames, undisturbed[index].frames)


def test_redo_across_a_prompt_switch_with_recache(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    plan = plan_for(model, prompts=(TimedPrompt(1.0, STAR), TimedPrompt(2.0, BALL)))
    undisturbed = run(plan, model)
    redone = Rollout(plan, model)
    for expected in undisturbed:
        before = redone.snapshot()
        redone.make_chunk(attempt=7)
        redone.restore(before)
        chunk = redone.make_chunk()
        assert chunk is not None
        assert torch.equal(chunk.latents, expected.latents)


def test_a_snapshot_two_chunks_old_is_refused(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    run_once = Rollout(plan_for(model), model)
    for _ in range(3):
        run_once.make_chunk()
    old = run_once.snapshot()
    run_once.make_chunk()
    run_once.make_chunk()
    run_once.restore(old)
    with pytest.raises(StateError, match="no longer in the KV cache"):
        run_once.make_chunk()


def test_stop_is_read_between_steps_and_keeps_whole_chunks(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    steps: list[StepEvent] = []
    plan = plan_for(model)
    chunks = run(plan, model, stop=lambda: len(steps) >= 5, on_step=steps.append)
    assert [(e.chunk, e.step) for e in steps] == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]
    assert torch.equal(pixels(chunks), pixels(run(plan, model))[:13])


def test_latents_are_handed_out_before_the_decode(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny()
    told: list[str] = []
    plain = StreamingDecoder.decode

    def decode(decoder: StreamingDecoder, latents: torch.Tensor) -> torch.Tensor:
        told.append("decode")
        return plain(decoder, latents)

    monkeypatch.setattr(StreamingDecoder, "decode", decode)
    taken: list[Denoised] = []

    def take(made: Denoised) -> None:
        told.append("latents")
        taken.append(made)

    chunks = run(
        plan_for(model, num_frames=13),
        model,
        on_start=lambda event: told.append(f"start {event.chunk}.{event.step}"),
        on_step=lambda event: told.append(f"done {event.chunk}.{event.step}"),
        on_latents=take,
    )
    one = ["start 0.0", "done 0.1", "start 0.1", "done 0.2", "latents", "decode"]
    two = ["start 1.0", "done 1.1", "start 1.1", "done 1.2", "latents", "decode"]
    assert told == one + two
    for made, chunk in zip(taken, chunks, strict=True):
        assert torch.equal(made.latents, chunk.latents)
        assert (made.spec, made.prompt, made.reused) == (chunk.spec, chunk.prompt, False)


def test_a_stop_before_the_decode_is_only_seen_where_latents_were_taken(
    load_tiny: LoadTiny,
) -> None:
    model = load_tiny()
    plan = plan_for(model)
    for on_latents, chunks in ((None, 2), (lambda _: None, 1)):
        steps: list[StepEvent] = []
        made = run(
            plan,
            model,
            stop=lambda steps=steps: len(steps) >= 4,
            on_step=steps.append,
            on_latents=on_latents,
        )
        assert len(made) == chunks
        assert len(steps) == 4


def test_a_decode_without_memory_is_made_again_from_the_latents(
    load_tiny: LoadTiny, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny()
    plan = plan_for(model, attention=attention)
    undisturbed = run(plan, model)
    plain = StreamingDecoder.decode
    errors = iter(
        [
            None,
            torch.OutOfMemoryError("full"),
            MemoryError(),
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
        ]
    )

    def decode(decoder: StreamingDecoder, latents: torch.Tensor) -> torch.Tensor:
        error = next(errors, None)
        if error is not None:
            raise error
        return plain(decoder, latents)

    monkeypatch.setattr(StreamingDecoder, "decode", decode)
    again = Rollout(plan, model)
    taken: list[Denoised] = []
    first = again.make_chunk()
    assert first is not None
    for stored in range(3):
        with pytest.raises(DecodeMemoryError, match="chunk 1") as failure:
            again.make_chunk(taken[0].latents if stored else None, on_latents=taken.append)
        assert failure.value.chunk == 1
    chunks = [first]
    latents: torch.Tensor | None = taken[0].latents
    while not again.finished:
        chunk = again.make_chunk(latents)
        assert chunk is not None
        chunks.append(chunk)
        latents = None
    assert torch.equal(pixels(chunks), pixels(undisturbed))


def test_memory_that_ends_elsewhere_is_no_matter_of_the_decode(load_tiny: LoadTiny) -> None:
    model = load_tiny()

    def full(_event: StepEvent) -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        run(plan_for(model), model, on_start=full)


def test_two_rollouts_take_turns(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    plans = [plan_for(model, seed=seed) for seed in (1, 2)]
    alone = [pixels(run(plan, model)) for plan in plans]
    both: list[Iterator[Chunk]] = [rollout(plan, model) for plan in plans]
    turns = list(zip(*both, strict=True))
    for index, expected in enumerate(alone):
        assert torch.equal(pixels([turn[index] for turn in turns]), expected)


def test_lcm_sampler_draws_fresh_noise_by_chunk_and_step(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    plan = plan_for(model, sampler="lcm")
    assert plan.sampler == "lcm"
    first, again = (pixels(run(plan, model)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, pixels(run(plan_for(model), model)))


def test_first_chunk_of_one(load_tiny: LoadTiny) -> None:
    model = load_tiny(first_chunk=1)
    chunks = run(plan_for(model), model)
    assert [c.spec.frames for c in chunks] == [1, 2, 2, 2, 2]
    assert len(pixels(chunks)) == 33


def test_stored_latents_of_another_shape_are_refused(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    with pytest.raises(ResumeError, match="chunk 0"):
        run(plan_for(model), model, stored=[torch.zeros(1, 4, 3, 4, 8)])
    with pytest.raises(ResumeError, match="float64"):
        run(plan_for(model), model, stored=[torch.zeros(1, 4, 2, 4, 8, dtype=torch.float64)])


def test_noise_depends_on_its_key_alone() -> None:
    noise = draw_noise((3, 4), 1, 2, 0, "start")
    assert torch.equal(noise, draw_noise((3, 4), 1, 2, 0, "start"))
    others = [(2, 2, 0, "start"), (1, 3, 0, "start"), (1, 2, 1, "start"), (1, 2, 0, "context")]
    for seed, chunk, attempt, use in others:
        assert not torch.equal(noise, draw_noise((3, 4), seed, chunk, attempt, use))
