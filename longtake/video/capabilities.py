"""Which features go together: one table, checked against behaviour and printed into the docs.

The code refuses by itself; ``tests/test_capabilities.py`` holds this table against what it does.
A cell is *exact* (with the test that proves it), *tolerance* (with test and figure) or *refused*
(with the field that the error names). What has no test is refused.

    python -m longtake.video.capabilities --write docs/capabilities.md
    python -m longtake.video.capabilities --check docs/capabilities.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["exact", "tolerance", "refused"]
TESTS = "tests/video"
COLUMNS = ("hybrid, window", "hybrid, global", "clip")
CAUSAL = f"{TESTS}/test_causal_wan.py::test_cached_rollout_equals_full_recompute"
READER = f"{TESTS}/test_attention_reader.py"
CLIP_READS = f"{TESTS}/test_clip_attention.py"
COMPACT = f"{TESTS}/test_kv_compact.py"
STORED_LESS = "latents of 7 chunks within 5 %, 1 % and 10 % rms"
PROFILED = "test_a_named_profile_is_used_and_the_receipt_says_so"
EXACT_PLANS = f"{READER}::test_rollouts_of_exact_plans_are_the_same_video"
ROLLOUT = f"{TESTS}/test_rollout.py"
CLIP = f"{TESTS}/test_clip.py"
RANKS = f"{TESTS}/test_parallel.py::test_every_layout_makes_the_video_of_one_rank"
NO_CLIP = "on a CPU; on CUDA the code is there and was not run"
REQUESTS = f"{TESTS}/test_bad_requests.py"


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination: what holds, and the test that proves it (or the field that is refused)."""

    kind: Kind
    proof: str
    note: str = ""


def _exact(test: str, note: str = "") -> Cell:
    return Cell("exact", test, note)


def _tolerance(test: str, figure: str) -> Cell:
    return Cell("tolerance", test, figure)


def _refused(field: str, note: str = "") -> Cell:
    return Cell("refused", field, note)


TABLE: dict[str, tuple[Cell, Cell, Cell]] = {
    "text to video": (
        _exact(CAUSAL),
        _exact(CAUSAL),
        _exact(f"{CLIP}::test_pixels_equal_a_direct_call"),
    ),
    "image start": (
        _exact(f"{ROLLOUT}::test_image_start_is_the_first_frame"),
        _exact(f"{ROLLOUT}::test_image_start_is_the_first_frame"),
        _exact(f"{CLIP}::test_pixels_equal_a_direct_call"),
    ),
    "continuing from frames": (
        _exact(f"{ROLLOUT}::test_continuing_stored_latents_equals_one_run"),
        _exact(f"{ROLLOUT}::test_continuing_stored_latents_equals_one_run"),
        _refused("video"),
    ),
    "video to video": (
        _exact(f"{ROLLOUT}::test_strength_ends"),
        _exact(f"{ROLLOUT}::test_strength_ends"),
        _refused("video"),
    ),
    "prompt timeline": (
        _exact(f"{ROLLOUT}::test_timeline_changes_later_chunks_only"),
        _exact(f"{ROLLOUT}::test_timeline_changes_later_chunks_only"),
        _refused("prompts"),
    ),
    "re-cache on a prompt switch": (
        _exact(f"{ROLLOUT}::test_recache_equals_a_hand_made_one"),
        _exact(f"{ROLLOUT}::test_recache_equals_a_hand_made_one"),
        _refused("prompts"),
    ),
    "guidance": (
        _exact(f"{ROLLOUT}::test_guidance_equals_two_separate_forwards"),
        _exact(f"{ROLLOUT}::test_guidance_equals_two_separate_forwards"),
        _exact(f"{CLIP}::test_pixels_equal_a_direct_call"),
    ),
    "stop and resume": (
        _exact(f"{ROLLOUT}::test_resume_equals_an_undisturbed_run"),
        _exact(f"{ROLLOUT}::test_resume_equals_an_undisturbed_run"),
        _refused("resume", "a stopped clip keeps nothing"),
    ),
    "resume of video to video": (
        _exact("tests/video/test_generate.py::test_a_redraw_resumes"),
        _exact("tests/video/test_generate.py::test_a_redraw_resumes"),
        _refused("video"),
    ),
    "redo of a chunk": (
        _exact(f"{ROLLOUT}::test_redo_after_restore"),
        _exact(f"{ROLLOUT}::test_redo_after_restore"),
        _refused("mode", "one chunk"),
    ),
    "attention read in chunks": (
        _exact(EXACT_PLANS),
        _exact(EXACT_PLANS),
        _exact(f"{CLIP_READS}::test_a_clip_read_in_chunks_is_the_same", "Wan; others refuse"),
    ),
    "attention to a window": (
        _exact(CAUSAL),
        _exact(f"{READER}::test_a_window_reads_the_sink_and_the_newest"),
        _exact(f"{CLIP_READS}::test_a_token_gets_the_weighted_mean_of_its_windows", "overlapping"),
    ),
    "attention to ranked frames (topk)": (
        _exact(f"{READER}::test_each_head_reads_its_best_frames", "of the frames it keeps"),
        _exact(f"{READER}::test_each_head_reads_its_best_frames", "of the frames it keeps"),
        _refused("attention"),
    ),
    "radial attention": (
        _exact(f"{READER}::test_a_radial_reading_reads_its_bands", "of the keys it keeps"),
        _exact(f"{READER}::test_a_radial_reading_reads_its_bands", "of the keys it keeps"),
        _refused("attention"),
    ),
    "another reading in some layers or steps": (
        _exact(f"{READER}::test_layers_and_steps_read_what_the_plan_says"),
        _exact(f"{READER}::test_layers_and_steps_read_what_the_plan_says"),
        _refused("attention"),
    ),
    "profile of longtake tune": (
        _exact(f"{TESTS}/test_profiles.py::{PROFILED}", "exact plans, unless tuned with a bound"),
        _exact(f"{TESTS}/test_profiles.py::{PROFILED}", "its backend alone"),
        _refused("profile"),
    ),
    "KV cache stored in bf16, fp16 or int8": (
        _tolerance(f"{COMPACT}::test_a_rollout_over_a_stored_past_stays_close", STORED_LESS),
        _tolerance(f"{COMPACT}::test_a_rollout_over_a_stored_past_stays_close", STORED_LESS),
        _refused("kv_cache", "no cache"),
    ),
    "attention backend flex": (
        _exact(f"{TESTS}/test_attention.py::test_every_exact_way_equals_sdpa"),
        _exact(f"{TESTS}/test_attention.py::test_every_exact_way_equals_sdpa"),
        _refused("backend"),
    ),
    "attention backend flash": (
        _refused("backend", "on a CPU; on CUDA the code is there and was not run"),
        _refused("backend", "on a CPU; on CUDA the code is there and was not run"),
        _refused("backend"),
    ),
    "attention backend xformers": (
        _refused("backend", "on a CPU; on CUDA the code is there and was not run"),
        _refused("backend", "on a CPU; on CUDA the code is there and was not run"),
        _refused("backend"),
    ),
    "parallel: VAE decode by rows": (
        _exact(f"{TESTS}/test_parallel.py::test_decode_by_rows_equals_a_whole_one"),
        _exact(f"{TESTS}/test_parallel.py::test_decode_by_rows_equals_a_whole_one"),
        _refused("parallel", NO_CLIP),
    ),
    "parallel: several hosts": (
        _exact(f"{TESTS}/test_parallel_generate.py::test_torchrun_on_two_hosts"),
        _exact(f"{TESTS}/test_parallel_generate.py::test_torchrun_on_two_hosts"),
        _refused("parallel", NO_CLIP),
    ),
    "quantization": (_refused("quantization"), _refused("quantization"), _refused("quantization")),
    "offload": (_refused("offload"), _refused("offload"), _refused("offload")),
    "compile": (_refused("compile"), _refused("compile"), _refused("compile")),
    "guard": (_refused("guard"), _refused("guard"), _refused("guard")),
    "lora": (_refused("lora"), _refused("lora"), _refused("lora")),
}

_RANKS = _exact(RANKS)
_EVERYWHERE = (_RANKS, _RANKS, _RANKS, _RANKS)
_CUT = _refused("parallel", "ranks whole frames")
_WHOLE = (_RANKS, _CUT, _CUT, _RANKS)
# measured on papercut, docs/log.md: what is stored rounded may be rounded the other way
_ROUNDED = _tolerance(RANKS, "as far off as storing less is itself")
_STORED = (_RANKS, _ROUNDED, _ROUNDED, _ROUNDED)
_CLIP = _refused("parallel", NO_CLIP)

# feature: the case of ``tests/video/parallel_cases.py`` that proves it, and a cell for each layout
PARALLEL: dict[str, tuple[str, tuple[Cell, Cell, Cell, Cell]]] = {
    "sink and window": ("window", _EVERYWHERE),
    "global cache": ("global", _EVERYWHERE),
    "guidance": ("guided", _EVERYWHERE),
    "image start": ("image", _EVERYWHERE),
    "continuing from frames": ("continue", _EVERYWHERE),
    "video to video": ("redraw", _EVERYWHERE),
    "prompt timeline with re-cache": ("recache", _EVERYWHERE),
    "redo of a chunk from the state before it": ("redo", _EVERYWHERE),
    "stop and resume": ("resume", _EVERYWHERE),
    "attention read in chunks": ("chunked", _EVERYWHERE),
    "attention to a window": ("reading", _EVERYWHERE),
    "another reading in some layers or steps": ("layers", _EVERYWHERE),
    "attention to ranked frames (topk)": ("topk", _WHOLE),
    "radial attention": ("radial", _WHOLE),
    "KV cache in bf16": ("bf16", _STORED),
    "KV cache in fp16": ("fp16", _STORED),
    "KV cache in int8": ("int8", _STORED),
    "clip mode": ("clip", (_CLIP, _CLIP, _CLIP, _CLIP)),
}
PARALLEL_COLUMNS = {
    "ulysses": "ulysses=2",
    "ring": "ring=2",
    "ulysses and ring": "ulysses=2,ring=2",
    "halves of guidance": "cfg=2",
}

# request fields that clip mode does not know
REFUSED_IN_CLIP = ("prompts", "video", "strength", "sink", "sampler")


def render() -> str:
    """The table as Markdown."""
    lines = [
        "# What goes together",
        "",
        "Generated by `make docs` from `longtake/video/capabilities.py`; `make check` fails if it",
        "is out of date. *Exact*: a test proves equality with the slow path. *Refused*: asking for",
        "it is an error that names the field. A combination without a test is refused.",
        "",
        f"| feature | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    lines += [f"| {name} | {' | '.join(map(_cell, cells))} |" for name, cells in TABLE.items()]
    lines += [
        "",
        "## Over several ranks",
        "",
        "One video by two or four ranks (docs/parallel.md) against one rank's. *Exact*: latents of",
        f"six chunks within 1e-5 in float32, by `{RANKS.partition('::')[2]}`.",
        "*Refused*: an error of the field `parallel`, at plan time.",
        "",
        f"| feature | {' | '.join(PARALLEL_COLUMNS)} |",
        f"|---|{'---|' * len(PARALLEL_COLUMNS)}",
    ]
    for name, (_, cells) in PARALLEL.items():
        shown = [f"{cell.kind}{f' ({cell.note})' if cell.note else ''}" for cell in cells]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table to a file, or check that the file is what would be written."""
    parser = argparse.ArgumentParser(description="The capability table.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.write is not None:
        args.write.write_text(render(), encoding="utf-8")
        return 0
    if args.check.is_file() and args.check.read_text(encoding="utf-8") == render():
        return 0
    sys.stderr.write(f"{args.check} is out of date: run `make docs`\n")
    return 1


def _cell(cell: Cell) -> str:
    proof = cell.proof.split("::")[-1]
    note = f" ({cell.note})" if cell.note else ""
    return f"{cell.kind}: `{proof}`{note}"


if __name__ == "__main__":
    sys.exit(main())
