"""What a pipeline of diffusers takes and makes, read without importing it. No torch.

The signature is read from the source of the installed diffusers, sizes from ``model_index.json``
and the configs beside it. ``FAMILIES`` says what each family's own code does with frame count and
size: it rounds, cuts or pads in silence, so clip mode must know first.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from longtake.errors import ModelError
from longtake.video.manifest import PIPELINE_INDEX
from longtake.video.source import ModelSource, hub_file, read_json

REQUIRED: Final = "<required>"
OPAQUE: Final = "<not a literal>"
NEEDED = ("prompt", "num_frames", "height", "width", "generator", "output_type")
CALLBACK = "callback_on_step_end"
PIPELINE_CLASS = re.compile(r"^class (\w*Pipeline\w*)\(", re.MULTILINE)
REFUSED = {"AllegroPipeline": "its VAE decodes in tiles only, which clip mode does not switch on"}


@dataclass(frozen=True, slots=True)
class FrameRule:
    """Legal frame counts: ``offset + stride * k`` for one of the offsets."""

    stride: int
    offsets: tuple[int, ...] = (1,)

    def __str__(self) -> str:
        return " or ".join(f"{o}+{self.stride}k" if o else f"{self.stride}k" for o in self.offsets)

    def allows(self, frames: int) -> bool:
        """True for a count that the model makes as it is."""
        return frames > 0 and any((frames - o) % self.stride == 0 for o in self.offsets)

    def at_least(self, frames: int) -> int:
        """Smallest legal count that is not below ``frames``."""
        return next(n for n in range(frames, frames + self.stride + 1) if self.allows(n))

    def nearest(self, frames: int) -> str:
        """``"33 or 37"``: the legal counts around an illegal one."""
        above = self.at_least(frames)
        below = [n for n in range(max(1, frames - self.stride), frames) if self.allows(n)]
        return f"{below[-1]} or {above}" if below else str(above)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a pipeline makes; None for what is not known.

    Attributes:
        rule: legal frame counts.
        multiple: width and height are multiples of these.
        fps: rate of the family's training data.
        size, num_frames: defaults that do not stand in the signature.
    """

    rule: FrameRule | None = None
    multiple: tuple[int, int] = (1, 1)
    fps: float | None = None
    size: tuple[int, int] | None = None
    num_frames: int | None = None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline folder or repository whose small files were read.

    Attributes:
        source: where it was found.
        name: class of diffusers.
        index: ``model_index.json``.
        parameters: defaults of ``__call__`` by name.
    """

    source: ModelSource
    name: str
    index: Mapping[str, Any]
    parameters: Mapping[str, Any]

    def config(self, component: str, file: str = "config.json") -> dict[str, Any]:
        """The config of a component."""
        return _small_file(self.source, file, component)

    def has(self, component: str) -> bool:
        """True where the component is part of this model."""
        entry = self.index.get(component)
        return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None


def read_pipeline(source: ModelSource) -> Pipeline:
    """Read what a pipeline is, and refuse one that cannot run as a single chunk.

    Raises:
        ModelError: unknown to the installed diffusers, or lacking what a run needs.
    """
    index = _small_file(source, PIPELINE_INDEX, None)
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise ModelError(f"model {source.name}: its pipeline is code of its own, which is not run")
    parameters = call_parameters(name)
    where = f"model {source.name}: {name}"
    if parameters is None:
        raise ModelError(f"{where} is no pipeline of the installed diffusers")
    if name in REFUSED:
        raise ModelError(f"{where}: {REFUSED[name]}")
    absent = [parameter for parameter in NEEDED if parameter not in parameters]
    if absent:
        raise ModelError(f"{where} makes no video from text: takes no {', '.join(absent)}")
    if CALLBACK not in parameters:
        raise ModelError(f"{where} takes no {CALLBACK}, so there is neither progress nor stop")
    extra = [p for p, value in parameters.items() if value == REQUIRED and p not in NEEDED]
    extra = [parameter for parameter in extra if parameter != "image"]
    if extra:
        raise ModelError(f"{where} needs {', '.join(extra)}, which no request can give")
    return Pipeline(source, name, index, parameters)


def call_parameters(name: str) -> dict[str, Any] | None:
    """Parameters of a pipeline's ``__call__`` with their defaults; None for no such class.

    Read from source, for importing a pipeline imports torch.
    """
    path = _pipeline_files().get(name)
    if path is None:
        return None
    tree = ast.parse(path.read_text(encoding="utf-8"))
    class_ = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    call = next((n for n in class_.body if getattr(n, "name", None) == "__call__"), None)
    if not isinstance(call, ast.FunctionDef):
        bases = [base.id for base in class_.bases if isinstance(base, ast.Name)]
        inherited = (call_parameters(base) for base in bases)
        return next((parameters for parameters in inherited if parameters is not None), None)
    names = [a.arg for a in call.args.args][1:]
    defaults = [_literal(node) for node in call.args.defaults]
    positional = [*[REQUIRED] * (len(names) - len(defaults)), *defaults]
    keyword = zip(call.args.kwonlyargs, call.args.kw_defaults, strict=True)
    found = dict(zip(names, positional, strict=True))
    return found | {a.arg: REQUIRED if node is None else _literal(node) for a, node in keyword}


@lru_cache(maxsize=1)
def _pipeline_files() -> dict[str, Path]:
    """Source file of every pipeline class of the installed diffusers."""
    spec = find_spec("diffusers")
    if spec is None or spec.origin is None:
        return {}
    files = sorted((Path(spec.origin).parent / "pipelines").rglob("pipeline_*.py"))
    texts = ((path, path.read_text(encoding="utf-8")) for path in files)
    return {name: path for path, text in texts for name in PIPELINE_CLASS.findall(text)}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return OPAQUE


def _small_file(source: ModelSource, name: str, component: str | None) -> dict[str, Any]:
    if source.pipeline is None:
        raise ModelError(f"model {source.name}: has no pipeline")
    folder = Path(source.pipeline)
    if not folder.is_dir():
        return read_json(Path(hub_file(source.pipeline, name, component, None)))
    path = folder / (component or "") / name
    if not path.is_file():
        raise ModelError(f"model {source.name}: {component or 'pipeline'}: {path} does not exist")
    return read_json(path)


def geometry_of(pipeline: Pipeline) -> Geometry:
    """What the pipeline makes; nothing is known of a family that is not in ``FAMILIES``.

    Raises:
        ModelError: a config lacks a value, or the family cannot keep the frame count.
    """
    family = FAMILIES.get(pipeline.name)
    if family is None:
        return Geometry()
    try:
        return family(pipeline)
    except (KeyError, TypeError, ValueError) as error:
        where = f"model {pipeline.source.name}: {pipeline.name}"
        raise ModelError(f"{where}: a config is not usable: {error!r}") from error


def _wan(pipeline: Pipeline) -> Geometry:
    """Wan 2.1 and 2.2. The pipeline insists on multiples of 16 whatever its VAE needs."""
    vae = pipeline.config("vae")
    first = "transformer" if pipeline.has("transformer") else "transformer_2"
    _, patch_high, patch_wide = pipeline.config(first)["patch_size"]
    space = vae.get("scale_factor_spatial", 8)
    return Geometry(
        rule=FrameRule(vae.get("scale_factor_temporal", 4)),
        multiple=(math.lcm(16, space * patch_wide), math.lcm(16, space * patch_high)),
        # per-token timesteps mark the 5B model, trained at 24; the others at 16
        fps=24.0 if pipeline.index.get("expand_timesteps") else 16.0,
    )


def _ltx(pipeline: Pipeline) -> Geometry:
    """LTX-Video; its rate is an argument of the call."""
    vae = pipeline.config("vae")
    halvings = 2 ** sum(vae["spatio_temporal_scaling"])
    space = vae.get("spatial_compression_ratio") or vae["patch_size"] * halvings
    time = vae.get("temporal_compression_ratio") or vae["patch_size_t"] * halvings
    side = math.lcm(32, space * pipeline.config("transformer")["patch_size"])
    return Geometry(rule=FrameRule(time), multiple=(side, side))


def _cogvideox(pipeline: Pipeline) -> Geometry:
    """CogVideoX. Its VAE decodes latent frames in pairs, an odd one first: 5 asked for gives 8."""
    vae, transformer = pipeline.config("vae"), pipeline.config("transformer")
    space = 2 ** (len(vae["block_out_channels"]) - 1)
    side = math.lcm(8, space * transformer["patch_size"])
    return Geometry(
        rule=FrameRule(2 * int(vae["temporal_compression_ratio"]), (0, 1)),
        multiple=(side, side),
        fps=16.0 if transformer.get("patch_size_t") else 8.0,
        size=(transformer["sample_width"] * space, transformer["sample_height"] * space),
        num_frames=transformer["sample_frames"],
    )


def _hunyuan(pipeline: Pipeline) -> Geometry:
    vae, transformer = pipeline.config("vae"), pipeline.config("transformer")
    if transformer.get("image_condition_type") == "latent_concat":
        raise ModelError(f"{pipeline.name} cuts the first 4 frames of those asked for")
    side = math.lcm(16, vae["spatial_compression_ratio"] * transformer["patch_size"])
    return Geometry(FrameRule(vae["temporal_compression_ratio"]), (side, side), fps=24.0)


def _mochi(_: Pipeline) -> Geometry:
    """Mochi: every figure stands in the pipeline's code, none in a config."""
    return Geometry(FrameRule(6), (16, 16), fps=30.0, size=(848, 480))


def _animatediff(pipeline: Pipeline) -> Geometry:
    """A model of single images with motion modules: any count."""
    space = 2 ** (len(pipeline.config("vae")["block_out_channels"]) - 1)
    side, sample = math.lcm(8, space), pipeline.config("unet")["sample_size"]
    sides = (sample, sample) if isinstance(sample, int) else (sample[1], sample[0])
    size = (sides[0] * space, sides[1] * space)
    return Geometry(FrameRule(1, (0,)), (side, side), fps=8.0, size=size)


FAMILIES: Mapping[str, Callable[[Pipeline], Geometry]] = {
    "WanPipeline": _wan,
    "WanImageToVideoPipeline": _wan,
    "LTXPipeline": _ltx,
    "LTXImageToVideoPipeline": _ltx,
    "CogVideoXPipeline": _cogvideox,
    "CogVideoXImageToVideoPipeline": _cogvideox,
    "HunyuanVideoPipeline": _hunyuan,
    "HunyuanVideoImageToVideoPipeline": _hunyuan,
    "MochiPipeline": _mochi,
    "AnimateDiffPipeline": _animatediff,
}
