"""Fixtures of the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from diffusers import WanTransformer3DModel


@pytest.fixture
def fresh_transformer(tiny_components: Path) -> WanTransformer3DModel:
    """The tiny transformer, loaded anew since installing processors changes it."""
    model: WanTransformer3DModel = WanTransformer3DModel.from_pretrained(
        tiny_components / "transformer"
    )
    return model.eval()
