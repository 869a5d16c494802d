"""Commands that measure this machine: bench, tune. Parse, call, print.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longtake.errors import RequestError
from longtake.video.manifest import DEFAULT_MODEL

DONE = 0
DTYPES = ("auto", "fp32", "bf16", "fp16")
NewCommand = Callable[[Any, str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]


def add_commands(commands: Any, command: NewCommand) -> None:
    """Add the measuring commands; ``command`` makes a parser of one."""
    bench = command(commands, "bench", "measure this machine", _bench_attention)
    actions = bench.add_subparsers(dest="action", required=True, metavar="WHAT")
    attention = command(actions, "attention", "every attention plan and backend", _bench_attention)
    attention.add_argument(
        "--tokens", metavar="LIST", help="lengths of the videos, as 1024,2048 (default: by device)"
    )
    attention.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="this one alone (repeatable; default: all that are here)",
    )
    _add_machine(attention)

    tune = command(commands, "tune", "find the fastest attention of a model here", _tune)
    tune.add_argument("--model", default=DEFAULT_MODEL, help="as of generate (default: papercut)")
    tune.add_argument(
        "--error-bound",
        type=float,
        default=0.0,
        metavar="E",
        help="largest error of a plan that leaves keys out (default 0: exact plans alone)",
    )
    tune.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the profile (default: where generate, plan and worker find it by themselves)",
    )
    _add_machine(tune)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda, cuda:1 or mps (default: the best there is)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="compute precision")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")


def _bench_attention(args: argparse.Namespace) -> int:
    """Time and memory over the length of a video for each attention plan and backend here, and the
    error of each on activations of the bundled model.
    """
    tokens = None if args.tokens is None else _whole_numbers(args.tokens)
    _configure(args)
    from longtake.progress import print_rows
    from longtake.video.attention_bench import bench_attention

    document = bench_attention(tokens, args.backend, (args.device, args.dtype), _tell)
    if args.json:
        _print_json(document)
        return DONE
    head = ("plan", "backend", "tokens", "ms", "peak MiB", "error")
    print_rows(head, [_bench_cells(row) for row in document["rows"]])
    slopes = [
        (plan, backend, _number(slope))
        for plan, found in document["slopes_by_backend"].items()
        for backend, slope in found.items()
    ]
    print_rows(("plan", "backend", "log time / log tokens"), slopes)
    for name, reason in document["missing"].items():
        sys.stdout.write(f"{name}: {reason}\n")
    for case in document["skipped"]:
        sys.stdout.write(
            f"{case['plan']}, {case['backend']}, {case['tokens']} tokens: {case['reason']}\n"
        )
    return DONE


def _tune(args: argparse.Namespace) -> int:
    """Measure the ways to compute a model's attention on its own activations, and write the fastest
    one that is allowed as a profile, which generate, plan and worker then use.
    """
    _configure(args)
    from dataclasses import asdict

    from longtake.progress import print_rows
    from longtake.video.profiles import profile_path, write_profile
    from longtake.video.tune import tune

    profile = tune(args.model, args.error_bound, (args.device, args.dtype), _tell)
    target = profile.target
    path = args.output or profile_path(target.model, target.device, target.dtype)
    write_profile(path, profile)
    if args.json:
        _print_json({"file": str(path), **asdict(profile)})
        return DONE
    head = ("attention", "backend", "ms a layer", "error", "allowed")
    print_rows(head, [_tune_cells(row) for row in profile.measured])
    chosen = profile.attention or "the model's own window"
    sys.stdout.write(f"{path}: backend {profile.backend}, {chosen}\n")
    return DONE


def _bench_cells(row: dict[str, Any]) -> tuple[str, ...]:
    peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
    return (
        row["plan"],
        row["backend"],
        str(row["tokens"]),
        _number(1e3 * row["seconds"]),
        _number(peak),
        _number(row["error"]),
    )


def _tune_cells(row: Any) -> tuple[str, ...]:
    return (
        row["attention"] or "the model's own",
        row["backend"],
        _number(1e3 * row["seconds"]),
        _number(row["error"]),
        "exact" if row["exact"] else "yes" if row["allowed"] else "no",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        legal = "whole numbers joined by commas, as 1024,2048"
        raise RequestError("tokens", text, "is no list of numbers", legal) from None


def _configure(args: argparse.Namespace) -> None:
    """Fix the numerics before torch is imported."""
    if args.threads is not None and args.threads < 1:
        raise RequestError("threads", args.threads, "is out of range", "1 or more")
    from longtake.video.numerics import configure

    configure(args.threads)


def _tell(what: str) -> None:
    sys.stderr.write(f"{what}\n")


def _print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
