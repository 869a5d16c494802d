"""Everything that a video's page tells: parameters, receipt, timings, drift, lineage."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from longtake.api.objects import num_frames, public_request
from longtake.api.service import Service
from longtake.errors import NotFoundError
from longtake.queue.admission import INPUT, JOB
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
class Start:
    """What a video starts from: an ``image`` or a ``video``, and which one if it was made here."""

    kind: str
    video_id: str | None


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
    """Name, value and whether the caller asked for it; what the plan resolved comes with it.

    The prompt is left out: whoever shows the rows has it as their heading. The length of a video
    that was stopped is that of what there is, of what was to be.
    """
    asked = {name: value for name, value in public_request(job).items() if name != "prompt"}
    resolved = ("mode", "num_frames", "fps", "size", "seconds", "chunks", "steps", "guidance_scale")
    plan = {"mode": job.mode, **job.plan}
    values = {name: plan[name] for name in resolved if plan.get(name) is not None} | asked
    made = _made(job)

    def shown(name: str) -> str:
        if name == "prompts":
            return "\n".join(timed_text(timed) for timed in values[name])
        text = _shown(values[name])
        return f"{_shown(made[name])} of {text}" if name in made else text

    names = [*asked, *(name for name in values if name not in asked)]
    return [(name, shown(name), name in asked) for name in names]


def timed_text(timed: Mapping[str, Any]) -> str:
    """A later prompt in a line: ``at 1 s: a blue star``."""
    return f"at {timed['at']:g} s: {timed['prompt']}"


def start_of(job: Job) -> Start | None:
    """The image or video that a job starts from, if any."""
    for kind in ("image", "video"):
        reference = str(job.request.get(kind) or "")
        if reference.startswith((INPUT, JOB)):
            made_here = reference.startswith(JOB)
            return Start(kind, reference.removeprefix(JOB) if made_here else None)
    return None


def copies(job: Job, origin: str, *, keyed: bool) -> Copies:
    """The request as JSON, curl, Python and a command; resubmitted it makes the same video."""
    request = public_request(job)
    body = json.dumps(request, indent=2, ensure_ascii=False)
    header = ' \\\n  -H "Authorization: Bearer $LONGTAKE_API_KEY"' if keyed else ""
    curl = (
        f"curl {origin}/v1/videos{header} \\\n  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(json.dumps(request, ensure_ascii=False))}"
    )
    command = _command(request, start_of(job), origin)
    return Copies(body, curl, _python(request, origin, keyed=keyed), command)


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


def _made(job: Job) -> dict[str, Any]:
    """Frames, seconds and chunks of a video that has fewer than were asked for."""
    frames = num_frames(job)
    if frames == job.plan["num_frames"]:
        return {}
    seconds = round(frames / float(job.plan["fps"]), 2)
    return {"num_frames": frames, "seconds": seconds, "chunks": job.chunks_done}


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


def _command(request: Mapping[str, Any], start: Start | None, origin: str) -> str:
    """A shell's; what FILE is stands in a comment, since the service hands out no input."""
    note = ""
    words = ["longtake", "generate", shlex.quote(str(request["prompt"]))]
    for timed in request.get("prompts", ()):
        words += ["--at", f"{timed['at']:g}", shlex.quote(timed["prompt"])]
    for name, value in request.items():
        if name in ("prompt", "prompts"):
            continue
        if name == "input_reference" and start is not None:
            words += [f"--{start.kind}", "FILE"]
            note = f"# FILE: the {start.kind} that it starts from, "
            where = f"{origin}/v1/videos/{start.video_id}/content"
            note += f"download it from {where}\n" if start.video_id else "use your own copy of it\n"
            continue
        words += [FLAGS.get(name, f"--{name.replace('_', '-')}"), shlex.quote(_shown(value))]
    return note + " ".join([*words, "-o", "video.mp4"])
