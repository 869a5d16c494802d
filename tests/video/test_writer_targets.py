"""Targets that cannot be written, and wishes that are refused: each leaves all as it was."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from longtake.errors import OutputError, RequestError
from longtake.video.segments import Frames, frame_rate
from longtake.video.writer import FORMATS, FRAMES_DIR, open_writer

SIZE = (48, 32)


def moving(count: int, size: tuple[int, int] = SIZE) -> Frames:
    """Frames that differ from each other."""
    frames = np.zeros((count, size[1], size[0], 3), np.uint8)
    for index in range(count):
        frames[index, :, index : index + 6] = 220
    return frames


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "frames",
    [
        moving(4, (48, 40)),
        moving(4)[0],
        moving(4)[:0],
        moving(4)[..., :2],
        moving(4).astype(np.float32),
    ],
    ids=["size", "one frame", "no frame", "channels", "dtype"],
)
def test_wrong_frames_are_refused(tmp_path: Path, name: str, frames: Frames) -> None:
    writer = open_writer(tmp_path / f"clip.{name}", size=SIZE, fps=16, format=name)
    writer.write(moving(4))
    with pytest.raises(OutputError, match=r"frames must be uint8 \[T, 32, 48, 3\], got "):
        writer.write(frames)
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), 1001, 1e-9])
def test_illegal_fps_is_refused(tmp_path: Path, fps: float) -> None:
    with pytest.raises(RequestError, match=r"^fps=") as caught:
        open_writer(tmp_path / "clip.mp4", size=SIZE, fps=fps)
    assert caught.value.field == "fps"
    assert snapshot(tmp_path) == {}


def test_gif_refuses_what_it_would_play_slower(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="at most 50"):
        open_writer(tmp_path / "clip.gif", size=SIZE, fps=60)
    assert frame_rate(50) == 50
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("name", ["mp4", "webm"])
@pytest.mark.parametrize("size", [(47, 32), (48, 31)])
def test_odd_size_is_refused_with_the_nearest(
    tmp_path: Path, name: str, size: tuple[int, int]
) -> None:
    with pytest.raises(RequestError, match=r"needs an even width and height; nearest 48x32"):
        open_writer(tmp_path / f"clip.{name}", size=size, fps=16)
    with pytest.raises(RequestError, match="must be positive"):
        open_writer(tmp_path / f"clip.{name}", size=(0, 32), fps=16)
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("clip.avi", None, r"extension '.avi'; legal: mp4, webm, gif, png, frames-dir"),
        ("clip", None, r"extension ''; legal: mp4"),
        ("clip.mp4", "avi", r"format=avi: unknown; legal: mp4, webm, gif, png, frames-dir"),
        ("clip.mp4", "webm", r"format=webm: contradicts the name clip.mp4"),
        ("none/clip.mp4", None, r"folder .*none does not exist"),
        ("folder.mp4", None, r"is a folder, not a file"),
        ("file.txt/clip.mp4", None, r"Not a directory"),
        ("n" * 300 + ".mp4", None, r"File name too long"),
        ("nul\0.mp4", None, r"null byte"),
        ("pipe.mp4", None, r"is a device or pipe"),
        ("full", FRAMES_DIR, r"frames_dir=.*the folder is not empty"),
        ("file.txt", FRAMES_DIR, r"frames_dir=.*is a file, not a folder"),
        ("none/frames", FRAMES_DIR, r"frames_dir=.*No such file or directory"),
    ],
)
def test_targets_that_are_refused(
    tmp_path: Path, name: str, kind: str | None, message: str
) -> None:
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file.txt").write_text("mine")
    os.mkfifo(tmp_path / "pipe.mp4")
    before = snapshot(tmp_path)
    with pytest.raises(OutputError, match=message):
        open_writer(tmp_path / name, size=SIZE, fps=16, format=kind)
    assert snapshot(tmp_path) == before


def test_frames_dir_keeps_what_is_not_its_own(tmp_path: Path) -> None:
    made = tmp_path / "empty"
    made.mkdir()
    writer = open_writer(made, size=SIZE, fps=16, format=FRAMES_DIR)
    writer.write(moving(2))
    (made / "mine.txt").write_text("mine")
    writer.abort()
    assert snapshot(tmp_path) == {"empty": None, "empty/mine.txt": b"mine"}


@pytest.fixture
def locked() -> Iterator[Path]:
    """A folder that may not be written to; root gives up its powers for as long."""
    root = os.geteuid() == 0
    folder = Path(tempfile.mkdtemp(prefix="longtake-locked-"))
    try:
        if root:
            os.seteuid(65534)
        else:
            folder.chmod(0o555)
        yield folder
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", FORMATS)
def test_folder_without_permission_is_refused(locked: Path, name: str) -> None:
    with pytest.raises(OutputError, match=os.strerror(errno.EACCES)):
        open_writer(locked / f"clip.{name}", size=SIZE, fps=16, format=name)


def test_read_only_target_is_refused(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="longtake-open-"))
    root = os.geteuid() == 0
    try:
        folder.chmod(0o777)
        (folder / "clip.mp4").write_bytes(b"old")
        (folder / "clip.mp4").chmod(0o444)
        if root:
            os.seteuid(65534)
        with pytest.raises(OutputError, match="exists and is read-only"):
            open_writer(folder / "clip.mp4", size=SIZE, fps=16)
    finally:
        if root:
            os.seteuid(0)
        left = snapshot(folder)
        shutil.rmtree(folder)
    assert left == {"clip.mp4": b"old"}


# Noise, so that every format soon meets its limit; tells the stage at which it was stopped.
FILL = """
import sys
from pathlib import Path
import numpy as np
from longtake.errors import OutputError
from longtake.video.writer import open_writer
limit, name, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
if limit:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
writer = open_writer(folder / f"clip.{name}", size=(48, 32), fps=16, format=name)
draw = np.random.default_rng(0)
stage = "write"
try:
    for _ in range(int(sys.argv[4])):
        writer.write(draw.integers(0, 256, (8, 32, 48, 3), np.uint8))
    stage = "close"
    writer.close()
except OutputError as error:
    sys.stdout.write(f"{stage}: {error}; left: {sorted(p.name for p in folder.rglob('*'))}")
"""


@pytest.mark.parametrize("name", FORMATS)
def test_file_size_limit_at_any_write(tmp_path: Path, name: str) -> None:
    limit = "3000" if name == FRAMES_DIR else "60000"
    command = [sys.executable, "-c", FILL, limit, name, str(tmp_path), "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("write: ")
    assert f": {os.strerror(errno.EFBIG)}; left: []" in done.stdout
    assert done.stderr == ""
    assert snapshot(tmp_path) == {}


def test_file_size_limit_at_the_very_end(tmp_path: Path) -> None:
    def fill(limit: int) -> str:
        command = [sys.executable, "-c", FILL, str(limit), "mp4", str(tmp_path), "2"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert fill(0) == ""
    size = (tmp_path / "clip.mp4").stat().st_size
    (tmp_path / "clip.mp4").unlink()
    assert fill(size - 1).startswith("close: output=")
    assert snapshot(tmp_path) == {}
    assert fill(size) == ""


def test_full_disk(tmp_path: Path) -> None:
    """A file system of 64 KiB, in a user namespace of its own, so that no root is needed."""
    inside = 'mount -t tmpfs -o size=64k tmpfs "$1" && shift && exec "$@"'
    space = ["unshare", "-Urm", "sh", "-c", inside, "sh", str(tmp_path)]
    if (
        not shutil.which("unshare")
        or subprocess.run([*space, "true"], capture_output=True).returncode
    ):
        pytest.skip("no user namespaces with tmpfs here")
    for name in FORMATS:
        command = [*space, sys.executable, "-c", FILL, "0", name, str(tmp_path), "40"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "no space left on the device; left: []" in done.stdout
