"""Filter graphs over real files, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import imageio_ffmpeg
import numpy as np
import psutil
import pytest

from longtake.errors import MediaError, OutputError, RequestError
from longtake.video import ffmpeg
from longtake.video.media import read_image
from longtake.video.segments import Frames
from longtake.video.writer import open_writer

SIZE = (48, 32)
COUNT = 30


def greys(count: int = COUNT) -> Frames:
    """Flat frames whose brightness tells their number."""
    levels = np.arange(count, dtype=np.uint8) * 8
    return np.broadcast_to(levels[:, None, None, None], (count, SIZE[1], SIZE[0], 3)).copy()


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "clip.mp4"
    with open_writer(path, size=SIZE, fps=10) as writer:
        writer.write(greys())
    return path


def decode(path: Path) -> Frames:
    with av.open(str(path)) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


def test_probe(clip: Path) -> None:
    assert ffmpeg.probe(clip) == ffmpeg.Probe(COUNT, SIZE, Fraction(10))


def test_probe_tells_the_size_after_rotation(tmp_path: Path, clip: Path) -> None:
    turned = tmp_path / "turned.mp4"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-display_rotation", "90"]
    subprocess.run([*command, "-i", str(clip), "-c", "copy", str(turned)], check=True)
    assert ffmpeg.probe(turned).size == (32, 48)


def test_normalise_covers_crops_and_keeps_the_speed(tmp_path: Path, clip: Path) -> None:
    target = tmp_path / "even.mkv"
    ffmpeg.normalise_clip(clip, target, (20, 30), 5)
    assert ffmpeg.probe(target) == ffmpeg.Probe(COUNT // 2, (20, 30), Fraction(5))
    assert decode(target).mean((1, 2, 3)) == pytest.approx(greys()[::2].mean((1, 2, 3)), abs=9)
    ffmpeg.normalise_clip(clip, target, SIZE, 10, max_frames=4)
    assert np.abs(decode(target).astype(int) - greys(4)).max() <= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.mp4", "even.mkv"]


def test_normalise_makes_pixels_square(tmp_path: Path) -> None:
    wide = tmp_path / "wide.mkv"
    # Black, white, black in thirds of a picture that is stored 48 wide and shown 96 wide.
    bars = "color=s=48x32:d=0.5:r=10,drawbox=x=16:w=16:h=32:c=white:t=fill,setsar=2"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-f", "lavfi", "-i", bars]
    subprocess.run([*command, "-c:v", "ffv1", str(wide)], check=True)
    ffmpeg.normalise_clip(wide, tmp_path / "square.mkv", (32, 32), 10)
    # 96x32 cropped to its middle third is all white.
    assert decode(tmp_path / "square.mkv")[0, :, 2:-2].min() > 200


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_contact_sheet_spans_the_whole_clip(tmp_path: Path, clip: Path, kind: str) -> None:
    target = tmp_path / f"sheet.{kind}"
    sheet = ffmpeg.contact_sheet(clip, target, 3, 2, 160)
    assert sheet.frames == (0, 6, 12, 17, 23, 29)
    assert sheet.seconds == pytest.approx([0, 0.6, 1.2, 1.7, 2.3, 2.9])
    assert sheet.tile == (48, 32)
    image = read_image(target)
    assert image.shape == (2 * 32 + 3 * 4, 3 * 48 + 4 * 4, 3)
    for number, frame in enumerate(sheet.frames):
        row, column = divmod(number, 3)
        y, x = row * 36 + 4 + 16, column * 52 + 4 + 24
        assert image[y, x].mean() == pytest.approx(8 * frame, abs=6)
    assert image[1, 1].min() > 240


def test_sprite_sheet_has_no_gaps(tmp_path: Path, clip: Path) -> None:
    sheet = ffmpeg.sprite_sheet(clip, tmp_path / "sprites.png", 5, 2, 120)
    assert (sheet.gap, sheet.tile) == (0, (24, 16))
    image = read_image(tmp_path / "sprites.png")
    assert image.shape == (32, 120, 3)
    tiles = image.reshape(2, 16, 5, 24, 3).mean((1, 3, 4)).ravel()
    assert tiles == pytest.approx([8 * frame for frame in sheet.frames], abs=3)


def test_sheet_of_a_clip_with_fewer_frames_than_tiles(tmp_path: Path) -> None:
    path = tmp_path / "short.mp4"
    with open_writer(path, size=SIZE, fps=10) as writer:
        writer.write(greys(2))
    sheet = ffmpeg.sprite_sheet(path, tmp_path / "sprites.png", 3, 2, 144)
    assert sheet.frames == (0, 1)
    assert read_image(tmp_path / "sprites.png").shape == (64, 144, 3)
    assert ffmpeg.sprite_sheet(path, tmp_path / "one.png", 1, 1, 48).frames == (0,)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_poster_is_the_middle_frame(tmp_path: Path, clip: Path, kind: str) -> None:
    ffmpeg.poster(clip, tmp_path / f"poster.{kind}")
    image = read_image(tmp_path / f"poster.{kind}")
    assert image.shape == (32, 48, 3)
    assert image.mean() == pytest.approx(8 * (COUNT // 2), abs=3)
    ffmpeg.poster(clip, tmp_path / f"small.{kind}", width=24)
    assert read_image(tmp_path / f"small.{kind}").shape == (16, 24, 3)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
@pytest.mark.parametrize("colour", [(230, 20, 30), (10, 200, 60), (30, 60, 220)])
def test_pictures_have_the_colours_of_the_clip(
    tmp_path: Path, kind: str, colour: tuple[int, int, int]
) -> None:
    path = tmp_path / "clip.mp4"
    with open_writer(path, size=SIZE, fps=10) as writer:
        writer.write(np.broadcast_to(np.array(colour, np.uint8), (3, 32, 48, 3)).copy())
    ffmpeg.poster(path, tmp_path / f"poster.{kind}")
    ffmpeg.sprite_sheet(path, tmp_path / f"sprites.{kind}", 1, 3, 48)
    for name in ("poster", "sprites"):
        image = read_image(tmp_path / f"{name}.{kind}")
        assert np.abs(image.mean((0, 1)) - colour).max() < 4


def test_odd_names_are_names(tmp_path: Path, clip: Path) -> None:
    for name in ("concat:a.mp4", "-y.mp4", "a'b [0:v];%03d\\.mp4"):
        odd = clip.rename(tmp_path / name)
        assert ffmpeg.probe(odd).frames == COUNT
        ffmpeg.normalise_clip(odd, tmp_path / f"{name}.mkv", SIZE, 10)
        ffmpeg.poster(odd, tmp_path / f"{name}.png")
        clip = odd


SLOW = r"input_reference=.*took longer than 0.01 s and was stopped"


def test_time_limit_stops_ffmpeg(tmp_path: Path, clip: Path) -> None:
    before = _children()
    with pytest.raises(MediaError, match=SLOW):
        ffmpeg.probe(clip, timeout_s=0.01)
    with pytest.raises(MediaError, match=SLOW):
        ffmpeg.normalise_clip(clip, tmp_path / "even.mkv", (1920, 1080), 1000, timeout_s=0.01)
    assert list(tmp_path.iterdir()) == [clip]
    assert _children() == before


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


WAYS: list[Callable[[Path, Path], object]] = [
    lambda src, dst: ffmpeg.normalise_clip(src, dst, SIZE, 10),
    lambda src, dst: ffmpeg.contact_sheet(src, dst, 2, 2, 100),
    lambda src, dst: ffmpeg.sprite_sheet(src, dst, 2, 2, 100),
    lambda src, dst: ffmpeg.poster(src, dst),
]


@pytest.mark.parametrize("way", WAYS)
def test_errors_name_the_file_and_leave_nothing(
    tmp_path: Path, clip: Path, way: Callable[[Path, Path], object]
) -> None:
    broken = tmp_path / "broken.mp4"
    data = clip.read_bytes()
    broken.write_bytes(data[: len(data) - 40])
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(MediaError, match="ffmpeg cannot read it: ") as caught:
        way(broken, tmp_path / "out.png")
    assert caught.value.value == broken
    with pytest.raises(MediaError, match="no such file"):
        way(tmp_path / "none.mp4", tmp_path / "out.png")
    with pytest.raises(OutputError, match="does not exist"):
        way(clip, tmp_path / "none" / "out.png")
    with pytest.raises(OutputError, match="is a folder"):
        way(clip, tmp_path / "folder.png")
    assert sorted(tmp_path.iterdir()) == before


FULL = """
import resource, sys
from pathlib import Path
from longtake.errors import OutputError
from longtake.video import ffmpeg
clip, target = map(Path, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    if target.suffix == ".mkv":
        ffmpeg.normalise_clip(clip, target, (960, 640), 10)
    else:
        ffmpeg.poster(clip, target, width=2000)
except OutputError as error:
    sys.stdout.write(str(error))
"""


@pytest.mark.parametrize("name", ["out.mkv", "out.jpg"])
def test_target_that_cannot_grow(tmp_path: Path, clip: Path, name: str) -> None:
    command = [sys.executable, "-c", FULL, str(clip), str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"output={tmp_path / name}: File too large"
    assert list(tmp_path.iterdir()) == [clip]


def test_illegal_sheets_and_kinds(tmp_path: Path, clip: Path) -> None:
    with pytest.raises(RequestError, match="columns, rows"):
        ffmpeg.contact_sheet(clip, tmp_path / "a.png", 0, 2, 100)
    with pytest.raises(RequestError, match="too narrow for 9 columns"):
        ffmpeg.sprite_sheet(clip, tmp_path / "a.png", 9, 2, 10)
    with pytest.raises(OutputError, match=r"extension '.exr'; legal: .jpg, .jpeg, .png, .webp"):
        ffmpeg.poster(clip, tmp_path / "a.exr")
    assert list(tmp_path.iterdir()) == [clip]
