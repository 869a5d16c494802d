"""Streaming through the VAE gives what one whole call gives, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

import longtake.video
from longtake.errors import ModelError, RequestError, StateError
from longtake.video.codec import (
    StreamingDecoder,
    StreamingEncoder,
    denormalise,
    from_uint8,
    normalise,
    to_uint8,
)
from longtake.video.stacked_conv import prepare_vae

BUNDLED_VAE = Path(longtake.video.__file__).parent / "papercut" / "vae"
CHUNKINGS = ([3, 3, 3], [1, 4, 4], [9])
FORMS = ("conv3d", "stacked")
CASES = [
    *((kind, batch, form) for kind in ("wan21", "wan22") for batch in (1, 2) for form in FORMS),
    ("bundled", 1, "stacked"),
]

CONFIGS: dict[str, dict[str, Any]] = {
    "wan21": {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "scale_factor_spatial": 4,
    },
    "wan22": {
        "base_dim": 8,
        "decoder_base_dim": 12,
        "z_dim": 4,
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 8,
    },
}
LATENT_SCALE = {"latents_mean": [0.4, -0.3, 0.0, 0.1], "latents_std": [1.5, 0.8, 1.0, 2.0]}


def make_vae(kind: str, form: str = "conv3d") -> AutoencoderKLWan:
    vae: AutoencoderKLWan
    if kind == "bundled":
        vae = AutoencoderKLWan.from_pretrained(BUNDLED_VAE, torch_dtype=torch.float32)
    else:
        torch.manual_seed(5)
        vae = AutoencoderKLWan(**CONFIGS[kind], **LATENT_SCALE)
    vae.eval()
    if form == "stacked":
        assert prepare_vae(vae) == "stacked"
    return vae


# Latents of 5 x 8: at some other sizes the bits of diffusers' whole calls depend on the length.
def make_latents(
    vae: AutoencoderKLWan,
    frames: int = 9,
    batch: int = 1,
    seed: int = 1,
    size: tuple[int, int] = (5, 8),
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, vae.config.z_dim, frames, *size, generator=generator)


def make_frames(
    vae: AutoencoderKLWan, frames: int = 17, batch: int = 1, size: tuple[int, int] = (5, 8)
) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    height, width = (n * vae.config.scale_factor_spatial for n in size)
    return torch.rand(batch, 3, frames, height, width, generator=generator) * 2 - 1


def whole_decode(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Decode all latents by diffusers itself, by a formula written out again here."""
    mean = torch.tensor(vae.config.latents_mean)[None, :, None, None, None]
    std = torch.tensor(vae.config.latents_std)[None, :, None, None, None]
    with torch.no_grad():
        frames: Tensor = vae.decode(latents * std + mean).sample
    return frames


@pytest.mark.parametrize("chunks", CHUNKINGS, ids=str)
@pytest.mark.parametrize(("kind", "batch", "form"), CASES)
def test_streaming_decode_equals_whole_decode(
    kind: str, batch: int, chunks: list[int], form: str
) -> None:
    vae = make_vae(kind, form)
    latents = make_latents(vae, batch=batch)
    decoder = StreamingDecoder(vae)
    parts = [decoder.decode(chunk) for chunk in torch.split(latents, chunks, dim=2)]
    assert [p.shape[2] for p in parts] == [4 * n - 3 * (i == 0) for i, n in enumerate(chunks)]
    frames = torch.cat(parts, dim=2)
    assert frames.shape[:3] == (batch, 3, 33)
    assert frames.std() > 0.01
    assert torch.equal(frames, whole_decode(vae, latents))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [(3, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("kind", ["wan21", "wan22"])
def test_chunking_never_shows_whatever_the_size(
    kind: str, size: tuple[int, int], form: str
) -> None:
    vae = make_vae(kind, form)
    latents, frames = make_latents(vae, size=size), make_frames(vae, size=size)
    decoded, encoded = [], []
    for chunks in CHUNKINGS:
        decoder = StreamingDecoder(vae)
        parts = [decoder.decode(c) for c in torch.split(latents, chunks, dim=2)]
        decoded.append(torch.cat(parts, dim=2))
    for chunks in ([17], [1, 16], [5, 4, 8]):
        encoder = StreamingEncoder(vae)
        parts = [encoder.encode(c) for c in torch.split(frames, chunks, dim=2)]
        encoded.append(torch.cat(parts, dim=2))
    for results in (decoded, encoded):
        assert all(torch.equal(results[0], other) for other in results[1:])
    whole = whole_decode(vae, latents)
    assert torch.equal(decoded[0], whole) or form == "conv3d"
    assert (decoded[0] - whole).abs().max() <= 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "before"), [("wan21", 0), ("wan21", 1), ("wan22", 3)])
def test_a_rejected_chunk_leaves_no_trace(kind: str, before: int, form: str) -> None:
    vae = make_vae(kind, form)
    latents = make_latents(vae, frames=6)
    rejected = make_latents(vae, frames=3, seed=9)
    decoder = StreamingDecoder(vae)
    parts = [decoder.decode(latents[:, :, :before])] if before else []
    state = decoder.snapshot()
    for _ in range(2):
        decoder.decode(rejected)
        decoder.restore(state)
    parts.append(decoder.decode(latents[:, :, before:]))
    assert torch.equal(torch.cat(parts, dim=2), whole_decode(vae, latents))


def test_streams_and_whole_calls_over_one_vae_do_not_meet() -> None:
    vae = make_vae("wan21", "stacked")
    streams = [make_latents(vae, frames=6, seed=seed) for seed in (1, 2)]
    decoders = [StreamingDecoder(vae) for _ in streams]
    encoder = StreamingEncoder(vae)
    frames = make_frames(vae, frames=9)
    parts: list[list[Tensor]] = [[], []]
    latents = [encoder.encode(frames[:, :, :5])]
    for start in (0, 2, 4):
        for stream, decoder, out in zip(streams, decoders, parts, strict=True):
            out.append(decoder.decode(stream[:, :, start : start + 2]))
            whole_decode(vae, stream)
            vae.encode(frames)
            vae.clear_cache()
    latents.append(encoder.encode(frames[:, :, 5:]))
    for stream, out in zip(streams, parts, strict=True):
        assert torch.equal(torch.cat(out, dim=2), whole_decode(vae, stream))
    assert torch.equal(torch.cat(latents, dim=2), StreamingEncoder(vae).encode(frames))


def test_a_snapshot_moves_to_another_decoder_and_reset_starts_anew() -> None:
    vae = make_vae("wan22")
    latents = make_latents(vae, frames=5)
    first = StreamingDecoder(vae)
    head = first.decode(latents[:, :, :2])
    second = StreamingDecoder(vae)
    second.restore(first.snapshot())
    tail = second.decode(latents[:, :, 2:])
    assert torch.equal(torch.cat([head, tail], dim=2), whole_decode(vae, latents))
    first.reset()
    assert torch.equal(first.decode(latents[:, :, :2]), head)


def test_snapshot_counts_its_memory_and_refuses_another_vae() -> None:
    decoder = StreamingDecoder(make_vae("wan21"))
    assert decoder.snapshot().nbytes == 0
    decoder.decode(make_latents(make_vae("wan21"), frames=3))
    tensors = [f for f in decoder.snapshot().features if isinstance(f, Tensor)]
    assert decoder.snapshot().nbytes == sum(t.numel() * 4 for t in tensors) > 0
    with pytest.raises(StateError, match="another VAE"):
        StreamingDecoder(make_vae("bundled")).restore(decoder.snapshot())


def test_a_call_that_fails_half_way_leaves_the_stream_where_it_was() -> None:
    vae = make_vae("wan21")
    latents = make_latents(vae, frames=4)
    decoder = StreamingDecoder(vae)
    head = decoder.decode(latents[:, :, :2])
    weight = vae.decoder.conv_out.weight.data
    vae.decoder.conv_out.weight.data = weight[:, :1]
    with pytest.raises(RuntimeError, match="channels"):
        decoder.decode(latents[:, :, 2:])
    vae.decoder.conv_out.weight.data = weight
    tail = decoder.decode(latents[:, :, 2:])
    assert torch.equal(torch.cat([head, tail], dim=2), whole_decode(vae, latents))


@pytest.mark.parametrize("chunks", [[17], [1, 16], [5, 4, 8]], ids=str)
@pytest.mark.parametrize(("kind", "batch", "form"), CASES)
def test_streaming_encode_equals_whole_encode(
    kind: str, batch: int, chunks: list[int], form: str
) -> None:
    vae = make_vae(kind, form)
    frames = make_frames(vae, batch=batch)
    encoder = StreamingEncoder(vae)
    latents = torch.cat([encoder.encode(c) for c in torch.split(frames, chunks, dim=2)], dim=2)
    with torch.no_grad():
        mode = vae.encode(frames).latent_dist.mode()
    mean = torch.tensor(vae.config.latents_mean)[None, :, None, None, None]
    std = torch.tensor(vae.config.latents_std)[None, :, None, None, None]
    assert latents.shape == (batch, vae.config.z_dim, 5, 5, 8)
    assert torch.equal(latents, (mode - mean) / std)
    encoder.reset()
    assert torch.equal(encoder.encode(frames), latents)


def test_normalise_undoes_denormalise_and_follows_the_vae_dtype() -> None:
    vae = make_vae("wan21")
    latents = make_latents(vae)
    torch.testing.assert_close(normalise(vae, denormalise(vae, latents)), latents)
    vae.to(torch.bfloat16)
    frames = StreamingDecoder(vae).decode(latents[:, :, :2])
    assert frames.dtype == torch.bfloat16
    assert StreamingEncoder(vae).encode(frames).dtype == torch.float32


@pytest.mark.parametrize(
    ("done", "count", "message"),
    [
        (0, 2, "num_frames=2: the first chunk of a stream has 1\\+4k frames; nearest 1 or 5"),
        (0, 4, "num_frames=4: .*; nearest 1 or 5"),
        (0, 8, "num_frames=8: .*; nearest 5 or 9"),
        (5, 1, "num_frames=1: later chunks have 4k frames; nearest 4"),
        (5, 6, "num_frames=6: .*; nearest 4 or 8"),
    ],
)
def test_an_illegal_frame_count_names_the_nearest_legal_ones(
    done: int, count: int, message: str
) -> None:
    vae = make_vae("wan21")
    encoder = StreamingEncoder(vae)
    if done:
        encoder.encode(make_frames(vae, frames=done))
    with pytest.raises(RequestError, match=message):
        encoder.encode(make_frames(vae, frames=count))


def test_wrong_shapes_are_refused() -> None:
    vae = make_vae("wan22")
    with pytest.raises(RequestError, match=r"size='16x20': .*; multiples of 8"):
        StreamingEncoder(vae).encode(torch.zeros(1, 3, 1, 20, 16))
    with pytest.raises(RequestError, match=r"frames=.*wrong shape"):
        StreamingEncoder(vae).encode(torch.zeros(1, 4, 1, 16, 16))
    with pytest.raises(RequestError, match=r"latents=.*wrong shape"):
        StreamingDecoder(vae).decode(torch.zeros(1, 5, 1, 4, 4))
    with pytest.raises(RequestError, match=r"latents=.*wrong shape"):
        StreamingDecoder(vae).decode(torch.zeros(1, 4, 0, 4, 4))


def test_tiling_is_refused_before_and_during_a_stream() -> None:
    vae = make_vae("wan21")
    decoder, encoder = StreamingDecoder(vae), StreamingEncoder(vae)
    vae.enable_tiling()
    with pytest.raises(ModelError, match="disable_tiling"):
        StreamingDecoder(vae)
    with pytest.raises(ModelError, match="disable_tiling"):
        decoder.decode(make_latents(vae))
    with pytest.raises(ModelError, match="disable_tiling"):
        encoder.encode(make_frames(vae))


def test_an_encoder_of_another_temporal_factor_is_refused() -> None:
    torch.manual_seed(5)
    changes = {"temperal_downsample": [False, True], "scale_factor_temporal": 2}
    vae = AutoencoderKLWan(**(CONFIGS["wan21"] | changes), **LATENT_SCALE)
    with pytest.raises(ModelError, match="2 frames a latent frame"):
        StreamingEncoder(vae)


def test_bytes_survive_the_round_trip_and_halves_go_to_even() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 2, 8, 16, 3)
    frames = from_uint8(pixels)
    assert frames.shape == (1, 3, 2, 8, 16)
    assert torch.equal(to_uint8(frames), pixels)
    halves = torch.tensor([-1.5, -1.0, 0.0, 1.0, 1.5, 0.5 / 127.5 - 1.0])
    row = halves.view(1, 1, 1, 1, 6).expand(1, 3, 1, 1, 6)
    assert to_uint8(row)[0, 0, 0, :, 0].tolist() == [0, 0, 128, 255, 255, 0]
    with pytest.raises(RequestError, match="uint8"):
        from_uint8(frames)
