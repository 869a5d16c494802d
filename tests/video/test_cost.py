"""The arithmetic of a plan's cost, against real modules: parameters, bytes, flops."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from longtake.video.causal_wan import Session
from longtake.video.codec import StreamingDecoder, StreamingEncoder
from longtake.video.components import CausalModel
from longtake.video.cost import Rates
from longtake.video.plan import Plan, make_plan
from longtake.video.probe import measured_rates
from longtake.video.request import VideoRequest
from longtake.video.shapes import vae_shape
from longtake.video.source import component_config

LoadTiny = Callable[..., CausalModel]
WAN_22: dict[str, Any] = {
    "dim_mult": [1, 2, 2],
    "scale_factor_spatial": 8,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "decoder_base_dim": 12,
}


@pytest.fixture(params=["tiny", "papercut"])
def model(request: pytest.FixtureRequest) -> CausalModel:
    """Both models."""
    if request.param == "papercut":
        bundled: CausalModel = request.getfixturevalue("papercut")
        return bundled
    load: LoadTiny = request.getfixturevalue("load_tiny")
    return load()


def plan_of(model: CausalModel, rates: Rates | None = None, **fields: Any) -> Plan:
    request = VideoRequest(**{"prompt": "a red ball", "seed": 5, **fields})
    return replace(make_plan(request, model.manifest, model.shape), rates=rates)


def parameters(module: nn.Module) -> int:
    """Each once, also where two modules share it."""
    return sum(parameter.numel() for parameter in module.parameters())


def counted(run: Callable[[], object]) -> int:
    """Flops of a call, attention written out since the fused kernels of the CPU are not counted."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def test_parameters_are_those_of_the_modules(model: CausalModel) -> None:
    shape, sizes = model.shape, plan_of(model).cost.bytes
    for name, said, module in [
        ("transformer", shape.transformer.parameters, model.wan.transformer),
        ("vae", shape.vae.parameters, model.vae),
        ("text_encoder", shape.text_parameters, model.text_encoder),
    ]:
        assert said == pytest.approx(parameters(module), rel=0.02), name
        assert sizes[name] == 4 * said


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_cache_bytes_are_those_of_the_cache(model: CausalModel, guidance: float) -> None:
    plan = plan_of(model, guidance_scale=guidance, num_frames=81)
    cache = model.wan.new_cache(1, plan.layout.capacity, plan.latent_shape[1:])
    keys = plan.text_tokens
    text = model.wan.encode_text([torch.zeros(keys, model.shape.transformer.text_dim)], keys)
    texts = sum(t.nbytes for t in (*text.keys, *text.values))
    assert plan.cost.bytes["kv_cache"] == (cache.nbytes + texts) * (2 if guidance > 1 else 1)


def test_decode_state_is_what_a_stream_keeps(model: CausalModel) -> None:
    plan = plan_of(model)
    decoder = StreamingDecoder(model.vae)
    latents = torch.zeros(1, *plan.latent_shape[:1], 3, *plan.latent_shape[1:])
    for frame in range(3):
        decoder.decode(latents[:, :, frame : frame + 1])
    assert decoder.snapshot().nbytes == plan.cost.bytes["vae_state"]


def test_transformer_flops(model: CausalModel) -> None:
    wan, shape, plan = model.wan, model.shape.transformer, plan_of(model)
    text = wan.encode_text([model.embed("a red ball")], plan.text_length)
    cache = wan.new_cache(1, 6, plan.latent_shape[1:])
    session = Session(cache, text)

    def forward(frames: int) -> None:
        x = torch.zeros(1, plan.latent_shape[0], frames, *plan.latent_shape[1:])
        wan.forward(session, x, 0.5)

    cache.begin((), (0, 1, 2, 3))
    cache.recording = True
    forward(4)
    cache.recording = False
    cache.begin((0, 1, 2, 3), (4, 5))
    said = shape.forward_flops(2 * plan.frame_tokens, 6 * plan.frame_tokens, text.keys[0].shape[1])
    assert said == pytest.approx(counted(lambda: forward(2)), rel=0.03)


@pytest.mark.parametrize("kind", ["tiny", "papercut", "wan 2.2"])
def test_vae_flops(kind: str, papercut: CausalModel, load_tiny: LoadTiny) -> None:
    """Of one later latent frame; a fresh VAE, since the counter does not see oneDNN's own calls."""
    model = papercut if kind == "papercut" else load_tiny()
    config = component_config(model.manifest, "vae") | (WAN_22 if kind == "wan 2.2" else {})
    shape = vae_shape(config)
    vae: AutoencoderKLWan = AutoencoderKLWan.from_config(config).eval()
    high, wide = 4, 6
    decoder, latents = StreamingDecoder(vae), torch.zeros(1, vae.config.z_dim, 3, high, wide)
    decoder.decode(latents[:, :, :2])
    flops = counted(lambda: decoder.decode(latents[:, :, 2:]))
    assert shape.decode_flops(high * wide) == pytest.approx(flops, rel=0.03)
    assert shape.decode_state_bytes(high * wide, 4) == decoder.snapshot().nbytes
    encoder = StreamingEncoder(vae)
    step = shape.stride_space
    frames = torch.zeros(1, 3, 9, high * step, wide * step)
    encoder.encode(frames[:, :, :5])
    flops = counted(lambda: encoder.encode(frames[:, :, 5:]))
    assert shape.encode_flops(high * wide) == pytest.approx(flops, rel=0.03)


def test_attention_costs_what_the_plan_reads(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    shape = model.shape.transformer

    def plan(attention: str) -> Plan:
        return plan_of(model, num_frames=161, attention=attention, num_inference_steps=2)

    def read(made: Plan, frames: list[float]) -> float:
        tokens, query = made.frame_tokens, 2 * made.frame_tokens
        each = (shape.attention_flops(query, n * tokens, made.text_tokens) for n in frames)
        return sum(each) + len(frames) * shape.linear_flops(query)

    seen = [len(c.past) + c.frames for c in plan("global").chunks]
    # the sink of one frame, the best four, and the own two
    few = [float(min(n, 1 + 4 + 2)) for n in seen]
    whole = list(map(float, seen))
    cases: dict[str, list[float]] = {
        "global": whole,
        "global+chunked:9": whole,
        "topk:4": few,
        "global,layers:1-2=topk:4": [(n + 2 * k) / 3 for n, k in zip(seen, few, strict=True)],
    }
    for attention, frames in cases.items():
        made = plan(attention)
        assert made.cost.flops["clean"] == pytest.approx(read(made, frames)), attention
        assert made.cost.flops["denoise"] == pytest.approx(2 * made.cost.flops["clean"])
    stepped = plan("global,steps:1=topk:4")
    expected = read(stepped, whole) + read(stepped, few)
    assert stepped.cost.flops["denoise"] == pytest.approx(expected)
    assert stepped.cost.flops["clean"] == pytest.approx(read(stepped, whole))


def test_a_video_costs_the_sum_of_its_chunks(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    plan = plan_of(model, num_frames=33, guidance_scale=2.0, negative_prompt="b")
    shape, tokens = model.shape, plan.frame_tokens
    seen = [2, 4, 6, 6, 6]
    assert plan.as_dict()["chunks"]["sees"] == seen
    text = plan.text_tokens
    passes = [shape.transformer.forward_flops(2 * tokens, n * tokens, text) for n in seen]
    flops = plan.cost.flops
    assert flops["clean"] == pytest.approx(2 * sum(passes))
    assert flops["denoise"] == pytest.approx(2 * plan.steps * sum(passes))
    # the last chunk is made whole, its second frame is not decoded
    assert flops["decode"] == pytest.approx(9 * shape.vae.decode_flops(4 * 8))
    assert flops["encode"] == 0


def test_time_is_flops_over_rates(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    plan = plan_of(model, Rates(linear=1e9, attention=1e9, conv=2e9, device="a machine"))
    cost = plan.cost
    assert cost.device == "a machine"
    assert cost.seconds["denoise"] == pytest.approx(cost.flops["denoise"] / 1e9)
    assert cost.seconds["decode"] == pytest.approx(cost.flops["decode"] / 2e9)
    total = cost.as_dict()["seconds"]["total"]
    assert total == pytest.approx(sum(cost.seconds.values()))


def test_half_precision_halves_all_but_a_vae_of_its_own_dtype(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    request = VideoRequest(prompt="a", seed=1)
    whole, half = (
        make_plan(request, model.manifest, model.shape, itemsize=n).cost.bytes for n in (4, 2)
    )
    assert {name: size / 2 for name, size in whole.items()} == half
    kept = replace(model.manifest, vae_dtype="fp32")
    mixed = make_plan(request, kept, model.shape, itemsize=2).cost.bytes
    own = {name for name in mixed if mixed[name] != half[name]}
    assert own == {"vae", "vae_state", "vae_decode"}
    assert all(mixed[name] == whole[name] for name in own)


def test_rates_are_measured_once_and_kept(
    load_tiny: LoadTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = load_tiny()

    def measure(size: tuple[int, int] = (32, 16)) -> Rates:
        cpu = torch.device("cpu")
        return measured_rates(model.shape, size, (2, 6), device=cpu, dtype="fp32")

    first = measure()
    assert min(first.linear, first.attention, first.conv) > 0
    assert "cpu" in first.device
    assert measure() == first
    (kept,) = (tmp_path / "cache").rglob("*.json")
    measure((64, 32))
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 2
    kept.write_text("damaged")
    assert asdict(measure()) == json.loads(kept.read_text())
