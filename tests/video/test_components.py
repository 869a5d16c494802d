"""Loading: strict, tied, sharded, from one published file, aligned, in half precision."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import UMT5EncoderModel

from longtake.errors import ModelError, RequestError, WeightsError
from longtake.video.components import (
    CausalModel,
    check_text_length,
    load_model,
    load_strictly,
    read_checkpoint,
)
from longtake.video.manifest import read_manifest
from longtake.video.numerics import ALIGNMENT, file_hash

MakeModel = Callable[..., Path]
LoadTiny = Callable[..., CausalModel]
COMPONENTS: dict[str, dict[str, str]] = {
    name: {"source": ".", "subfolder": name}
    for name in ("transformer", "vae", "text_encoder", "tokenizer")
}
# diffusers' names and those of Wan's own checkpoints; in blocks norm2 and norm3 change places
WAN_NAMES = (
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    (".to_out.0.", ".o."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
    ("proj_out", "head.head"),
)


def wan_name(key: str) -> str:
    """A key of diffusers' transformer as the original code names it."""
    for ours, theirs in WAN_NAMES:
        key = key.replace(ours, theirs)
    if key == "scale_shift_table":
        return "head.modulation"
    key = key.replace("scale_shift_table", "modulation")
    swapped = {"norm2": "norm3", "norm3": "norm2"}
    return ".".join(swapped.get(part, part) for part in key.split("."))


def load(folder: Path, **options: Any) -> CausalModel:
    return load_model(read_manifest(folder / "longtake.json"), **options)


def assert_equal_weights(module: nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    state = module.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """A component's weights as transformers and diffusers saved them."""
    (path,) = folder.glob("*.safetensors")
    weights: dict[str, torch.Tensor] = load_file(path)
    return weights


def test_weights_are_those_of_the_libraries_own_loaders(make_model: MakeModel) -> None:
    folder = make_model()
    model = load(folder)
    for module, cls, component in [
        (model.wan.transformer, WanTransformer3DModel, "transformer"),
        (model.vae, AutoencoderKLWan, "vae"),
        (model.text_encoder, UMT5EncoderModel, "text_encoder"),
    ]:
        assert_equal_weights(module, cls.from_pretrained(folder / component).state_dict())
        assert not module.training
        hashes = [h for name, h in model.hashes.items() if name.startswith(f"{component}/")]
        (path,) = (folder / component).glob("*.safetensors")
        assert hashes == [file_hash(path)]


def test_storage_is_aligned(papercut: CausalModel, load_tiny: LoadTiny) -> None:
    for model in (papercut, load_tiny()):
        modules = (model.wan.transformer, model.vae, model.text_encoder)
        pointers = [p.data_ptr() for m in modules for p in m.parameters()]
        assert all(pointer % ALIGNMENT == 0 for pointer in pointers)


def test_tied_embeddings_are_stored_and_kept_once(make_model: MakeModel) -> None:
    folder = make_model()
    saved = weights_of(folder / "text_encoder")
    encoder = load(folder).text_encoder
    assert "encoder.embed_tokens.weight" not in saved
    shared = encoder.get_parameter("shared.weight")
    assert encoder.get_parameter("encoder.embed_tokens.weight") is shared
    assert torch.equal(shared, saved["shared.weight"])
    assert sum(p.numel() for p in encoder.parameters()) == sum(w.numel() for w in saved.values())


def test_tied_embeddings_may_be_stored_twice(make_model: MakeModel) -> None:
    folder = make_model()
    saved = weights_of(folder / "text_encoder")
    both = saved | {"encoder.embed_tokens.weight": saved["shared.weight"].clone()}
    save_file(both, folder / "text_encoder" / "model.safetensors", {"format": "pt"})
    expected = UMT5EncoderModel.from_pretrained(folder / "text_encoder").state_dict()
    assert_equal_weights(load(folder).text_encoder, expected)


def test_embeddings_equal_the_librarys(make_model: MakeModel) -> None:
    folder = make_model()
    model = load(folder)
    encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder").eval()
    tokens = model.tokenizer("a red ball", return_tensors="pt")
    with torch.no_grad():
        expected = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
    assert torch.equal(model.embed("a red ball"), expected)
    assert torch.equal(model.embed("  a   red\tball "), expected)


def test_a_prompt_may_fill_the_models_length_and_not_more(load_tiny: LoadTiny) -> None:
    model = load_tiny(text_length=4)
    assert model.embed("a red ball").shape == (4, 16)
    check_text_length(model.manifest, model.tokenizer, "prompt", "a red ball")
    with pytest.raises(RequestError, match="has 5 tokens, tiny reads 4; at most 4 tokens"):
        check_text_length(model.manifest, model.tokenizer, "prompt", "a big red ball")


def test_sharded_weights(make_model: MakeModel) -> None:
    folder = make_model() / "transformer"
    weights = weights_of(folder)
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    names = [f"diffusion_pytorch_model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    shards = {key: names[place % 3] for place, key in enumerate(weights)}
    for name in names:
        save_file({k: weights[k] for k in weights if shards[k] == name}, folder / name)
    index = {"metadata": {}, "weight_map": shards}
    path = folder / "diffusion_pytorch_model.safetensors.index.json"
    path.write_text(json.dumps(index))
    model = load(folder.parent)
    assert_equal_weights(model.wan.transformer, weights)
    assert [n for n in model.hashes if n.startswith("transformer/")] == [
        f"transformer/{name}" for name in names
    ]
    (folder / names[1]).unlink()
    with pytest.raises(ModelError, match=rf"transformer: .*{names[1]} cannot be read"):
        load(folder.parent)


def test_of_several_variants_the_plain_one_is_taken(make_model: MakeModel) -> None:
    folder = make_model() / "transformer"
    weights = weights_of(folder)
    other = {key: weight.half() for key, weight in weights.items()}
    save_file(other, folder / "diffusion_pytorch_model.fp16.safetensors")
    assert_equal_weights(load(folder.parent).wan.transformer, weights)


PREFIXES = ["", "model.", "model._fsdp_wrapped_module.", "_orig_mod.model.", "module.model."]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_one_published_file(make_model: MakeModel, prefix: str, suffix: str) -> None:
    """The layout of self_forcing_dmd.pt, made by turning diffusers' key map around."""
    key = "generator_ema" if suffix == ".pt" else None
    ref = COMPONENTS["transformer"] | {"file": f"net{suffix}"} | ({"key": key} if key else {})
    folder = make_model(components=COMPONENTS | {"transformer": ref})
    weights = weights_of(folder / "transformer")
    published = {f"{prefix}{wan_name(name)}": weight for name, weight in weights.items()}
    assert f"{prefix}blocks.0.self_attn.q.weight" in published
    assert f"{prefix}blocks.2.ffn.0.bias" in published
    if key:
        other = {name: torch.zeros(1) for name in published}
        torch.save({"generator": other, key: published}, folder / "net.pt")
    else:
        save_file(published, folder / "net.safetensors")
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    model = load(folder)
    assert_equal_weights(model.wan.transformer, weights)
    assert model.hashes[f"transformer/net{suffix}"] == file_hash(folder / f"net{suffix}")


def test_blocks_inside_fsdp_wrappers(tmp_path: Path) -> None:
    inner = "model.blocks.0._fsdp_wrapped_module.self_attn.q.weight"
    torch.save({inner: torch.ones(2)}, tmp_path / "net.pt")
    assert list(read_checkpoint(tmp_path / "net.pt", None)) == ["blocks.0.attn1.to_q.weight"]


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    torch.save({"generator": Path("x")}, tmp_path / "net.pt")
    with pytest.raises(ModelError, match="cannot be read: Weights only load failed"):
        read_checkpoint(tmp_path / "net.pt", "generator")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_keeps_what_the_libraries_keep(make_model: MakeModel, dtype: str) -> None:
    folder = make_model(vae_dtype="fp32")
    model = load(folder, dtype=dtype)
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    transformer = WanTransformer3DModel.from_pretrained(folder / "transformer", torch_dtype=kind)
    encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=kind)
    for module, expected in [(model.wan.transformer, transformer), (model.text_encoder, encoder)]:
        state = expected.state_dict()
        assert_equal_weights(module, state)
        assert {k: w.dtype for k, w in module.state_dict().items()} == {
            key: weight.dtype for key, weight in state.items()
        }
    found = {key: w.dtype for key, w in model.wan.transformer.state_dict().items()}
    assert found["blocks.0.attn1.to_q.weight"] == kind
    assert found["blocks.0.norm2.weight"] == found["scale_shift_table"] == torch.float32
    assert {p.dtype for p in model.vae.parameters()} == {torch.float32}
    assert (model.wan.dtype, model.dtype) == (kind, dtype)


def test_strict_loading_names_all_three_faults() -> None:
    layer = nn.Linear(2, 3)
    weights = {"weight": torch.zeros(2, 3), **{f"extra.{n:02}": torch.zeros(1) for n in range(12)}}
    with pytest.raises(WeightsError) as caught:
        load_strictly(layer, weights, torch.float32, "layer")
    assert str(caught.value) == (
        "layer: weights do not fit; 1 missing: bias; 12 unexpected: extra.00, extra.01, extra.02, "
        "extra.03, extra.04, extra.05, extra.06, extra.07, extra.08, extra.09 and 2 more; "
        "1 wrong shape: weight (got [2, 3], expected [3, 2])"
    )
    assert caught.value.exit_code == 3


def test_a_hub_id_without_a_network_is_a_model_error(make_model: MakeModel) -> None:
    hub = {"source": "nobody/nothing", "subfolder": "transformer"}
    folder = make_model(components=COMPONENTS | {"transformer": hub})
    with pytest.raises(ModelError, match=r"model nobody/nothing: config.json could not be fetched"):
        load(folder)


def test_components_may_lie_in_another_folder(make_model: MakeModel, tmp_path: Path) -> None:
    weights = weights_of(make_model("first") / "vae")
    elsewhere = {"source": "../first", "subfolder": "vae"}
    absolute = {"source": str(tmp_path / "first"), "subfolder": "transformer"}
    changed = COMPONENTS | {"vae": elsewhere, "transformer": absolute}
    assert_equal_weights(load(make_model("second", components=changed)).vae, weights)
