"""A model stays loaded while it is the same, and only then."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.errors import ModelError
from longtake.video.components import CausalModel
from longtake.video.manifest import Manifest
from longtake.video.memory import release_memory, resident_bytes
from longtake.video.model_cache import ModelCache
from longtake.video.numerics import fingerprint
from longtake.video.source import ModelSource, find_model

MakeModel = Callable[..., Path]
CPU = torch.device("cpu")
HOW = (CPU, "fp32", "auto")


def read(folder: Path) -> tuple[ModelSource, Manifest]:
    """A source and its manifest, read anew."""
    source = find_model(str(folder))
    assert source.manifest is not None
    return source, source.manifest


def load(models: ModelCache, folder: Path, how: Any = HOW) -> CausalModel:
    """The folder's model by the cache."""
    return models.causal(*read(folder), how)


def touch(path: Path) -> None:
    """Another time of change, as a copy over the file has."""
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))


def test_the_same_model_is_loaded_once(make_model: MakeModel) -> None:
    models, folder = ModelCache(), make_model()
    first = load(models, folder)
    assert load(models, folder) is first
    assert models.tokenizer(read(folder)[1]) is first.tokenizer
    assert models.name == str(folder)


@pytest.mark.parametrize(
    "name",
    [
        "transformer/diffusion_pytorch_model.safetensors",
        "transformer/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json",
    ],
)
def test_a_changed_file_is_noticed(make_model: MakeModel, name: str) -> None:
    models, folder = ModelCache(), make_model()
    first = load(models, folder)
    touch(folder / name)
    assert models.tokenizer(read(folder)[1]) is not first.tokenizer
    assert load(models, folder) is not first


def test_a_changed_manifest_dtype_or_device_is_another_model(make_model: MakeModel) -> None:
    models, folder = ModelCache(), make_model()
    first = load(models, folder)
    other = load(models, folder, (CPU, "bf16", "auto"))
    assert other is not first
    assert other.wan.dtype == torch.bfloat16
    manifest = json.loads((folder / "longtake.json").read_text())
    (folder / "longtake.json").write_text(json.dumps({**manifest, "sink": 0}))
    assert load(models, folder, (CPU, "bf16", "auto")).manifest.sink == 0


def test_one_model_at_a_time(make_model: MakeModel) -> None:
    models, one, two = ModelCache(), make_model("one"), make_model("two")
    first = load(models, one)
    load(models, two)
    assert models.name == str(two)
    assert load(models, one) is not first
    models.drop()
    assert models.name is None


def test_a_model_that_does_not_load_leaves_none(make_model: MakeModel) -> None:
    models, good, bad = ModelCache(), make_model("good"), make_model("bad")
    load(models, good)
    (bad / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError):
        load(models, bad)
    assert models.name is None
    load(models, good)


def test_pipelines_are_kept_too() -> None:
    models, source = ModelCache(), find_model("papercut")
    first = models.pipeline(source, CPU, "fp32")
    assert models.pipeline(find_model("papercut"), CPU, "fp32") is first
    assert source.manifest is not None
    causal = models.causal(source, source.manifest, HOW)
    assert models.causal(source, source.manifest, HOW) is causal
    assert models.pipeline(source, CPU, "fp32") is not first


def test_a_fingerprint_is_computed_once() -> None:
    models = ModelCache()
    marks = models.fingerprint(CPU, torch.float32)
    assert dict(marks) == fingerprint(CPU, torch.float32)
    assert models.fingerprint(CPU, torch.float32) is marks


def test_embeddings_are_kept_for_the_texts_met_last(load_tiny: Callable[..., CausalModel]) -> None:
    model = load_tiny()
    kept = model.embed("a red ball")
    assert model.embed("a red ball") is kept
    for index in range(20):
        model.embed("a blue star " * (index + 1))
        model.embed("a red ball")
    assert model.embed("a red ball") is kept
    assert len(model.embeddings) == 8
    model.embeddings.clear()
    assert torch.equal(model.embed("a red ball"), kept)


def test_memory_is_counted_and_given_back() -> None:
    release_memory()
    before = resident_bytes()
    block = torch.ones(1 << 26)
    assert resident_bytes() - before > 1 << 27
    del block
    release_memory()
    assert resident_bytes() - before < 1 << 27
