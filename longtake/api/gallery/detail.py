"""Everything that a video's page tells: parameters, receipt, timings, drift, lineage."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from longtake.api.objects import public_request
from longtake.api.service import Service
from longtake.errors import NotFoundError
from longtake.queue.listings import Filters
from longtake.queue.records import ArtifactKind, ChunkRecord, Job

MAX_RECEIPT_BYTES = 4_000_000
MAX_CHILDREN = 24
# flags whose names are not the field's own
FLAGS = {"num_inference_steps": "--steps", "guidance_scale": "--guidance"}
CHART_WIDTH, CHART_HEIGHT = 1000, 160


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds of one stage, and its share of all in per cent."""

    name: str
    seconds: float
    percent: float


@dataclass(frozen=True, slots=True)
class Signal:
    """One drift signal over time: its last value, and the points of a line in the chart."""

    name: str
    last: float
    points: str


@dataclass(frozen=True, slots=True)
class Drift:
    """A chart of drift signals on one scale; ``level`` is the height of 1, just noticeable."""

    signals: list[Signal]
    level: float


@dataclass(frozen=True, slots=True)
class Copies:
    """The request as text to copy."""

    json: str
    curl: str
    python: str
    cli: str


def receipt_of(service: Service, job: Job) -> dict[str, Any] | None:
    """The receipt, if there is one that can be read."""
    files = service.store.files.of_job(job.id, ArtifactKind.RECEIPT)
    if not files or files[-1].size > MAX_RECEIPT_BYTES:
        return None
    try:
        with service.artifacts.open(files[-1].key) as file:
            receipt = json.loads(file.read())
    except (OSError, ValueError, NotFoundError):
        return None
    return receipt if isinstance(receipt, dict) else None


def parameters(job: Job) -> list[tuple[str, str, bool]]:
    """Name, value and whether the caller asked for it; what the plan resolved comes with it."""
    asked = public_request(job)
    rows = [
        (name, _shown(value), True)
        for name, value in asked.items()
        if name not in ("prompt", "prompts", "negative_prompt")
    ]
    resolved = ("mode", "num_frames", "fps", "size", "seconds", "chunks", "steps", "guidance_scale")
    plan = {"mode": job.mode, **job.plan}
    return rows + [
        (name, _shown(plan[name]), False)
        for name in resolved
        if plan.get(name) is not None and name not in asked
    ]


def copies(job: Job, origin: str, *, keyed: bool) -> Copies:
    """The request as JSON, curl, Python and a command; resubmitted it makes the same video."""
    request = public_request(job)
    body = json.dumps(request, indent=2, ensure_ascii=False)
    header = ' \\\n  -H "Authorization: Bearer $LONGTAKE_API_KEY"' if keyed else ""
    curl = (
        f"curl {origin}/v1/videos{header} \\\n  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(json.dumps(request, ensure_ascii=False))}"
    )
    return Copies(body, curl, _python(request, origin, keyed=keyed), _command(request))


def stages(receipt: Mapping[str, Any] | None, chunks: Iterable[ChunkRecord]) -> list[Stage]:
    """Seconds by stage, longest first: of the receipt, or added up over the stored chunks."""
    totals: dict[str, float] = {}
    if receipt is not None and isinstance(receipt.get("timings"), dict):
        for name, value in receipt["timings"].items():
            if isinstance(value, int | float) and name != "frames_per_second":
                totals[name] = float(value)
    if not totals:
        for chunk in chunks:
            for name, value in chunk.timings.items():
                totals[name] = totals.get(name, 0.0) + value
    whole = totals.pop("total", 0.0) or sum(totals.values()) or 1.0
    found = [
        Stage(name.replace("_", " "), value, min(100.0, 100 * value / whole))
        for name, value in totals.items()
    ]
    return sorted(found, key=lambda stage: -stage.seconds)


def drift(receipt: Mapping[str, Any] | None) -> Drift | None:
    """Drift over time: ``measurements`` of a receipt's chunks, a number for each name.

    Receipts of this version hold no measurements, so there is no chart.
    """
    chunks = receipt.get("chunks") if receipt is not None else None
    times: dict[str, list[tuple[float, float]]] = {}
    start = 0
    for chunk in chunks if isinstance(chunks, list) else []:
        frames = int(chunk.get("frames", 0))
        for name, value in chunk.get("measurements", {}).items():
            # a chunk is measured as a whole: its point is in its middle
            times.setdefault(name, []).append((start + frames / 2, float(value)))
        start += frames
    lines = {name: points for name, points in times.items() if len(points) > 1}
    if not lines:
        return None
    top = max(1.0, *(value for points in lines.values() for _, value in points))

    def height(value: float) -> float:
        return CHART_HEIGHT * (1 - max(0.0, value) / top)

    found = []
    for name, points in lines.items():
        text = " ".join(f"{CHART_WIDTH * at / start:.1f},{height(v):.1f}" for at, v in points)
        found.append(Signal(name, points[-1][1], text))
    return Drift(found, height(1.0))


def lineage(service: Service, job: Job) -> tuple[Job | None, list[Job]]:
    """The video it came from, if that is still there, and those that came from it."""
    parent = None
    if job.parent_id:
        try:
            parent = service.store.listings.get(job.parent_id, job.owner)
        except NotFoundError:
            parent = None
    page = service.store.listings.page(
        job.owner, None, MAX_CHILDREN, "asc", Filters(parent_id=job.id)
    )
    return parent, page.jobs


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _python(request: Mapping[str, Any], origin: str, *, keyed: bool) -> str:
    """For OpenAI's SDK, which sends a form: what it does not know goes as ``extra_body``."""
    known = ("prompt", "model", "seconds", "size")
    secret = 'os.environ["LONGTAKE_API_KEY"]' if keyed else '"none"'
    lines = ["import json"] if "prompts" in request else []
    lines += ["import os"] if keyed else []
    lines += [
        "from openai import OpenAI",
        "",
        f"client = OpenAI(base_url={json.dumps(origin + '/v1')}, api_key={secret})",
        "video = client.videos.create_and_poll(",
    ]
    for name in known:
        if name in request:
            value = _shown(request[name]) if name == "seconds" else request[name]
            lines.append(f"    {name}={value!r},")
    rest = {name: value for name, value in request.items() if name not in known}
    if rest:
        lines.append("    extra_body={")
        for name, value in rest.items():
            shown = f"json.dumps({value!r})" if name == "prompts" else repr(value)
            lines.append(f"        {name!r}: {shown},")
        lines.append("    },")
    lines += [")", 'client.videos.download_content(video.id).write_to_file("video.mp4")']
    return "\n".join(lines)


def _command(request: Mapping[str, Any]) -> str:
    words = ["longtake", "generate", shlex.quote(str(request["prompt"]))]
    for timed in request.get("prompts", ()):
        words += ["--at", f"{timed['at']:g}", shlex.quote(timed["prompt"])]
    for name, value in request.items():
        if name in ("prompt", "prompts"):
            continue
        if name == "input_reference":
            words += ["--video" if "id" in value else "--image", "FILE"]
            continue
        words += [FLAGS.get(name, f"--{name.replace('_', '-')}"), shlex.quote(_shown(value))]
    return " ".join([*words, "-o", "video.mp4"])
