"""Tiny random models, built through the real classes and read back by the real loader."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# One thread here and in every process that a test starts: a tiny model's bits can depend on their
# number, and two cores are busy anyway. Tests about threads set them by name.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
# a profile that longtake tune made for this machine must not steer tests
os.environ["XDG_DATA_HOME"] = str(Path(tempfile.gettempdir()) / "longtake-tests-data")

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from longtake.video.components import CausalModel, load_model
from longtake.video.manifest import BUNDLED, read_manifest
from longtake.video.source import find_model

TINY_TEXT = 16

MakeModel = Callable[..., Path]


SLOW = ("tests/soak/", "tests/video/test_parallel", "tests/browser/", "tests/queue/workers/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow files first: two processes that share them then end at about the same time."""
    items.sort(key=lambda item: not item.nodeid.startswith(SLOW))


def tiny_transformer(**changes: Any) -> WanTransformer3DModel:
    """Three layers, two heads, patch (1, 2, 2); seeded."""
    config: dict[str, Any] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": TINY_TEXT,
        "freq_dim": 32,
        "ffn_dim": 64,
        "num_layers": 3,
        "rope_max_seq_len": 64,
    }
    torch.manual_seed(11)
    model: WanTransformer3DModel = WanTransformer3DModel(**(config | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
    return model.eval()


def tiny_vae(**changes: Any) -> AutoencoderKLWan:
    """Wan 2.1-like: 4 x spatial, 4 x temporal; seeded."""
    config: dict[str, Any] = {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 1, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "latents_mean": [0.1, -0.2, 0.0, 0.3],
        "latents_std": [1.5, 0.7, 1.0, 2.0],
        "scale_factor_spatial": 4,
        "scale_factor_temporal": 4,
    }
    torch.manual_seed(12)
    vae: AutoencoderKLWan = AutoencoderKLWan(**(config | changes))
    return vae.eval()


def tiny_text_encoder(vocabulary: int) -> UMT5EncoderModel:
    """One layer over the bundled tokenizer's words; seeded."""
    torch.manual_seed(13)
    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=TINY_TEXT,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    encoder: UMT5EncoderModel = UMT5EncoderModel(config)
    return encoder.eval()


TINY_MANIFEST: dict[str, Any] = {
    "name": "tiny",
    "components": {
        name: {"source": ".", "subfolder": name}
        for name in ("transformer", "vae", "text_encoder", "tokenizer")
    },
    "schedule": {"sampler": "euler", "steps": 2, "shift": 3.0},
    "chunk": 2,
    "window": 6,
    "sink": 1,
    "context_noise": 0.05,
    "context_noise_added": True,
    "text_length": 32,
    "size": [32, 16],
    "fps": 8,
    "num_frames": 17,
}


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    """A command that a test ran in this process leaves no handler on a stream that is closed."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in [one for one in root.handlers if type(one) is logging.StreamHandler]:
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="session")
def tiny_components(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Component folders of the tiny model, saved once."""
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copytree(BUNDLED / "tokenizer", folder / "tokenizer")
    tiny_transformer().save_pretrained(folder / "transformer")
    tiny_vae().save_pretrained(folder / "vae")
    tiny_text_encoder(51).save_pretrained(folder / "text_encoder")
    return folder


@pytest.fixture
def make_model(tiny_components: Path, tmp_path: Path) -> MakeModel:
    """Make a copy of the tiny model with changes to its manifest; returns its folder."""

    def make(name: str = "model", **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny_components, folder)
        manifest = {k: v for k, v in (TINY_MANIFEST | changes).items() if v is not None}
        (folder / "longtake.json").write_text(json.dumps(manifest))
        return folder

    return make


@pytest.fixture
def load_tiny(make_model: MakeModel) -> Callable[..., CausalModel]:
    """Load the tiny model with changes to its manifest."""

    def load(**changes: Any) -> CausalModel:
        return load_model(read_manifest(make_model(**changes) / "longtake.json"))

    return load


@pytest.fixture(scope="session")
def papercut() -> CausalModel:
    """The bundled model, loaded once."""
    manifest = find_model("papercut").manifest
    if manifest is None:
        pytest.fail("the bundled model has no manifest")
    return load_model(manifest)
