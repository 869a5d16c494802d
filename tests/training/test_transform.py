"""The linear encoder: its fast form, its independence of time, the network that holds it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training.papercut import autoencoder, transform
from training.papercut.prepare import fresh_clips


@pytest.fixture(scope="module")
def video() -> torch.Tensor:
    torch.manual_seed(0)
    return fresh_clips(np.random.default_rng(0), 12, 9)


@pytest.fixture(scope="module")
def fitted(video: torch.Tensor) -> transform.Transform:
    return transform.fit(video)


def test_fast_encoding_equals_the_stages(fitted: transform.Transform, video: torch.Tensor) -> None:
    slow = transform.stages(fitted, video).latents
    torch.testing.assert_close(transform.encode(fitted, video), slow, atol=1e-4, rtol=1e-4)


def test_later_latents_need_no_warm_up(fitted: transform.Transform, video: torch.Tensor) -> None:
    whole = transform.encode(fitted, video)
    later = transform.encode(fitted, video[:, :, 1:], first=False)
    torch.testing.assert_close(later, whole[:, :, 1:], atol=1e-4, rtol=1e-4)


def test_normalising_is_undone(fitted: transform.Transform, video: torch.Tensor) -> None:
    latents = transform.encode(fitted, video)
    back = fitted.denormalise(fitted.normalise(latents))
    torch.testing.assert_close(back, latents, atol=1e-4, rtol=1e-4)


def test_the_stock_network_encodes_the_same_and_decodes_without_training(
    fitted: transform.Transform, video: torch.Tensor
) -> None:
    model = autoencoder.build(fitted, video)
    latents = transform.encode(fitted, video)
    with torch.no_grad():
        encoded = model.encode(video).latent_dist.mode()
    assert float((encoded - latents).norm() / latents.norm()) < 0.04
    first, later = autoencoder.psnr_db(model, [(video[:2], latents[:2])])
    assert first > 26
    assert later > 25


def test_stacked_convolutions_change_nothing(
    fitted: transform.Transform, video: torch.Tensor
) -> None:
    model = autoencoder.build(fitted, video)
    latents = transform.encode(fitted, video[:1])
    with torch.no_grad():
        plain = autoencoder.decode(model, latents)
        with autoencoder.stacked_convolutions():
            stacked = autoencoder.decode(model, latents)
    torch.testing.assert_close(stacked, plain, atol=1e-4, rtol=1e-4)
