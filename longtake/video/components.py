"""Load the components of a causal model: bundled, from a folder, from the hub, from one file.

Weights load strictly: every key must be there, no key may be left over, every shape must fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from safetensors import SafetensorError, safe_open
from torch import nn

from longtake.errors import ModelError, RequestError, WeightsError
from longtake.video.causal_wan import CausalWan
from longtake.video.manifest import ComponentRef, Manifest
from longtake.video.numerics import aligned, file_hash, torch_dtype
from longtake.video.shapes import ModelShape, read_shape
from longtake.video.source import HUB_ID, component_file, hub_file, local_folder, read_json
from longtake.video.stacked_conv import prepare_vae

ENCODERS = ("UMT5EncoderModel", "T5EncoderModel")
INDEX_SUFFIX = ".safetensors.index.json"
TRAINER_PREFIXES = ("model.", "_orig_mod.", "module.")
KEPT_EMBEDDINGS = 8
FSDP = "_fsdp_wrapped_module."


@dataclass(slots=True)
class CausalModel:
    """Everything a rollout needs, on its device.

    Attributes:
        manifest, shape: what was read before loading.
        wan: transformer with the causal processors.
        vae: prepared for streaming; vae_form says how its convolutions run.
        hashes: SHA-256 of every weight file, by path relative to the component.
        embeddings: of the texts met last; the negative prompt is the same in most videos.
    """

    manifest: Manifest
    shape: ModelShape
    wan: CausalWan
    vae: AutoencoderKLWan
    vae_form: str
    text_encoder: nn.Module
    tokenizer: Any
    dtype: str
    hashes: dict[str, str]
    embeddings: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        """Where the transformer lies."""
        return self.wan.device

    def embed(self, prompt: str) -> torch.Tensor:
        """Text embedding [tokens, text_dim] of a prompt, unpadded, cleaned as WanPipeline does."""
        embedding = self.embeddings.pop(prompt, None)
        if embedding is None:
            embedding = self._embed(prompt)
        self.embeddings[prompt] = embedding
        if len(self.embeddings) > KEPT_EMBEDDINGS:
            del self.embeddings[next(iter(self.embeddings))]
        return embedding

    @torch.inference_mode()
    def _embed(self, prompt: str) -> torch.Tensor:
        tokens = self.tokenizer(prompt_clean(prompt), return_tensors="pt")
        output = self.text_encoder(
            tokens.input_ids.to(self.device), tokens.attention_mask.to(self.device)
        )
        embedding: torch.Tensor = output.last_hidden_state[0]
        return embedding


def load_model(
    manifest: Manifest,
    *,
    device: torch.device | None = None,
    dtype: str = "fp32",
    backend: str = "auto",
) -> CausalModel:
    """Load a manifest's components.

    Args:
        manifest: where everything is.
        device: where to put it; the CPU by default.
        dtype: fp32, bf16 or fp16, for transformer and text encoder (and the VAE, unless the
            manifest says otherwise).
        backend: of self-attention, and of cross-attention where it can do it.

    Raises:
        ModelError: a file is missing or damaged; WeightsError: weights do not fit.
    """
    device = device or torch.device("cpu")
    shape = read_shape(manifest)
    hashes: dict[str, str] = {}
    transformer = _build(manifest, "transformer", dtype, hashes)
    vae = _build(manifest, "vae", manifest.vae_dtype or dtype, hashes)
    text_encoder = _build(manifest, "text_encoder", dtype, hashes)
    vae = vae.to(device)
    return CausalModel(
        manifest=manifest,
        shape=shape,
        wan=CausalWan(transformer.to(device), backend),
        vae=vae,
        vae_form=prepare_vae(vae),
        text_encoder=text_encoder.to(device).eval().requires_grad_(False),
        tokenizer=load_tokenizer(manifest),
        dtype=dtype,
        hashes=hashes,
    )


def load_tokenizer(manifest: Manifest) -> Any:
    """The manifest's tokenizer, by ``transformers.AutoTokenizer``."""
    folder = component_folder(manifest, "tokenizer")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises whatever the file made it trip over
        raise ModelError(f"model {manifest.name}: tokenizer {folder}: {error}") from error


def check_text_length(manifest: Manifest, tokenizer: Any, field: str, prompt: str) -> None:
    """Refuse a prompt with more tokens than the model reads; nothing is cut silently.

    Raises:
        RequestError: naming ``field``.
    """
    count, limit = len(tokenizer(prompt_clean(prompt)).input_ids), manifest.text_length
    if count > limit:
        reason = f"has {count} tokens, {manifest.name} reads {limit}"
        raise RequestError(field, prompt, reason, f"at most {limit} tokens")


def component_folder(manifest: Manifest, component: str) -> Path:
    """Local folder of a component, downloaded if it is on the hub."""
    ref = manifest.components[component]
    folder = local_folder(manifest, ref)
    if folder is None:
        folder = _download(ref)
    folder = folder / (ref.subfolder or "")
    if not folder.is_dir():
        raise ModelError(f"model {manifest.name}: {component} folder {folder} does not exist")
    return folder


def load_strictly(
    module: nn.Module, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, name: str
) -> None:
    """Give a module built without weights its weights, in 64-byte aligned storage.

    Parts that the libraries keep in float32 stay so. Tied weights may be stored once.

    Raises:
        WeightsError: keys or shapes do not match.
    """
    expected = module.state_dict()
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [k for k in weights if k not in expected and not any(i in k for i in ignored)]
    tied = getattr(module, "_tied_weights_keys", None) or {}
    missing = [k for k in expected if k not in weights and tied.get(k) not in weights]
    shapes = [
        f"{k} (got {list(w.shape)}, expected {list(expected[k].shape)})"
        for k, w in weights.items()
        if k in expected and w.shape != expected[k].shape
    ]
    if missing or unexpected or shapes:
        raise WeightsError(name, missing=missing, unexpected=unexpected, shapes=shapes)
    kept = _kept_precise(module, dtype)
    both = {key: source for key, source in tied.items() if {key, source} <= expected.keys()}
    state: dict[str, torch.Tensor] = {}
    for key in expected.keys() - both.keys():
        weight = weights[key]
        if not weight.is_floating_point():
            raise ModelError(f"{name}: {key} is {weight.dtype}, expected floating point")
        precise = any(part in key.split(".") for part in kept)
        state[key] = aligned(weight.to(torch.float32 if precise else dtype))
    state |= {key: state[source] for key, source in both.items()}
    module.load_state_dict(state, strict=True, assign=True)
    for key, source in both.items():
        owner, _, attribute = key.rpartition(".")
        setattr(module.get_submodule(owner), attribute, module.get_parameter(source))


def read_weights(folder: Path, hashes: dict[str, str], name: str) -> dict[str, torch.Tensor]:
    """All tensors of a component's safetensors files, sharded or not.

    Raises:
        ModelError: no such file, or a truncated or damaged one.
    """
    weights: dict[str, torch.Tensor] = {}
    for path in _weight_files(folder, name):
        try:
            hashes[f"{name}/{path.name}"] = file_hash(path)
            with safe_open(path, framework="pt") as file:
                weights.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{name}: {path} cannot be read: {error}") from error
    return weights


def read_checkpoint(path: Path, key: str | None) -> dict[str, torch.Tensor]:
    """Weights of a single checkpoint with Wan's own key names, under diffusers' names.

    Published causal checkpoints (Self-Forcing, LongLive, CausVid) are a dictionary of state
    dictionaries whose keys carry a trainer's prefixes.

    Args:
        path: .pt or .safetensors file.
        key: which entry, e.g. ``generator_ema``; None where the file is the state dictionary.
    """
    if not path.is_file():
        raise ModelError(f"checkpoint {path} does not exist")
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                data: Any = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
        else:
            data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load has no error type of its own
        raise ModelError(f"checkpoint {path} cannot be read: {error}") from error
    if key is not None:
        if not isinstance(data, Mapping) or key not in data:
            has = ", ".join(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise ModelError(f"checkpoint {path}: no entry {key!r}; has {has}")
        data = data[key]
    if not isinstance(data, Mapping) or not all(map(torch.is_tensor, data.values())):
        raise ModelError(f"checkpoint {path}: {key or 'the file'} is not a dictionary of tensors")
    return dict(convert_wan_transformer_to_diffusers(dict(_without_prefixes(data))))


def _build(manifest: Manifest, component: str, dtype: str, hashes: dict[str, str]) -> Any:
    ref = manifest.components[component]
    config = read_json(component_file(manifest, ref, "config.json"))
    name = f"{manifest.name} {component}"
    try:
        with init_empty_weights(include_buffers=False):
            module = _empty(component, config)
    except ModelError:
        raise
    except Exception as error:  # a config can trip any check of the library's constructors
        raise ModelError(f"{name}: config.json is not usable: {error}") from error
    if ref.file is not None:
        path = _checkpoint_path(manifest, ref.file, ref.revision)
        weights = read_checkpoint(path, ref.key)
        hashes[f"{component}/{path.name}"] = file_hash(path)
    else:
        weights = read_weights(component_folder(manifest, component), hashes, component)
    load_strictly(module, weights, torch_dtype(dtype), name)
    return module.eval()


def _checkpoint_path(manifest: Manifest, file: str, revision: str | None) -> Path:
    """A checkpoint beside the manifest, or ``owner/repository/path`` on the hub."""
    path = (manifest.folder / Path(file).expanduser()).resolve()
    parts = file.split("/", 2)
    if path.is_file() or len(parts) < 3 or not HUB_ID.match("/".join(parts[:2])):
        return path
    return Path(hub_file("/".join(parts[:2]), parts[2], None, revision))


def _empty(component: str, config: dict[str, Any]) -> nn.Module:
    if component == "transformer":
        return WanTransformer3DModel.from_config(config)  # type: ignore[no-any-return]
    if component == "vae":
        return AutoencoderKLWan.from_config(config)  # type: ignore[no-any-return]
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture not in ENCODERS:
        raise ModelError(f"text_encoder: got {architecture}, expected {' or '.join(ENCODERS)}")
    cls = getattr(transformers, architecture)
    return cls(cls.config_class.from_dict(config))  # type: ignore[no-any-return]


def _weight_files(folder: Path, name: str) -> list[Path]:
    """Files of one set of weights; of several variants in a folder the plain one is taken."""
    indexes = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    if indexes:
        files_by_key = read_json(indexes[0]).get("weight_map")
        if not isinstance(files_by_key, dict):
            raise ModelError(f"{name}: {indexes[0]} lacks a weight_map")
        return [folder / str(shard) for shard in sorted(set(map(str, files_by_key.values())))]
    files = sorted(folder.glob("*.safetensors"), key=lambda p: (p.name.count("."), p.name))
    if not files:
        raise ModelError(f"{name}: no .safetensors file in {folder}")
    return files[:1]


def _kept_precise(module: nn.Module, dtype: torch.dtype) -> frozenset[str]:
    """Parts of the module that its library keeps in float32; transformers does for fp16 alone."""
    if isinstance(module, transformers.PreTrainedModel) and dtype != torch.float16:
        return frozenset()
    return frozenset(getattr(module, "_keep_in_fp32_modules", None) or ())


def _without_prefixes(
    data: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in data.items():
        name = key.replace(FSDP, "")
        while name.startswith(TRAINER_PREFIXES):
            name = name.split(".", 1)[1]
        yield name, value


def _download(ref: ComponentRef) -> Path:
    from huggingface_hub import snapshot_download

    if not HUB_ID.match(ref.source):
        raise ModelError(f"{ref.source!r} is neither a folder nor a hub id")
    patterns = [f"{ref.subfolder}/*"] if ref.subfolder else None
    try:
        found = snapshot_download(ref.source, revision=ref.revision, allow_patterns=patterns)
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise ModelError(f"model {ref.source}: download failed: {error}") from error
    return Path(found)
