"""What people see on the console: progress while a video is made, plans and models as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from longtake.video.clip import ClipPlan
    from longtake.video.plan import Plan
    from longtake.video.rollout import StepEvent

# parts of a plan that have a line or a table of their own, or are for machines
SHOWN_APART = frozenset(
    [
        *("request", "cost", "warnings", "chunks", "prompts", "sigmas", "input", "seconds"),
        *("arguments", "attention_plan"),
    ]
)
UNITS = ("", "k", "M", "G", "T", "P", "E")


class ConsoleObserver:
    """A progress bar on standard error, and the stop flag that Ctrl-C raises."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[detail]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._frames = 0
        self._total_frames = 0
        self._started = perf_counter()
        self.stop_asked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def on_plan(self, plan: Plan | ClipPlan) -> None:
        """Show what the caller should know before waiting: warnings and length."""
        for warning in plan.warnings:
            self._console.print(Text(f"warning: {warning}", style="yellow"))
        self._total_frames = plan.num_frames
        self._progress.start()
        self._task = self._progress.add_task("planning", total=None, detail="")

    def on_stage(self, stage: str) -> None:
        """Loading, then generating."""
        self._started = perf_counter()
        if self._task is not None:
            self._progress.update(self._task, description=stage)

    def on_start(self, event: StepEvent) -> None:
        """Nothing: the bar moves when a step is done."""

    def on_step(self, event: StepEvent) -> None:
        """Move the bar by one denoising step."""
        if self._task is None:
            return
        rate = self._frames / (perf_counter() - self._started)
        detail = f"chunk {event.chunk + 1}/{event.chunks}  step {event.step}/{event.steps}"
        if self._frames:
            detail += f"  {rate:.1f} fps"
        self._progress.update(
            self._task,
            total=event.chunks * event.steps,
            completed=event.chunk * event.steps + event.step,
            detail=detail,
        )

    def on_latents(self, chunk: int, *, stored: bool) -> None:
        """Nothing: a chunk counts when its frames are written."""

    def on_chunk(self, frames: int) -> None:
        """Count finished frames."""
        self._frames += frames
        if self._task is not None and self._progress.tasks[0].total is None:
            self._progress.update(
                self._task, total=self._total_frames, completed=self._frames, detail=""
            )

    def ask_stop(self) -> None:
        """Stop after the step in flight."""
        self.stop_asked = True
        self._console.print("stopping; finished chunks are kept (Ctrl-C again: at once)")

    def stopping(self) -> bool:
        """The stop flag."""
        return self.stop_asked


def print_plan(plan: Mapping[str, Any]) -> None:
    """A plan as tables on standard output."""
    console = Console()
    rows = Table(show_header=False, box=None, pad_edge=False)
    for name, value in plan.items():
        if name in ("backend", "profile") and value:
            value = ", ".join(f"{key} {part}" for key, part in value.items() if part is not None)
        if name not in SHOWN_APART and value not in ("", None):
            rows.add_row(name, Text(f"{value:g}" if isinstance(value, float) else str(value)))
    rows.add_row("seconds", f"{plan['seconds']:.4g}")
    if plan.get("sigmas"):
        rows.add_row("sigmas", " ".join(f"{sigma:.4g}" for sigma in plan["sigmas"]))
    chunks = plan.get("chunks")
    if chunks:
        rows.add_row("chunks", _chunks_line(chunks))
    for switch in plan.get("prompts", ()):
        text = f"asked {switch['at']:g} s, starts {switch['starts']:g} s: {switch['prompt']}"
        rows.add_row("prompt", Text(text))
    console.print(rows)
    if plan.get("cost"):
        console.print(_cost_table(plan["cost"]))
    for warning in plan["warnings"]:
        console.print(Text(f"warning: {warning}", style="yellow"))


def print_models(rows: Sequence[Mapping[str, Any]]) -> None:
    """Models as a table on standard output."""
    table = Table("model", "modes", "size", "fps", "description", box=None, pad_edge=False)
    for row in rows:
        modes = ", ".join(row["modes"])
        table.add_row(row["model"], modes, row["size"], f"{row['fps']:g}", row["description"])
    Console().print(table)


def print_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Any lines of cells as a table on standard output."""
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _chunks_line(chunks: Mapping[str, Any]) -> str:
    if "frames" not in chunks:
        return str(chunks["count"])
    seen = " ".join(map(str, chunks["sees"]))
    more = " ..." if chunks["count"] > len(chunks["sees"]) else ""
    return f"{chunks['count']} of {chunks['frames']} latent frames; they see {seen}{more}"


def _cost_table(cost: Mapping[str, Any]) -> Table:
    table = Table("estimate", "part", "value", box=None, pad_edge=False)
    for name in ("tokens_per_frame", "tokens_per_chunk", "tokens_in_window"):
        table.add_row("tokens", name.removeprefix("tokens_").replace("_", " "), str(cost[name]))
    for kind, unit in (("flops", "FLOP"), ("bytes", "B"), ("seconds", "s")):
        for part, value in cost[kind].items():
            shown = f"{value:.2f} s" if kind == "seconds" else f"{_scaled(value)}{unit}"
            table.add_row("memory" if kind == "bytes" else kind, part, shown)
    if cost["device"]:
        table.add_row("rates", "measured on", cost["device"])
    return table


def _scaled(value: float) -> str:
    """1234567 as ``"1.23 M"``."""
    size = 0
    while value >= 1000 and size < len(UNITS) - 1:
        value, size = value / 1000, size + 1
    return f"{value:.3g} {UNITS[size]}"
