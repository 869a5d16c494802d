"""The command line: parse, call, print.

Results and ``--json`` go to standard output, progress and messages to standard error.
Exit codes: 0 done, 2 bad request or usage, 3 model, device or backend problem, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtake import __version__
from longtake.errors import LongtakeError, RequestError
from longtake.measure_cli import add_commands as add_measure_commands
from longtake.schedulers.prompts import TimedPrompt
from longtake.service_cli import add_commands as add_service_commands
from longtake.video.manifest import DEFAULT_MODEL
from longtake.video.request import (
    MODES,
    REQUEST_FIELDS,
    VideoRequest,
    parse_size,
)

if TYPE_CHECKING:
    from longtake.video.options import EngineOptions

DONE, USAGE, INTERRUPTED = 0, 2, 130
DTYPES = ("auto", "fp32", "bf16", "fp16")
BACKENDS = ("auto", "sdpa", "flash", "xformers", "flex")
KV_STORAGE = ("bf16", "fp16", "int8")
FORMATS = ("mp4", "webm", "gif", "png")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except LongtakeError as error:
        return _fail(error, as_json=args.json)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        return DONE
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = argparse.ArgumentParser(
        prog="longtake", description="Long videos from causal video diffusion models."
    )
    parser.add_argument("--version", action="version", version=f"longtake {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    make = _command(commands, "generate", "make a video", _generate)
    _add_request(make)
    _add_engine(make)
    _add_output(make)

    plan = _command(commands, "plan", "show what a request would do", _plan)
    _add_request(plan)
    _add_engine(plan)

    sheet = _command(commands, "sheet", "show a video as one picture", _sheet)
    sheet.add_argument("video", type=Path, help="any video file")
    sheet.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help=".png, .jpg"
    )
    sheet.add_argument("--columns", type=int, default=8, help="moments in a row (default 8)")
    sheet.add_argument("--rows", type=int, default=1, help="rows (default 1)")
    sheet.add_argument("--width", type=int, default=1200, help="pixels (default 1200)")
    sheet.add_argument("--json", action="store_true", help="one JSON document on standard output")

    models = _command(commands, "models", "list models", _models)
    models.add_argument("--json", action="store_true", help="one JSON document on standard output")

    add_measure_commands(commands, _command)
    add_service_commands(commands, _command)
    return parser


def _command(
    commands: Any, name: str, summary: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """A sub-parser described by its function's docstring; flags are never abbreviated."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=run.__doc__, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="what the video shows")
    text = parser.add_argument_group("what")
    text.add_argument("--negative-prompt", metavar="TEXT", help="what guidance steers away from")
    text.add_argument(
        "--at",
        nargs=2,
        action="append",
        default=[],
        metavar=("SECONDS", "TEXT"),
        help="another prompt from this time on (repeatable)",
    )
    text.add_argument("--seconds", type=float, help="duration; never shorter than asked")
    text.add_argument("--num-frames", "--frames", type=int, help="exact number of frames")
    text.add_argument("--size", metavar="WxH", help="width and height in pixels")
    text.add_argument("--fps", type=float, help="frames per second (default: the model's own)")
    text.add_argument("--seed", type=int, help="drawn and recorded if absent")
    text.add_argument("--image", metavar="FILE", help="start from this image")
    text.add_argument(
        "--video",
        metavar="FILE",
        help="go on from this clip (or folder of kept latents); with --strength redraw it",
    )
    text.add_argument("--strength", type=float, help="0 keeps the clip's pictures, 1 none of them")
    how = parser.add_argument_group("how (default: what the model's manifest says)")
    how.add_argument("--model", help="name, folder, manifest file or hub id (default: papercut)")
    how.add_argument("--mode", choices=MODES, help="chunk by chunk, or one pass of a pipeline")
    how.add_argument("--steps", type=int, dest="num_inference_steps", help="denoising steps")
    how.add_argument("--guidance", type=float, dest="guidance_scale", help="from 1; 1 turns it off")
    how.add_argument("--flow-shift", type=float, help="shift of the sigma schedule")
    how.add_argument("--sampler", choices=("euler", "lcm"), help="how a step is made")
    how.add_argument(
        "--attention",
        metavar="PLAN",
        help="what a chunk sees of the past: window, global, chunked[:TOKENS], topk:AMOUNT or "
        "radial[:FRAMES]",
    )
    how.add_argument("--window", type=int, help="latent frames seen, sink and own chunk included")
    how.add_argument("--sink", type=int, help="first latent frames, never forgotten")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", help="cpu, cuda, cuda:1 or mps (default: the best there is)")
    engine.add_argument("--dtype", choices=DTYPES, default="auto", help="compute precision")
    engine.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="what computes attention"
    )
    engine.add_argument(
        "--kv-cache", choices=KV_STORAGE, help="store the past in less than is computed"
    )
    engine.add_argument(
        "--profile",
        metavar="FILE",
        help="of longtake tune, or none (default: the one made for this model and device)",
    )
    engine.add_argument("--threads", type=int, help="CPU threads (of each rank)")
    engine.add_argument(
        "--parallel",
        metavar="LAYOUT",
        help="one video on several GPUs or CPU processes: auto, or ulysses=N, ring=N, cfg=2 "
        "joined by commas",
    )
    engine.add_argument("--json", action="store_true", help="one JSON document on standard output")


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--output", type=Path, metavar="FILE", help="the video")
    output.add_argument("--format", choices=FORMATS, help="default: from FILE's extension")
    output.add_argument("--frames-dir", type=Path, metavar="DIR", help="lossless PNG frames")
    output.add_argument(
        "--keep-latents", type=Path, metavar="DIR", help="store every finished chunk here"
    )
    output.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="go on from stored chunks; flags left out are as stored",
    )


def _generate(args: argparse.Namespace) -> int:
    """Make a video, and a receipt of what ran beside it. Ctrl-C keeps the finished chunks."""
    if args.output is None and args.frames_dir is None:
        raise RequestError("output", None, "is missing", "-o FILE or --frames-dir DIR")
    engine = _engine(args)
    request = _request(args)
    from longtake.progress import ConsoleObserver
    from longtake.video.generate import Result, Target, generate
    from longtake.video.options import Storage

    observer = ConsoleObserver()
    target = Target(args.output, args.format, args.frames_dir)
    storage = Storage(args.keep_latents, args.resume)

    def run(request: VideoRequest, engine: EngineOptions) -> Result:
        with observer:
            return generate(request, target, engine, storage=storage, observer=observer)

    before = signal.signal(signal.SIGINT, _stopper(observer))
    try:
        if engine.parallel is None:
            result = run(request, engine)
        else:
            from longtake.video.parallel_launch import run_parallel

            led = run_parallel(request, engine, storage, args.threads, run)
            if led is None:
                return DONE  # another rank of torchrun's reports
            result = led
    finally:
        signal.signal(signal.SIGINT, before)
    if args.json:
        _print_json(
            {"state": result.state, "files": [str(f) for f in result.files], **result.receipt}
        )
    else:
        rate = result.receipt["timings"]["frames_per_second"]
        made = " and ".join(str(f) for f in result.files)
        sys.stdout.write(f"{made}: {result.frames} frames, {rate:.1f} frames per second\n")
    return DONE if result.state == "done" else INTERRUPTED


def _plan(args: argparse.Namespace) -> int:
    """Show chunks, tokens, flops, memory and time of a request; no weights are loaded."""
    engine = _engine(args)
    request = _request(args)
    from longtake.progress import print_plan
    from longtake.video.prepare import plan_request

    plan = plan_request(request, engine)
    if args.json:
        _print_json(plan.as_dict())
    else:
        print_plan(plan.as_dict())
    return DONE


def _sheet(args: argparse.Namespace) -> int:
    """Frames from the first to the last of a video, side by side in one picture."""
    from longtake.video.ffmpeg import contact_sheet

    sheet = contact_sheet(
        args.video, args.output, args.columns, args.rows, args.width, field="video"
    )
    if args.json:
        _print_json({"file": str(args.output), **asdict(sheet)})
    else:
        sys.stdout.write(f"{args.output}: {len(sheet.frames)} of the frames\n")
    return DONE


def _models(args: argparse.Namespace) -> int:
    """List the models known by a short name."""
    from longtake.progress import print_models
    from longtake.video.source import catalogue, find_model

    rows: list[dict[str, Any]] = []
    for name in catalogue():
        source = find_model(name)
        manifest = source.manifest
        if manifest is not None:
            rows.append(
                {
                    "model": name,
                    "modes": list(source.modes),
                    "size": f"{manifest.size[0]}x{manifest.size[1]}",
                    "fps": manifest.fps,
                    "description": manifest.description,
                }
            )
    if args.json:
        _print_json(rows)
    else:
        print_models(rows)
    return DONE


def _request(args: argparse.Namespace) -> VideoRequest:
    """The request of the flags; with ``--resume``, prompt and model may be left to the store."""
    values = {name: getattr(args, name) for name in REQUEST_FIELDS if hasattr(args, name)}
    resume = getattr(args, "resume", None)
    if resume is not None:
        from longtake.video.latents import LatentFolder

        stored = LatentFolder(resume).describe().request
        for name in ("prompt", "model"):
            values[name] = getattr(stored, name) if values[name] is None else values[name]
    if values["prompt"] is None:
        raise RequestError("prompt", None, "is missing", 'longtake generate "..." -o FILE')
    values["model"] = values["model"] or DEFAULT_MODEL
    values["size"] = None if args.size is None else parse_size(args.size)
    values["prompts"] = tuple(_timed(at, text) for at, text in args.at)
    return VideoRequest(**values)


def _timed(at: str, text: str) -> TimedPrompt:
    try:
        return TimedPrompt(float(at), text)
    except ValueError:
        raise RequestError("prompts", at, "is not a time in seconds", "--at 4.0 TEXT") from None


def _engine(args: argparse.Namespace) -> EngineOptions:
    """Fix the numerics before torch is imported, then the engine's options."""
    if args.threads is not None and args.threads < 1:
        raise RequestError("threads", args.threads, "is out of range", "1 or more")
    from longtake.video.numerics import configure

    configure(args.threads)
    from longtake.video.options import EngineOptions

    return EngineOptions(
        args.device,
        args.dtype,
        args.backend,
        args.parallel,
        kv_cache=args.kv_cache,
        profile=args.profile,
    )


def _stopper(observer: Any) -> Any:
    """A SIGINT handler: the first asks for a stop, the second ends at once."""

    def handle(*_: object) -> None:
        if observer.stop_asked:
            raise KeyboardInterrupt
        observer.ask_stop()

    return handle


def _print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def _fail(error: LongtakeError, *, as_json: bool) -> int:
    if as_json:
        named = re.match(r"(\w+)=", str(error))
        field = getattr(error, "field", named[1] if named else None)
        body = {"type": type(error).__name__, "field": field, "message": str(error)}
        _print_json({"error": body})
    sys.stderr.write(f"longtake: {error}\n")
    return error.exit_code
