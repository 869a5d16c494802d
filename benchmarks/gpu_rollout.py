"""The rollout on a GPU, in Wan2.1-1.3B's shape with random weights at 480x832.

Run ``python -m benchmarks.gpu_rollout [--json] [--tiny] [--budget-s S]``. Every attention backend
is measured with torch.compile off and on; a backend that is not installed gets a line that says
so. Without CUDA it runs a tiny shape on the CPU, which only shows that it works.

What is compiled are the transformer's blocks, in place. The attention processors inside them stay
outside the graphs, since they write the KV cache, whose slots change from chunk to chunk.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from benchmarks.bundled import first_steady, frames_of_chunks, next_chunk
from benchmarks.gpu_models import TINY, WAN_1_3B, RandomParts
from benchmarks.report import markdown, shown
from longtake.video.components import CausalModel
from longtake.video.plan import Plan, make_plan
from longtake.video.request import VideoRequest
from longtake.video.rollout import Rollout

BACKENDS = ("sdpa", "flash", "xformers")
BUDGET_S = 330.0
COMPILE_S = 60.0  # expected of the first compiled case, on top of what it takes without
MEASURED = 6
WARM_UP = 2
GIB = 2**30
HEAD = (
    "backend",
    "compile",
    "fps",
    "first chunk s",
    "chunk s",
    "denoise",
    "VAE decode",
    "other",
    "peak GiB",
    "warm-up s",
    "difference",
    "note",
)


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    backend: str
    compiled: bool


@dataclass(frozen=True, slots=True)
class Result:
    """What a case took.

    Attributes:
        fps: pixel frames of a chunk over the median time of the chunks at a full window.
        first_chunk_s: from an embedded prompt to the first chunk's pixels.
        chunk_s: median time of the chunks at a full window, VAE decode included.
        denoise, decode: share of the transformer's forwards and of the VAE's decoder in it; other
            is the rest: noise, sampler, positions of past keys, pixels to the CPU.
        peak_bytes: most memory that tensors took on the device at once; None without CUDA.
        warm_up_s: the chunks made beforehand, compilation included.
        difference: of the first chunk's latents to the first case's, root mean square, relative.
    """

    fps: float
    first_chunk_s: float
    chunk_s: float
    denoise: float
    decode: float
    other: float
    peak_bytes: int | None
    warm_up_s: float
    difference: float


class Stopwatch:
    """Adds up the time that a module's forwards take on their device."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []
        self._began: Any = None
        self._hooks = [
            module.register_forward_pre_hook(self._start),
            module.register_forward_hook(self._stop),
        ]

    def take(self) -> float:
        """Seconds since the last call; the device must be idle."""
        marks, self._marks = self._marks, []
        if self._cuda:
            return float(sum(began.elapsed_time(ended) for began, ended in marks)) / 1e3
        return float(sum(ended - began for began, ended in marks))

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _start(self, *_: object) -> None:
        self._began = self._now()

    def _stop(self, *_: object) -> None:
        self._marks.append((self._began, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Uncompiled:
    """An attention processor that runs outside the compiled graphs around it."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> Any:
        return self._processor(*args)


def compile_blocks(model: CausalModel, compiler: str = "inductor") -> None:
    """Compile the transformer's blocks in place; the KV cache is written as without.

    All layers share three graphs (before, between and after the two attentions): the processors
    have one class, so that no layer is a new case to torch.
    """
    for block in model.wan.transformer.blocks:
        for attention in (block.attn1, block.attn2):
            attention.set_processor(_Uncompiled(attention.processor))
        block.compile(backend=compiler, dynamic=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is measured.

    Attributes:
        deadline: ``perf_counter`` at which everything should be over.
        chunks: chunks at a full window that are measured, fewer once the deadline has passed.
        compiler: backend of torch.compile.
    """

    deadline: float
    chunks: int = MEASURED
    compiler: str = "inductor"


class Bench:
    """Runs cases one after the other within a time budget.

    Args:
        parts: the model's weights.
        device: where they are.
        limits: how long and how much.
    """

    def __init__(self, parts: RandomParts, device: torch.device, limits: Limits) -> None:
        self._parts = parts
        self._device = device
        self._limits = limits
        self._took: dict[bool, float] = {}
        self._reference: torch.Tensor | None = None
        self.plan = plan_chunks(parts, limits.chunks)

    def run(self, case: Case) -> Result | str:
        """The case's figures, or why there are none."""
        before = self._took.get(False, 0.0)
        expected = self._took.get(case.compiled, before + COMPILE_S if case.compiled else 0.0)
        if perf_counter() + expected > self._limits.deadline:
            return "skipped: the time budget is spent"
        began = perf_counter()
        try:
            result = self._measure(case)
        except Exception as error:  # a case must not take the others with it, whatever it met
            text = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {text[0][:160]}"
        finally:
            gc.collect()  # transformer and processors refer to each other
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        self._took[case.compiled] = perf_counter() - began
        return result

    def _measure(self, case: Case) -> Result:
        model = self._parts.model(case.backend)
        if case.compiled:
            torch.compiler.reset()
            compile_blocks(model, self._limits.compiler)
        warm_up_s = self._warm_up(model)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        watches = [Stopwatch(m, self._device) for m in (model.wan.transformer, model.vae.decoder)]
        try:
            first_s, latents, steady = self._roll_out(model, watches)
        finally:
            model.wan.session = None
            for watch in watches:
                watch.remove()
        cuda = self._device.type == "cuda"
        chunk_s, denoise_s, decode_s = (median(values) for values in zip(*steady, strict=True))
        return Result(
            fps=self.plan.layout.chunk * self.plan.stride / chunk_s,
            first_chunk_s=first_s,
            chunk_s=chunk_s,
            denoise=denoise_s / chunk_s,
            decode=decode_s / chunk_s,
            other=1.0 - (denoise_s + decode_s) / chunk_s,
            peak_bytes=torch.cuda.max_memory_allocated(self._device) if cuda else None,
            warm_up_s=warm_up_s,
            difference=self._difference(latents),
        )

    def _warm_up(self, model: CausalModel) -> float:
        began = perf_counter()
        rollout = Rollout(self.plan, model)
        for _ in range(WARM_UP):
            next_chunk(rollout)
        self._idle()
        model.wan.session = None  # or this rollout's cache would count in the next one's peak
        return perf_counter() - began

    def _roll_out(
        self, model: CausalModel, watches: Sequence[Stopwatch]
    ) -> tuple[float, torch.Tensor, list[tuple[float, float, float]]]:
        """Seconds of the first chunk, its latents; chunk, denoise and decode of the steady ones."""
        warm = first_steady(self.plan)
        steady: list[tuple[float, float, float]] = []
        self._idle()
        began = perf_counter()
        rollout = Rollout(self.plan, model)
        latents = next_chunk(rollout).latents
        self._idle()
        first_s = perf_counter() - began
        for index in range(1, self.plan.layout.count):
            if len(steady) >= 2 and perf_counter() > self._limits.deadline:
                break
            for watch in watches:
                watch.take()
            began = perf_counter()
            next_chunk(rollout)
            self._idle()
            took = perf_counter() - began
            denoise, decode = (watch.take() for watch in watches)
            if index > warm:
                steady.append((took, denoise, decode))
        return first_s, latents, steady

    def _difference(self, latents: torch.Tensor) -> float:
        if self._reference is None:
            self._reference = latents.float()
        error = (latents.float() - self._reference).square().mean()
        return math.sqrt((error / self._reference.square().mean()).item())

    def _idle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def plan_chunks(parts: RandomParts, measured: int) -> Plan:
    """Chunks until the window is full, one more, and those that are measured."""
    manifest, shape = parts.manifest, parts.shape
    filling = -(-manifest.window // manifest.chunk)
    frames = frames_of_chunks(manifest, shape, filling + 1 + measured)
    request = VideoRequest(prompt="random", num_frames=frames, seed=7)
    return make_plan(request, manifest, shape)


def cells(case: Case, result: Result | str) -> tuple[str, ...]:
    """A line of the table."""
    head = (case.backend, "on" if case.compiled else "off")
    if isinstance(result, str):
        return (*head, *[""] * (len(HEAD) - len(head) - 1), result)
    peak = "" if result.peak_bytes is None else f"{result.peak_bytes / GIB:.1f}"
    return (
        *head,
        shown(result.fps),
        shown(result.first_chunk_s),
        shown(result.chunk_s),
        *(f"{share:.0%}" for share in (result.denoise, result.decode, result.other)),
        peak,
        f"{result.warm_up_s:.0f}",
        f"{result.difference:.1e}",
        "",
    )


def conditions(bench: Bench, device: torch.device, name: str, dtype: str) -> dict[str, Any]:
    """What was run, on what."""
    cuda = device.type == "cuda"
    layout = bench.plan.layout
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "shape": name,
        "size": f"{bench.plan.size[0]}x{bench.plan.size[1]}",
        "dtype": dtype,
        "chunk": layout.chunk,
        "window": layout.window,
        "sink": layout.sink,
        "sampler": f"{bench.plan.sampler}, {bench.plan.steps} steps and a clean pass",
        "text_tokens": bench.plan.text_length,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        **{package: _version(package) for package in ("flash-attn", "xformers", "triton")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> int:
    """Measure all cases; print a table, or JSON."""
    began = perf_counter()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape (always so without CUDA)")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help=f"seconds for all ({BUDGET_S:.0f})"
    )
    parser.add_argument(
        "--chunks", type=int, default=MEASURED, help=f"measured chunks of a case ({MEASURED})"
    )
    parser.add_argument(
        "--compiler", default="inductor", help="backend of torch.compile (inductor)"
    )
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    sizes = WAN_1_3B if cuda and not options.tiny else TINY
    dtype = "bf16" if cuda else "fp32"
    limits = Limits(began + options.budget_s, options.chunks, options.compiler)
    bench = Bench(RandomParts(sizes, device, dtype), device, limits)
    facts = conditions(bench, device, sizes.name, dtype)
    results: list[tuple[Case, Result | str]] = []
    for compiled in (False, True):
        for backend in BACKENDS:
            case = Case(backend, compiled)
            results.append((case, bench.run(case)))
            sys.stderr.write(f"{' '.join(cells(*results[-1]))}\n")
    if options.json:
        lines = [
            asdict(case) | ({"note": r} if isinstance(r, str) else asdict(r)) for case, r in results
        ]
        document = {"conditions": facts, "results": lines, "seconds": perf_counter() - began}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return 0
    told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items() if value)
    table = markdown(HEAD, [cells(case, result) for case, result in results])
    sys.stdout.write(f"{told}\n\n{table}\n\n{perf_counter() - began:.0f} s in all\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
