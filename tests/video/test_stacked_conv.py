"""The stacked convolutions compute what diffusers' own ones compute, and leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import Tensor

import longtake.video
from longtake.video import stacked_conv
from longtake.video.stacked_conv import install, prepare_vae, uninstall

BUNDLED_VAE = Path(longtake.video.__file__).parent / "papercut" / "vae"
TOLERANCE = 1e-5

KINDS: dict[str, dict[str, Any]] = {
    "wan21": {"num_res_blocks": 1},
    "wan22": {
        "num_res_blocks": 1,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
    },
}


def make_vae(kind: str, seed: int = 5) -> AutoencoderKLWan:
    vae: AutoencoderKLWan
    if kind == "bundled":
        vae = AutoencoderKLWan.from_pretrained(BUNDLED_VAE, torch_dtype=torch.float32)
        return vae.eval()
    torch.manual_seed(seed)
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        **KINDS[kind],
    )
    return vae.eval()


def round_trip(vae: AutoencoderKLWan, batch: int = 1, size: int = 32) -> tuple[Tensor, Tensor]:
    """Latents of 9 random frames, and decoded frames of 3 random latent frames."""
    generator = torch.Generator().manual_seed(1)
    frames = torch.rand(batch, 3, 9, size, size, generator=generator) * 2 - 1
    with torch.no_grad():
        latents = vae.encode(frames).latent_dist.mode()
        z = torch.randn(latents.shape, generator=generator)
        return latents, vae.decode(z).sample


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["wan21", "wan22", "bundled"])
def test_stacked_equals_conv3d(kind: str, batch: int) -> None:
    vae = make_vae(kind)
    stock = round_trip(vae, batch)
    assert prepare_vae(vae) == "stacked"
    for ours, theirs in zip(round_trip(vae, batch), stock, strict=True):
        assert theirs.std() > 0.01
        assert (ours - theirs).abs().max() <= TOLERANCE
        assert not torch.equal(ours, theirs)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [(3, 3, 3), (3, 1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("frames", [1, 2, 4])
@pytest.mark.parametrize("history", [0, 1, 2])
def test_each_convolution_with_any_history(
    history: int, frames: int, kernel: tuple[int, int, int], stride: int
) -> None:
    torch.manual_seed(3)
    padding = tuple(k // 2 for k in kernel)
    conv = WanCausalConv3d(6, 5, kernel, stride=(stride, 1, 1), padding=padding)
    x = torch.randn(2, 6, frames, 7, 5)
    cache = torch.randn(2, 6, history, 7, 5) if history else None
    with torch.no_grad():
        stock = conv(x, cache)
        ours = stacked_conv._stacked_forward(conv, x, cache)
    assert ours.shape == stock.shape
    assert (ours - stock).abs().max() <= TOLERANCE


# 12x12 latents and batch 2 lie beyond the sizes at which F.conv2d changes its kernel.
@pytest.mark.parametrize(("kind", "batch", "size"), [("wan21", 2, 64), ("bundled", 2, 48)])
@pytest.mark.usefixtures("threads")
def test_one_and_two_threads_give_the_same_bits(kind: str, batch: int, size: int) -> None:
    vae = make_vae(kind)
    install(vae)
    results = []
    for count in (1, 2, 1):
        torch.set_num_threads(count)
        results.append(round_trip(vae, batch, size))
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_weights_are_views_and_later_loads_are_seen() -> None:
    vae, other = make_vae("wan21"), make_vae("wan21", seed=6)
    install(vae)
    conv = vae.decoder.conv_in
    stacked = conv.weight.permute(0, 3, 4, 2, 1).flatten(3)
    assert stacked.data_ptr() == conv.weight.data_ptr()
    vae.load_state_dict(other.state_dict())
    install(other)
    for ours, theirs in zip(round_trip(vae), round_trip(other), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(conv.weight, other.decoder.conv_in.weight)


def test_uninstall_leaves_the_stock_vae_and_a_copy_stays_apart(tmp_path: Path) -> None:
    vae = make_vae("wan22")
    stock = round_trip(vae)
    install(vae)
    stacked = round_trip(vae)
    twin = copy.deepcopy(vae)
    uninstall(vae)
    assert all("forward" not in m.__dict__ for m in vae.modules())
    for ours, theirs in zip(round_trip(vae), stock, strict=True):
        assert torch.equal(ours, theirs)
    vae.save_pretrained(tmp_path)
    with torch.no_grad():
        vae.decoder.conv_in.weight.zero_()
    for ours, theirs in zip(round_trip(twin), stacked, strict=True):
        assert torch.equal(ours, theirs)


def test_only_this_vae_is_changed() -> None:
    vae, other = make_vae("wan21"), make_vae("wan21")
    stock = round_trip(other)
    install(vae)
    for ours, theirs in zip(round_trip(other), stock, strict=True):
        assert torch.equal(ours, theirs)


def test_other_dtypes_and_hooked_modules_keep_conv3d() -> None:
    vae = make_vae("wan21")
    assert prepare_vae(vae) == "stacked"
    assert prepare_vae(vae.to(torch.bfloat16)) == "conv3d"
    assert all("forward" not in m.__dict__ for m in vae.modules())
    vae.to(torch.float32)
    conv = vae.decoder.conv_in
    conv.__dict__["forward"] = conv.forward
    assert prepare_vae(vae) == "conv3d"
    assert "forward" in conv.__dict__


def test_a_vae_cast_after_install_falls_back_to_its_own_convolutions() -> None:
    vae = make_vae("wan21")
    install(vae)
    vae.to(torch.float64)
    z = torch.randn(1, 4, 2, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        ours = vae.decode(z).sample
        uninstall(vae)
        assert torch.equal(ours, vae.decode(z).sample)
