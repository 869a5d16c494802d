"""Clip mode: a pipeline of diffusers runs as the one chunk of a video.

The call is diffusers' own: one CPU generator with the seed, the plan's arguments, nothing replaced,
so the pixels are those of a direct call. Around it stand strict loading, progress, the stop flag
and the check that the video has the frames and the size that were asked for.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import nn

from longtake.errors import ModelError, RequestError, WeightsError
from longtake.video.attention_backends import Backend, choose_backend
from longtake.video.clip_attention import clip_attention
from longtake.video.clip_models import Pipeline, read_pipeline
from longtake.video.clip_plan import ClipPlan, make_clip_plan
from longtake.video.clip_preview import ClipPictures
from longtake.video.numerics import file_hash, torch_dtype
from longtake.video.rollout import OnStep, StepEvent, StopFlag
from longtake.video.source import ModelSource, read_json

__all__ = ["ClipChunk", "ClipModel", "ClipPlan", "clip_rollout", "load_pipeline", "make_clip_plan"]

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
NO_LIMIT = 1_000_000  # tokenizers without a limit of their own say 10**30


@dataclass(slots=True)
class ClipModel:
    """A loaded pipeline.

    Attributes:
        pipeline: the diffusers object; runs work on copies and leave it as it is.
        device, dtype: where and how it computes.
        hashes: SHA-256 of every weight file, by path relative to the model's folder.
    """

    pipeline: Any
    device: torch.device
    dtype: str
    hashes: dict[str, str]

    @property
    def attention(self) -> Backend:
        """What computes attention where a plan replaces diffusers' own."""
        return choose_backend("auto", self.device, torch_dtype(self.dtype))


@dataclass(frozen=True, slots=True)
class ClipChunk:
    """The finished clip.

    Attributes:
        frames: pixels [T, H, W, 3], uint8, on the CPU: round(255 x) of diffusers' 0..1.
        timings: seconds for denoise (text encoding included) and decode.
    """

    frames: torch.Tensor
    timings: dict[str, float]


class _StopError(Exception):
    """The stop flag was raised between two denoising steps."""


class _Progress:
    """``callback_on_step_end``: tells of a step, reads the stop flag, notes when the last ended.

    ``told`` is the stop flag and who is told before and after every step.
    """

    def __init__(
        self, plan: ClipPlan, told: tuple[StopFlag | None, OnStep | None, OnStep | None]
    ) -> None:
        self._plan = plan
        self._stop, self._on_start, self._on_step = told
        self._pictures = ClipPictures()
        self.denoised: float | None = None

    def __call__(
        self, pipeline: Any, index: int, _timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        """After every step, as diffusers calls it; the tensors go back as they came."""
        # a scheduler of second order makes more steps than were asked for
        steps = getattr(pipeline, "num_timesteps", None) or self._plan.steps or index + 1
        last = index + 1 >= steps
        if last:
            _synchronize(pipeline.device)
            self.denoised = perf_counter()
        if self._on_step is not None:
            picture = self._pictures.after(pipeline, index + 1, tensors.get("latents"))
            self._on_step(StepEvent(0, 1, index + 1, steps, picture))
        if not last and self._stop is not None and self._stop():
            raise _StopError
        if not last:
            self.begin(index + 1, steps)
        return tensors

    def begin(self, step: int, steps: int) -> None:
        """Before a step, counted from 0."""
        if self._on_start is not None:
            self._on_start(StepEvent(0, 1, step, steps))


def load_pipeline(
    source: ModelSource, *, device: torch.device | None = None, dtype: str = "fp32"
) -> ClipModel:
    """Load a pipeline's components, every weight strictly.

    Args:
        source: where it is; a hub repository is downloaded first.
        device: where to put it; the CPU by default.
        dtype: fp32, bf16 or fp16, for all components; a manifest may name the VAE's own.

    Raises:
        ModelError: a folder, file or class is missing or damaged.
        WeightsError: keys or shapes do not match.
    """
    device = device or torch.device("cpu")
    pipeline = read_pipeline(source)
    folder = _folder(source)
    hashes: dict[str, str] = {}
    with _quiet():
        parts = {
            component: _load_component(pipeline, component, folder, dtype, hashes)
            for component in pipeline.index
            if pipeline.has(component)
        }
        try:
            # the base class would not know this pipeline's optional components and read them anew
            loaded = getattr(diffusers, pipeline.name).from_pretrained(folder, **parts)
        except Exception as error:  # a pipeline's constructor can trip over anything
            raise ModelError(f"model {source.name}: {pipeline.name}: {error}") from error
    strange = [name for name, part in parts.items() if getattr(loaded, name, None) is not part]
    if strange:
        raise ModelError(f"model {source.name}: {pipeline.name} replaced {', '.join(strange)}")
    loaded.set_progress_bar_config(disable=True)
    return ClipModel(loaded.to(device), device, dtype, hashes)


def clip_rollout(
    plan: ClipPlan,
    model: ClipModel,
    *,
    image: Pixels | None = None,
    stop: StopFlag | None = None,
    on_start: OnStep | None = None,
    on_step: OnStep | None = None,
) -> Iterator[ClipChunk]:
    """Make a clip: one chunk, or none if ``stop`` was raised meanwhile.

    Args:
        plan: what to make.
        model: the pipeline that the plan was made for.
        image: start image [H, W, 3] of the plan's size, where the plan starts from one.
        stop: read before the first and between all denoising steps.
        on_start: told before every denoising step; the text is encoded in the first one.
        on_step: told after every denoising step.

    Raises:
        RequestError: the image is missing, unwanted or of the wrong size, or a text is too long.
        ModelError: the pipeline fails, or makes another video than was asked for.
    """
    if type(model.pipeline).__name__ != plan.pipeline:
        got = type(model.pipeline).__name__
        raise ModelError(f"got a {got}, expected the plan's {plan.pipeline}")
    _check_image(plan, image)
    _check_text_length(plan, model.pipeline)
    return _run(plan, model, image, (stop, on_start, on_step))


def _run(
    plan: ClipPlan,
    model: ClipModel,
    image: Pixels | None,
    told: tuple[StopFlag | None, OnStep | None, OnStep | None],
) -> Iterator[ClipChunk]:
    stop = told[0]
    if stop is not None and stop():
        return
    progress = _Progress(plan, told)
    arguments = plan.arguments
    if image is not None:
        arguments["image"] = Image.fromarray(image)
    began = perf_counter()
    progress.begin(0, plan.steps or 1)
    try:
        with clip_attention(model.pipeline, plan.reading, model.attention):
            output = _own_copy(model.pipeline, plan)(
                **arguments,
                generator=torch.Generator("cpu").manual_seed(plan.seed),
                callback_on_step_end=progress,
            )
    except _StopError:
        return
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(f"{plan.pipeline} cannot run this: {error}") from error
    frames = _pixels(output, plan)
    ended = perf_counter()
    denoised = progress.denoised or ended
    yield ClipChunk(frames, {"denoise": denoised - began, "decode": ended - denoised})


def _own_copy(pipeline: Any, plan: ClipPlan) -> Any:
    """The pipeline with a scheduler of this run alone: it holds state, and the plan's shift."""
    own = copy.copy(pipeline)
    scheduler = getattr(pipeline, "scheduler", None)
    if scheduler is not None:
        changed = dict([plan.shift]) if plan.shift else {}
        own.scheduler = type(scheduler).from_config(scheduler.config, **changed)
    return own


def _pixels(output: Any, plan: ClipPlan) -> torch.Tensor:
    """Frames [T, H, W, 3] as uint8, checked against the plan."""
    videos = getattr(output, "frames", None)
    floats = np.asarray(videos[0]) if videos is not None else np.zeros(0)
    width, height = plan.size
    expected = (plan.num_frames, height, width, 3)
    if floats.shape != expected:
        got = "x".join(str(n) for n in floats.shape)
        wanted = "x".join(str(n) for n in expected)
        raise ModelError(f"{plan.pipeline} made another video: got {got}, asked for {wanted}")
    frames = torch.empty(expected, dtype=torch.uint8)
    for place, frame in enumerate(floats):
        pixels = torch.from_numpy(frame)
        if not pixels.isfinite().all():
            raise ModelError(f"{plan.pipeline}: frame {place} is not finite; try dtype=fp32")
        frames[place] = (pixels * 255).round().clamp(0, 255).to(torch.uint8)
    return frames


def _check_image(plan: ClipPlan, image: Pixels | None) -> None:
    if image is None:
        if plan.from_image:
            raise RequestError("image", None, f"{plan.pipeline} starts from an image", "give one")
        return
    if not plan.from_image:
        raise RequestError("image", "given", "the plan was made without one", "leave it out")
    width, height = plan.size
    if image.shape != (height, width, 3) or image.dtype != np.uint8:
        got = f"got {'x'.join(str(n) for n in image.shape)} {image.dtype}"
        raise RequestError("image", plan.request.image, got, f"expected {height}x{width}x3 uint8")


def _check_text_length(plan: ClipPlan, pipeline: Any) -> None:
    """Refuse what the pipeline would cut off and only log."""
    tokenizer = getattr(pipeline, "tokenizer", None)
    if tokenizer is None:
        return
    limit = plan.text_length or tokenizer.model_max_length
    for field, text in (("prompt", plan.prompts[0]), ("negative_prompt", plan.negative_prompt)):
        count = len(tokenizer(text, truncation=False, verbose=False).input_ids)
        if limit < NO_LIMIT and count > limit:
            reason = f"has {count} tokens, {plan.pipeline} reads {limit}"
            raise RequestError(field, text, reason, f"at most {limit} tokens")


def _folder(source: ModelSource) -> Path:
    folder = Path(source.pipeline or "")
    if source.pipeline is not None and folder.is_dir():
        return folder
    try:
        return Path(diffusers.DiffusionPipeline.download(source.pipeline, use_safetensors=True))
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise ModelError(f"model {source.name}: download failed: {error}") from error


def _load_component(
    pipeline: Pipeline, component: str, root: Path, dtype: str, hashes: dict[str, str]
) -> Any:
    """One component by its library's own loader, as ``DiffusionPipeline`` would call it."""
    name = f"model {pipeline.source.name}: {component}"
    cls, folder = _component_class(pipeline, component, name), root / component
    if not folder.is_dir():
        raise ModelError(f"{name}: {folder} does not exist")
    if issubclass(cls, nn.Module):
        manifest = pipeline.source.manifest
        own = manifest.vae_dtype if manifest is not None and component == "vae" else None
        return _load_module(cls, folder, name, torch_dtype(own or dtype), hashes)
    try:
        return cls.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers and schedulers raise whatever they trip over
        raise ModelError(f"{name}: {error}") from error


def _component_class(pipeline: Pipeline, component: str, name: str) -> Any:
    """The class that ``model_index.json`` names, from one of the two libraries alone."""
    library, class_name = pipeline.index[component]
    homes: dict[str, Any] = {"diffusers": diffusers, "transformers": transformers}
    try:
        home = homes.get(library) or importlib.import_module(f"diffusers.pipelines.{library}")
        cls = getattr(home, class_name)
    except (ImportError, AttributeError, TypeError) as error:
        raise ModelError(f"{name}: no class {class_name!r} in {library!r} here") from error
    if not isinstance(cls, type):
        raise ModelError(f"{name}: {library}.{class_name} is not a class")
    return cls


def _load_module(
    cls: Any, folder: Path, name: str, dtype: torch.dtype, hashes: dict[str, str]
) -> nn.Module:
    """A component with weights; the library's report of keys must be empty."""
    ours = issubclass(cls, diffusers.ModelMixin)
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{name}: {config} does not exist")
    declared = read_json(config).get("_class_name") if ours else None
    if declared not in (None, cls.__name__):
        raise ModelError(f"{name}: config.json is of a {declared}, expected {cls.__name__}")
    for path in _weight_files(folder, "diffusion_pytorch_model" if ours else "model", name):
        _check_weight_file(path, name)
        hashes[f"{folder.name}/{path.name}"] = file_hash(path)
    try:
        module, report = cls.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **{"torch_dtype" if ours else "dtype": dtype},
        )
    except Exception as error:  # a config can trip any check of the library's constructors
        raise ModelError(f"{name}: {error}") from error
    _check_report(report, name)
    loaded: nn.Module = module
    return loaded


def _check_report(report: Mapping[str, Any], name: str) -> None:
    shapes = [
        f"{key} (got {list(got)}, expected {list(expected)})"
        for key, got, expected in report["mismatched_keys"]
    ]
    missing, unexpected = report["missing_keys"], report["unexpected_keys"]
    if missing or unexpected or shapes:
        raise WeightsError(name, missing=missing, unexpected=unexpected, shapes=shapes)


def _weight_files(folder: Path, stem: str, name: str) -> list[Path]:
    """The files that the library will read: one, or the shards of an index."""
    index = folder / f"{stem}.safetensors.index.json"
    names = [f"{stem}.safetensors"]
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    absent = [folder / file for file in names if not (folder / file).is_file()]
    if absent:
        raise ModelError(f"{name}: {absent[0]} does not exist")
    return [folder / file for file in names]


def _check_weight_file(path: Path, name: str) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{name}: {path} cannot be read: {error}") from error


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars and no warnings of the two libraries: what they would warn of is an error here."""
    loggers: tuple[Any, Any] = diffusers.utils.logging, transformers.utils.logging
    before = [(one.get_verbosity(), one.is_progress_bar_enabled()) for one in loggers]
    for logger in loggers:
        logger.set_verbosity_error()
        logger.disable_progress_bar()
    try:
        yield
    finally:
        for logger, (level, bars) in zip(loggers, before, strict=True):
            logger.set_verbosity(level)
            if bars:
                logger.enable_progress_bar()
