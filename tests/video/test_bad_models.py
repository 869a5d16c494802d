"""Models that are refused: not there, a wrong manifest, configs and weights that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longtake.errors import LISTED_KEYS

Refuse = Callable[..., str]
MakeModel = Callable[..., Path]
SCHEDULE = {"sampler": "euler", "steps": 2, "shift": 3.0}
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"

NAMES: list[tuple[str, str]] = [
    ("nosuch", r"model='nosuch': no such folder or manifest; known names: papercut, self-forcing"),
    ("nobody/nothing", r"model nobody/nothing: model_index.json could not be fetched"),
    ("out", r"model='out': the folder holds neither longtake.json nor model_index.json"),
    ("~no-such-user/model", r"model='~no-such-user/model': no such folder or manifest"),
    ("m" * 300, r"model='m+': no such folder or manifest"),
    ("some.png", r"manifest some.png: not valid JSON"),
    ("self-forcing-1.3b", r"model wlsaidhi/.*: config.json could not be fetched"),
]


@pytest.mark.parametrize(("name", "message"), NAMES, ids=[n[0][:20] for n in NAMES])
def test_models_that_are_not_there(refuse: Refuse, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "some.png").write_bytes(b"\x89PNG\r\n")
    refuse(f"{{make}} --model '{name}'", 3, message)


MANIFESTS: list[tuple[dict[str, Any], str]] = [
    ({"colour": "red"}, r"unknown key 'colour'; known: name, components, "),
    ({"chunk": None}, r"missing key 'chunk'"),
    ({"schedule": None}, r"missing key 'schedule'"),
    ({"chunk": "2"}, r"chunk: got str '2', expected int"),
    ({"chunk": 2.0}, r"chunk: got float 2.0, expected int"),
    ({"recache": 1}, r"recache: got int 1, expected bool"),
    ({"fps": True}, r"fps: got bool True, expected float"),
    ({"licence": 5}, r"licence: got int 5, expected str"),
    ({"size": 32}, r"size: got int 32, expected tuple"),
    ({"size": [32]}, r"size: got 1 values, expected 2"),
    ({"size": [32, "16"]}, r"size: got str '16', expected int"),
    ({"sizes": [[32, 16], 5]}, r"sizes: got int 5, expected tuple"),
    ({"schedule": SCHEDULE | {"sampler": "ddim"}}, r"sampler='ddim': not one of euler, lcm"),
    ({"schedule": SCHEDULE | {"order": 2}}, r"schedule: unknown key 'order'"),
    ({"schedule": "euler"}, r"schedule: got str, expected an object"),
    ({"schedule": SCHEDULE | {"steps": 0}}, r"steps=0 must be above 0"),
    ({"schedule": SCHEDULE | {"shift": 0}}, r"shift=0.0 must be above 0"),
    ({"schedule": SCHEDULE | {"shift": float("nan")}}, r"shift=nan must be above 0"),
    ({"schedule": SCHEDULE | {"timesteps": []}}, r"timesteps=\[\] must be 2 \(steps\) falling"),
    ({"schedule": SCHEDULE | {"timesteps": [1000]}}, r"timesteps=\[1000.0\] must be 2 \(steps\)"),
    ({"schedule": SCHEDULE | {"timesteps": [5, 9]}}, r"timesteps=\[5.0, 9.0\] must be .* falling"),
    ({"schedule": SCHEDULE | {"timesteps": [1001, 9]}}, r"falling numbers from at most 1000"),
    ({"window": 2}, r"window=2 cannot hold sink=1 and a chunk of 2"),
    ({"first_chunk": 6}, r"window=6 cannot hold sink=1 and a chunk of 6"),
    ({"first_chunk": 0}, r"first_chunk=0 must be above 0"),
    ({"chunk": 0}, r"chunk=0 must be above 0"),
    ({"sink": -1}, r"sink=-1 must be 0 or more"),
    ({"fps": 0}, r"fps=0.0 must be above 0"),
    ({"fps": float("nan")}, r"fps=nan must be above 0"),
    ({"fps": float("inf")}, r"fps=inf must be above 0"),
    ({"num_frames": 0}, r"num_frames=0 must be above 0"),
    ({"num_frames": 18}, r"num_frames=18: .*nearest 17 or 21"),
    ({"size": [0, 16]}, r"size=0 must be above 0"),
    ({"size": [30, 16]}, r"size='30x16': .*nearest to 30: 24 or 32"),
    ({"text_length": 0}, r"text_length=0 must be above 0"),
    ({"guidance_scale": -1}, r"guidance_scale=-1.0 must be 0 or more"),
    ({"guidance_scale": float("nan")}, r"guidance_scale=nan must be 0 or more"),
    ({"context_noise": 1.0}, r"context_noise=1.0 must be from 0 to below 1"),
    ({"context_noise": float("nan")}, r"context_noise=nan must be"),
    ({"vae_dtype": "fp8"}, r"vae_dtype='fp8': not one of fp32, bf16, fp16"),
]


@pytest.mark.parametrize(("changes", "message"), MANIFESTS)
def test_manifests_that_are_wrong(
    refuse: Refuse, make_model: MakeModel, changes: dict[str, Any], message: str
) -> None:
    make_model("tiny", **changes)
    # its own default length or size reads like a request's
    refuse("{tiny}", 2 if "nearest" in message else 3, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"manifest tiny/longtake.json: not valid JSON"),
        ("\xff", r"manifest tiny/longtake.json: not valid JSON"),
        ("[]", r"tiny/longtake.json: got list, expected an object"),
        ('{"name": "a"}', r"tiny/longtake.json: missing key 'components'"),
    ],
)
def test_manifests_that_cannot_be_read(
    refuse: Refuse, make_model: MakeModel, text: str, message: str
) -> None:
    (make_model("tiny") / "longtake.json").write_text(text, encoding="latin-1")
    refuse("{tiny}", 3, message)


def test_components_that_are_missing(refuse: Refuse, make_model: MakeModel) -> None:
    folder = make_model("tiny")
    manifest = json.loads((folder / "longtake.json").read_text())

    def rewrite(**components: Any) -> None:
        kept = {k: v for k, v in (manifest["components"] | components).items() if v is not None}
        (folder / "longtake.json").write_text(json.dumps(manifest | {"components": kept}))

    rewrite(vae=None, tokenizer=None)
    refuse("{tiny}", 3, r"manifest tiny: components lack vae, tokenizer")
    rewrite(vae={"source": "nowhere"})
    refuse("{tiny}", 3, r"model tiny: folder .*/tiny/nowhere does not exist")
    rewrite(vae={"source": "~no-such-user/vae"})
    refuse("{tiny}", 3, r"model tiny: folder ~no-such-user/vae does not exist")
    rewrite(vae={"source": "nobody/nothing"})
    refuse("{tiny}", 3, r"model nobody/nothing: config.json could not be fetched")
    rewrite(vae={"subfolder": "vae"})
    refuse("{tiny}", 3, r"components.vae: missing key 'source'")
    rewrite(vae={"source": ".", "subfolder": "vae", "file": "none.pt"})
    refuse("{tiny}", 3, r"checkpoint .*/tiny/none.pt does not exist")


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("transformer", {"_class_name": "FluxTransformer2DModel"}, r"got a Flux.*runs WanTransformer3"),
    ("vae", {"_class_name": "AutoencoderKL"}, r"got a AutoencoderKL, hybrid mode runs Autoenc"),
    ("transformer", {"num_layers": None}, r"config lacks 'num_layers'"),
    ("transformer", {"num_layers": "three"}, r"config is not usable: num_layers"),
    ("transformer", {"patch_size": 2}, r"config is not usable"),
    ("transformer", {"num_layers": 0.5}, r"config is not usable: num_layers"),
    ("vae", {"z_dim": None}, r"config lacks 'z_dim'"),
    ("vae", {"dim_mult": 2}, r"config is not usable"),
    ("vae", {"dim_mult": []}, r"config is not usable"),
    ("vae", {"scale_factor_temporal": 0}, r"config is not usable: scale_factor_temporal"),
    ("text_encoder", {"d_model": None}, r"config lacks 'd_model'"),
    ("text_encoder", {"architectures": ["CLIPTextModel"]}, r"text_encoder: got CLIPTextModel, exp"),
    ("text_encoder", {"architectures": None}, r"text_encoder: got None, expected UMT5EncoderModel"),
    ("transformer", {"rope_max_seq_len": "long"}, r"tiny transformer: config.json is not usa"),
]


@pytest.mark.parametrize(("component", "changes", "message"), CONFIGS)
def test_configs_that_are_wrong(
    refuse: Refuse, make_model: MakeModel, component: str, changes: dict[str, Any], message: str
) -> None:
    path = make_model("tiny") / component / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    refuse("{tiny}", 3, message)


def test_configs_that_are_not_there(refuse: Refuse, make_model: MakeModel) -> None:
    path = make_model("tiny") / "transformer" / "config.json"
    path.write_text("{")
    refuse("{tiny}", 3, r"transformer/config.json: cannot be read as JSON")
    path.write_text("[]")
    refuse("{tiny}", 3, r"transformer/config.json: got list, expected an object")
    path.unlink()
    refuse("{tiny}", 3, r"model tiny: .*transformer/config.json does not exist")
    shutil.rmtree(path.parent)
    refuse("{tiny}", 3, r"model tiny: .*transformer/config.json does not exist")


Weights = dict[str, torch.Tensor]


def renamed(weights: Weights) -> Weights:
    first, *rest = weights
    return {f"old.{first}": weights[first], **{key: weights[key] for key in rest}}


def crowded(weights: Weights) -> Weights:
    return weights | {f"extra.{n:02}": torch.zeros(1) for n in range(12)}


CHANGES: list[tuple[Callable[[Weights], Weights], str]] = [
    (
        lambda w: {k: v for k, v in w.items() if k != "proj_out.bias"},
        r"tiny transformer: weights do not fit; 1 missing: proj_out.bias$",
    ),
    (lambda w: w | {"lora.up": torch.zeros(1)}, r"weights do not fit; 1 unexpected: lora.up$"),
    (renamed, r"1 missing: \S+; 1 unexpected: old\.\S+$"),
    (crowded, r"12 unexpected: extra.00, extra.01, .*extra.09 and 2 more$"),
    (
        lambda w: w | {"proj_out.bias": torch.zeros(5)},
        r"1 wrong shape: proj_out.bias \(got \[5\], expected \[16\]\)$",
    ),
    (
        lambda w: w | {"proj_out.bias": torch.zeros(16, dtype=torch.int32)},
        r"tiny transformer: proj_out.bias is torch.int32, expected floating point",
    ),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[c[1][-20:] for c in CHANGES])
def test_weights_that_do_not_fit(
    refuse: Refuse, make_model: MakeModel, change: Callable[[Weights], Weights], message: str
) -> None:
    path = make_model("tiny") / TRANSFORMER
    save_file(change(load_file(path)), path)
    refuse("{tiny}", 3, message)
    assert LISTED_KEYS == 10


def test_weights_that_cannot_be_read(refuse: Refuse, make_model: MakeModel) -> None:
    path = make_model("tiny") / TRANSFORMER
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole[:100], b"", b"\0" * 64):
        path.write_bytes(damaged)
        refuse("{tiny}", 3, r"transformer: .*model.safetensors cannot be read")
    path.unlink()
    refuse("{tiny}", 3, r"transformer: no .safetensors file in .*tiny/transformer")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "none.safetensors"}}, r"none.safetensors cannot be read"),
        ({}, r"index.json lacks a weight_map"),
        ({"weight_map": ["a"]}, r"index.json lacks a weight_map"),
    ],
)
def test_shards_that_are_missing(
    refuse: Refuse, make_model: MakeModel, index: dict[str, Any], message: str
) -> None:
    path = make_model("tiny") / f"{TRANSFORMER}.index.json"
    path.write_text(json.dumps(index))
    refuse("{tiny}", 3, message)


def test_tokenizers_that_cannot_be_read(refuse: Refuse, make_model: MakeModel) -> None:
    folder = make_model("tiny", closed_vocabulary=True) / "tokenizer"
    (folder / "tokenizer.json").write_text("{}")
    refuse("{tiny}", 3, r"model tiny: .*tokenizer.json cannot be read")
    (folder / "tokenizer.json").unlink()
    refuse("{tiny}", 3, r"model tiny: .*tokenizer.json does not exist")


CHECKPOINTS: list[tuple[Any, str]] = [
    ({"generator": {}}, r"checkpoint .*/net.pt: no entry 'generator_ema'; has generator"),
    ([1, 2], r"checkpoint .*/net.pt: no entry 'generator_ema'"),
    ({"generator_ema": {"step": 5}}, r"generator_ema is not a dictionary of tensors"),
    ({"generator_ema": torch.zeros(2)}, r"generator_ema is not a dictionary of tensors"),
    ({"generator_ema": {"head.head.bias": torch.zeros(16)}}, r"missing: blocks\.0\..* more$"),
    (b"no checkpoint", r"checkpoint .*/net.pt cannot be read"),
]


@pytest.mark.parametrize(("data", "message"), CHECKPOINTS, ids=[c[1][-20:] for c in CHECKPOINTS])
def test_checkpoints_that_are_wrong(
    refuse: Refuse, make_model: MakeModel, data: Any, message: str
) -> None:
    components = {
        name: {"source": ".", "subfolder": name} for name in ("vae", "text_encoder", "tokenizer")
    }
    one_file = {"file": "net.pt", "key": "generator_ema"}
    components["transformer"] = {"source": ".", "subfolder": "transformer", **one_file}
    path = make_model("tiny", components=components) / "net.pt"
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        torch.save(data, path)
    refuse("{tiny}", 3, message)
