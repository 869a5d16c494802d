"""``longtake generate --parallel``: own ranks, those of torchrun on two hosts, a lost one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from longtake.errors import RequestError
from longtake.video.options import EngineOptions, SilentObserver, Storage
from longtake.video.parallel_layout import (
    Facts,
    Layout,
    Place,
    bytes_a_layer,
    most_ranks,
    resolve_layout,
)
from longtake.video.prepare import plan_request, prepare
from longtake.video.request import VideoRequest

MakeModel = Callable[..., Path]
LIMIT_S = 400.0
PROMPT = "a red ball"
SUBNET = "10.77.31"
pytestmark = pytest.mark.timeout(1200)


def command(model: Path, folder: Path, *more: str) -> list[str]:
    """A video of five chunks by two ranks; the chunks stay in ``folder``."""
    return [
        *("generate", PROMPT, "--model", str(model), "--seed", "3", "--num-frames", "33"),
        *("--parallel", "ulysses=2", "--threads", "1", "--keep-latents", str(folder)),
        *("-o", str(folder.with_suffix(".mp4")), "--json", *more),
    ]


def environment(**changes: str) -> dict[str, str]:
    """Without the noise of libraries."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **changes}


def latents_of(folder: Path) -> torch.Tensor:
    """All stored latents."""
    files = sorted(folder.glob("chunk-*"))
    return torch.cat([load_file(file)["latents"] for file in files], 2)


@pytest.fixture
def alone(make_model: MakeModel, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """The model, and the video's latents by one rank."""
    model = make_model()
    request = VideoRequest(prompt=PROMPT, model=str(model), seed=3, num_frames=33)
    storage = Storage(keep=tmp_path / "alone")
    made = prepare(request, EngineOptions("cpu"), storage, SilentObserver(), lambda _: None)
    assert len(list(made.pieces)) == 5
    return model, latents_of(tmp_path / "alone")


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Output of a process that ends in time."""
    try:
        return process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()


def start(line: list[str], **more: Any) -> subprocess.Popen[str]:
    """Start a command in a session of its own."""
    pipe = subprocess.PIPE
    options = {"stdout": pipe, "stderr": pipe, "text": True, "start_new_session": True}
    return subprocess.Popen(line, **{**options, "env": environment(), **more})


def test_ranks_of_its_own_make_the_video_and_end(
    alone: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    """Same latents, a receipt that says so; then a follower is killed: an error, nothing left."""
    model, expected = alone
    run = [sys.executable, "-m", "longtake"]
    process = start(run + command(model, tmp_path / "kept"))
    output, errors = finish(process)
    assert process.returncode == 0, errors
    receipt = json.loads(output)
    assert receipt["engine"]["parallel"] == {"layout": "ulysses=2", "ranks": 2, "over": "gloo"}
    assert (latents_of(tmp_path / "kept") - expected).abs().max() <= 1e-5

    lost = tmp_path / "lost"
    process = start(run + command(model, lost, "--num-frames", "4001"))
    until = monotonic() + LIMIT_S
    while not list(lost.glob("chunk-*")):
        assert monotonic() < until
        with suppress(subprocess.TimeoutExpired):
            pytest.fail(f"ended early: {process.wait(0.2)}")
    with_children = psutil.Process(process.pid).children(recursive=True)
    follower = next(p for p in with_children if "spawn_main" in " ".join(p.cmdline()))
    follower.send_signal(signal.SIGKILL)
    output, errors = finish(process)
    until = monotonic() + LIMIT_S
    assert process.returncode == 3, errors
    assert json.loads(output)["error"]["type"] == "ParallelError"
    assert "rank 1 (exit code -9) ended before its time" in errors
    while left := [process for process in with_children if lives(process)]:
        assert monotonic() < until, left
        psutil.wait_procs(left, timeout=0.1)


def lives(process: psutil.Process) -> bool:
    """A zombie is dead: who adopted it has only not looked yet."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def two_hosts() -> Iterator[list[list[str]]]:
    """Prefixes that run a command in either of two network namespaces, joined by a cable."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    names = [f"longtake-{os.getpid()}-{index}" for index in range(2)]
    cable = [f"lt{os.getpid() % 100000}{end}" for end in "ab"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for index, (name, end) in enumerate(zip(names, cable, strict=True)):
            ip("link", "set", end, "netns", name)
            inside = ("netns", "exec", name, "ip")
            ip(*inside, "link", "set", end, "name", "host0")
            ip(*inside, "addr", "add", f"{SUBNET}.{index + 1}/24", "dev", "host0")
            ip(*inside, "link", "set", "host0", "up")
            ip(*inside, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names]
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_torchrun_on_two_hosts(
    alone: tuple[Path, torch.Tensor], two_hosts: list[list[str]], tmp_path: Path
) -> None:
    """Each host runs the same command under torchrun; the first one has the video."""
    model, expected = alone
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--master-addr", f"{SUBNET}.1", "--master-port", "29517"),
    ]
    processes = []
    try:
        for rank, prefix in enumerate(two_hosts):
            which = ["--node-rank", str(rank), "-m", "longtake"]
            line = [*prefix, *launcher, *which, *command(model, tmp_path / f"host-{rank}")]
            processes.append(start(line, env=environment(GLOO_SOCKET_IFNAME="host0")))
        said = [finish(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], said
    assert (latents_of(tmp_path / "host-0") - expected).abs().max() <= 1e-5
    assert not (tmp_path / "host-1").exists()
    assert not (tmp_path / "host-1.mp4").exists()
    assert said[1][0] == ""


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("ulysses=3", {}, "ulysses=3 does not divide 2 heads"),
        ("ring=9", {}, "ring=9 is more than a frame's 8 tokens"),
        ("ring=5", {}, "5 ranks cannot divide VAE decode of 4 rows"),
        ("cfg=2", {}, "guidance_scale is 1"),
        ("ring=2", {"attention": "topk:2"}, "attention=topk"),
        ("ulysses=2,ulysses=2", {}, "named twice"),
        ("tensor=2", {}, "is no layout"),
        ("cfg=3", {}, "guidance has two halves"),
        ("ulysses=0", {}, "is not a number of ranks"),
    ],
)
def test_a_plan_refuses_by_name(
    make_model: MakeModel, text: str, changes: dict[str, Any], message: str
) -> None:
    request = VideoRequest(prompt=PROMPT, model=str(make_model()), **changes)
    with pytest.raises(RequestError, match=message) as caught:
        plan_request(request, EngineOptions("cpu", parallel=text), probe=False)
    assert caught.value.field == "parallel"


def test_a_clip_refuses_ranks(make_model: MakeModel) -> None:
    request = VideoRequest(prompt=PROMPT, model="papercut", mode="clip")
    with pytest.raises(RequestError, match="mode=hybrid") as caught:
        plan_request(request, EngineOptions("cpu", parallel="ulysses=2"), probe=False)
    assert caught.value.field == "parallel"


def test_auto_sends_least_first() -> None:
    guided = Facts(heads=12, frame_tokens=1560, latent_rows=60, guided=True)
    plain = Facts(heads=12, frame_tokens=1560, latent_rows=60, guided=False)
    assert resolve_layout("auto", guided, 4) == Layout(2, 1, 2)
    assert resolve_layout("auto", plain, 4) == Layout(4)
    assert resolve_layout("auto", plain, 8) == Layout(4, 2)
    assert resolve_layout("auto", plain, 5) == Layout(1, 5)


def test_auto_takes_as_many_ranks_as_can_share() -> None:
    small = Facts(heads=4, frame_tokens=40, latent_rows=10, guided=False)
    assert [most_ranks(there, small) for there in (1, 2, 7, 10, 16, 64)] == [1, 2, 7, 10, 10, 10]
    ranked = Facts(12, 1560, 60, guided=False, readings=("topk",))
    assert most_ranks(8, ranked) == 6
    with pytest.raises(RequestError, match=r"ulysses=999\d* is not a number of ranks"):
        resolve_layout(f"ulysses={'9' * 5000}", small)


def test_ulysses_sends_new_tokens_only() -> None:
    """Bytes do not grow with what is seen; those of ring do."""
    width = (1560, 12, 128, 2)
    place = Place(0, 0, 0)
    near, far = (
        bytes_a_layer(Layout(ulysses=4), place, 3 * 1560, seen * 1560, width) for seen in (3, 240)
    )
    own = 3 * 1560 // 4
    assert near == far == (3 * own * 3 + 3 * own) * 3 * 128 * 2
    ring = [bytes_a_layer(Layout(ring=4), place, 3 * 1560, n * 1560, width) for n in (3, 240)]
    assert ring[1] == 80 * ring[0]
