"""Inputs that cannot be read and targets that cannot be written: refused, nothing left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from longtake.cli import main

Refuse = Callable[..., str]
MakeModel = Callable[..., Path]
BALL = "a red ball"


@pytest.fixture
def inputs(tmp_path: Path, make_model: MakeModel) -> None:
    """The tiny model and a clip of 9 frames, a still, and what only looks like one."""
    make_model("tiny")
    frames = np.zeros((9, 16, 32, 3), np.uint8)
    frames[:, :, ::3] = 200
    iio.imwrite(tmp_path / "clip.mp4", frames, fps=8, codec="libx264", macro_block_size=1)
    iio.imwrite(
        tmp_path / "still.png", np.random.default_rng(1).integers(0, 255, (64, 64, 3), np.uint8)
    )
    (tmp_path / "short.png").write_bytes((tmp_path / "still.png").read_bytes()[:2000])
    (tmp_path / "short.mp4").write_bytes((tmp_path / "clip.mp4").read_bytes()[:600])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "text.mp4").write_text("no clip")
    (tmp_path / "empty.png").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "latents").mkdir()
    (tmp_path / "latents" / "rollout.json").write_text("{}")


INPUTS: list[tuple[str, str, str]] = [
    ("image", "--image none.png", r"image=none.png: no such file"),
    ("image", "--image folder", r"image=folder: is a folder, not a file"),
    ("image", "--image text.png", r"image=text.png: is not an image.*legal: PNG, JPEG"),
    ("image", "--image short.png", r"image=short.png: is truncated or damaged"),
    ("image", "--image empty.png", r"image=empty.png: is empty"),
    ("image", "--image clip.mp4", r"image=clip.mp4: is not an image"),
    ("image", "--image /dev/zero", r"image=/dev/zero: is a device or pipe"),
    (
        "num_frames",
        "--image still.png --frames 1",
        r"num_frames=1: the input alone fills 1 frames; at least 5",
    ),
    ("video", "--video none.mp4", r"video=none.mp4: no such file"),
    ("video", "--video text.mp4", r"video=text.mp4: ffmpeg cannot read it"),
    ("video", "--video short.mp4", r"video=short.mp4: ffmpeg cannot read it"),
    ("video", "--video empty.png", r"video=empty.png: is empty"),
    ("video", "--video folder", r"video=folder: is a folder without rollout.json"),
    ("video", "--video latents", r"video=latents: is damaged: .*rollout.json"),
    (
        "num_frames",
        "--video clip.mp4 --frames 9",
        r"num_frames=9: the input alone fills 9 frames; at least 13",
    ),
    (
        "seconds",
        "--video clip.mp4 --seconds 1",
        r"seconds=1.0: the input alone fills 9 frames; at least 13",
    ),
    (
        "num_frames",
        "--video clip.mp4 --strength 0.5 --frames 13",
        r"num_frames=13: .*only 9 .*at most 9",
    ),
    ("strength", "--video clip.mp4 --strength 0 --at 0.5 b", r"strength=0.0: redraws nothing"),
]


@pytest.mark.parametrize(("field", "flags", "message"), INPUTS)
@pytest.mark.usefixtures("inputs")
def test_inputs_that_cannot_be_used(refuse: Refuse, field: str, flags: str, message: str) -> None:
    assert refuse(f"{{tiny}} {flags}", 2, message) == field


TARGETS: list[tuple[str, str, str]] = [
    ("output", "-o none/a.mp4", r"output=none/a.mp4: the folder none does not exist"),
    ("output", "-o text.mp4/a.mp4", r"output=text.mp4/a.mp4: the folder text.mp4 does not exist"),
    ("output", "-o /proc/a.mp4", r"output=/proc/a.mp4: the folder /proc cannot be written: "),
    ("output", "-o made.mp4", r"output=made.mp4: is a folder"),
    ("output", "-o folder", r"output=folder: no format has the extension ''; legal: mp4, webm"),
    (
        "output",
        "-o out/a.avi",
        r"output=out/a.avi: no format .* '.avi'; legal: mp4, webm, gif, png",
    ),
    ("output", "-o out/a.json --format mp4", r"output=out/a.json: is the receipt's name"),
    ("output", "-o other.mp4", r"output=other.json: is a folder"),
    ("output", "-o /dev/null --format mp4", r"output=/dev/null: is a device or pipe"),
    ("format", "-o out/a.mp4 --format webm", r"format=webm: contradicts the name a.mp4"),
    ("frames_dir", "--frames-dir full", r"frames_dir=full: the folder is not empty"),
    ("frames_dir", "--frames-dir text.mp4", r"frames_dir=text.mp4: is a file, not a folder"),
    ("frames_dir", "--frames-dir none/a", r"frames_dir=none/a: the folder none does not exist"),
    ("frames_dir", "-o out/a.mp4 --frames-dir full", r"frames_dir=full: the folder is not empty"),
    ("keep_latents", "-o out/a.mp4 --keep-latents full", r"keep_latents=full: .*is not empty"),
    ("keep_latents", "-o out/a.mp4 --keep-latents text.mp4", r"keep_latents=text.mp4: Not a dir"),
    ("keep_latents", "-o out/a.mp4 --keep-latents no/a", r"keep_latents=no/a: the folder no does"),
    ("keep_latents", "-o out/a.mp4 --keep-latents /proc/a", r"keep_latents=/proc/a: No such file"),
]


@pytest.mark.parametrize(("field", "flags", "message"), TARGETS)
@pytest.mark.usefixtures("inputs")
def test_targets_that_cannot_be_written(
    refuse: Refuse, tmp_path: Path, field: str, flags: str, message: str
) -> None:
    for name in ("made.mp4", "other.json", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert refuse(f"generate '{BALL}' --model tiny --frames 5 {flags}", 2, message) == field


NAMELESS: list[tuple[str, str, str]] = [
    ("output", "-o .", r"output=\.: is a folder"),
    ("output", "-o /", r"output=/: is a folder"),
    ("frames_dir", "--frames-dir .", r"frames_dir=\.: "),
    ("frames_dir", "--frames-dir /", r"frames_dir=/: "),
]


@pytest.mark.parametrize(("field", "flags", "message"), NAMELESS)
def test_targets_without_a_name(
    refuse: Refuse, make_model: MakeModel, field: str, flags: str, message: str
) -> None:
    make_model("tiny")
    assert refuse(f"generate '{BALL}' --model tiny --frames 5 {flags}", 2, message) == field


def test_a_clip_has_no_chunks_to_keep(refuse: Refuse) -> None:
    line = "{make} --mode clip --keep-latents latents"
    assert refuse(line, 2, r"keep_latents=latents: clip mode has no chunks.*mode=hybrid")


@pytest.fixture
def stored(tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Latents of a video of 13 frames (two chunks) that the tiny model made."""
    monkeypatch.chdir(tmp_path)
    make_model("tiny")
    line = ["generate", BALL, "--model", "tiny", "--frames", "13", "--seed", "3", "-o", "made.mp4"]
    assert main([*line, "--keep-latents", "kept"]) == 0
    (tmp_path / "made.mp4").unlink()
    (tmp_path / "made.json").unlink()
    return tmp_path / "kept"


RESUMES: list[tuple[str, str]] = [
    (f"'{BALL}' --model tiny --resume none", r"resume=none: no stored rollout there"),
    (f"'{BALL}' --model tiny --resume tiny", r"resume=tiny: no stored rollout there"),
    ("'a blue star' --model tiny --resume kept", r"prompt='a blue star': .* has 'a red ball'"),
    (f"'{BALL}' --model tiny --seed 4 --resume kept", r"seed=4: the stored rollout has 3"),
    (f"'{BALL}' --model tiny --steps 3 --resume kept", r"sigmas=.*: the stored rollout has"),
    (f"'{BALL}' --model tiny --dtype bf16 --resume kept", r"dtype=bf16: .* was made in fp32"),
]  # fmt: skip


def test_a_resumed_request_may_not_differ(refuse: Refuse, stored: Path) -> None:
    for words, message in RESUMES:
        refuse(f"generate {words} -o out/a.mp4", 2, message)


DAMAGES: list[tuple[str, str]] = [
    ("[", r"rollout.json is damaged"),
    ("[]", r"rollout.json is damaged"),
    ("{}", r"rollout.json is damaged: 'version'"),
    ('{"version": 2}', r"version 2, not 1"),
    ('{"request": null}', r"rollout.json is damaged"),
    ('{"request": {"prompt": ""}}', r"rollout.json is damaged: prompt='': is empty"),
    ('{"request": {"prompt": "a", "later": 1}}', r"rollout.json is damaged: later=1: no such"),
    ('{"inputs": {"kind": "text"}}', r"rollout.json is damaged: 'frames'"),
    ('{"weights": 1}', r"rollout.json is damaged"),
    ('{"fingerprint": null}', r"rollout.json is damaged"),
]


def test_damaged_descriptions(refuse: Refuse, stored: Path) -> None:
    path = stored / "rollout.json"
    whole = json.loads(path.read_text())
    for text, message in DAMAGES:
        changed = json.loads(text) if text.startswith('{"') else None
        path.write_text(json.dumps(whole | changed) if changed else text)
        refuse("generate --resume kept -o out/a.mp4", 2, f"resume=kept: {message}")


def test_damaged_chunks(refuse: Refuse, stored: Path) -> None:
    chunk, line = stored / "chunk-000001.safetensors", "generate --resume kept -o out/a.mp4"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-7])
    refuse(line, 2, r"resume=kept/chunk-000001.safetensors: the chunk cannot be read")
    save_file({"other": torch.zeros(1)}, chunk)
    refuse(line, 2, r"resume=kept/chunk-000001.safetensors: the chunk cannot be read")
    save_file({"latents": torch.zeros(1, 4, 2, 8, 8)}, chunk)
    refuse(line, 2, r"chunk 1.*\[1, 4, 2, 8, 8\]")


def test_latents_go_on_with_the_weights_that_made_them(refuse: Refuse, stored: Path) -> None:
    weights = stored.parent / "tiny" / "vae" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    line = "generate --resume kept -o out/a.mp4"
    refuse(line, 2, r"model='.*tiny': its weights are not those that made the latents")


# Runs command lines, one a line of standard input, where there is little space; a limit on the size
# of files stands in for a small disk where no such disk can be mounted.
FILL = """
import resource, shlex, sys
from pathlib import Path
from longtake.cli import main
if sys.argv[1] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
for line in sys.stdin:
    code = main(shlex.split(line))
    left = sorted(p.name for p in Path("full").rglob("*"))
    print(f"{code}: {left}")
"""
MOUNTED = 'mount -t tmpfs -o size=32k tmpfs full && exec "$@"'
NO_SPACE: list[tuple[str, str, list[str]]] = [
    ("-o full/a.mp4", "output=full/a.mp4", []),
    ("--frames-dir full/frames", "frames_dir=full/frames", []),
    ("-o full/a.mp4 --frames-dir full/frames", "=full/", []),
    ("-o a.mp4 --keep-latents full/kept", "keep_latents=full/kept/", ["kept", "rollout.json"]),
]


def test_no_space_left(
    tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk of 32 KiB, in a user namespace of its own, so that no root is needed.

    Latents of finished chunks are kept, which is what they are for.
    """
    monkeypatch.chdir(tmp_path)
    make_model("tiny")
    Path("full").mkdir()
    command = ["unshare", "-Urm", "sh", "-c", MOUNTED, "sh"]
    small = (
        shutil.which("unshare") and not subprocess.run([*command, "true"], check=False).returncode
    )
    script = [sys.executable, "-c", FILL, "disk" if small else "limit"]
    make = f"generate '{BALL}' --model tiny --size 128x128 --frames 17"
    done = subprocess.run(
        [*command, *script] if small else script,
        input="\n".join(f"{make} {wish}" for wish, _, _ in NO_SPACE),
        capture_output=True,
        text=True,
        check=True,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("longtake: ")]
    for (wish, message, left), shown, text in zip(
        NO_SPACE, done.stdout.splitlines(), said, strict=True
    ):
        assert shown == f"2: {left}", f"{wish}: {text}"
        assert message in text
        assert "no space left" in text.lower() or "too large" in text
    assert not Path("a.mp4").exists()
