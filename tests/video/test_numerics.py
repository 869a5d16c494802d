"""Equal bits: alignment, fingerprints, noise, and the devices that are there."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longtake.errors import DeviceError
from longtake.video.cost import ITEM_SIZES
from longtake.video.numerics import (
    ALIGNMENT,
    DTYPES,
    aligned,
    choose_device,
    choose_dtype,
    configure,
    draw_noise,
    file_hash,
    fingerprint,
    fingerprint_hash,
    torch_dtype,
)

CPU = torch.device("cpu")


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("offset", [0, 1, 3, 7])
def test_aligned_copies_to_a_multiple_of_64_bytes(dtype: torch.dtype, offset: int) -> None:
    tensor = torch.arange(40).to(dtype)[offset : offset + 30].view(5, 6)
    copy = aligned(tensor)
    assert copy.data_ptr() % ALIGNMENT == 0
    assert copy.data_ptr() != tensor.data_ptr()
    assert (copy.dtype, copy.is_contiguous()) == (dtype, True)
    assert torch.equal(copy, tensor)


def test_aligned_takes_any_layout() -> None:
    turned = torch.rand(4, 6).t()
    assert torch.equal(aligned(turned), turned)
    assert aligned(turned).is_contiguous()
    assert torch.equal(aligned(torch.tensor(3.0)), torch.tensor(3.0))
    assert aligned(torch.empty(0, 4)).shape == (0, 4)


def test_another_process_has_the_same_fingerprint() -> None:
    """Also after memory was used in between, so that nothing lies where it lay here."""
    code = """if True:
        import os, sys
        os.environ.pop("MKL_CBWR", None)
        from longtake.video.numerics import configure, fingerprint, fingerprint_hash
        early = "torch" in sys.modules
        configure(1)
        import torch
        kept = [torch.rand(n) for n in range(1, 900, 7)]
        print(early, os.environ["MKL_CBWR"], os.environ["CUBLAS_WORKSPACE_CONFIG"])
        print(fingerprint_hash(fingerprint(torch.device("cpu"), torch.float32)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    settings, mark = done.stdout.splitlines()
    assert settings == "False AVX2,STRICT :4096:8"
    assert mark == fingerprint_hash(fingerprint(CPU, torch.float32))


@pytest.mark.usefixtures("threads")
def test_the_fingerprint_knows_dtypes_and_no_threads() -> None:
    torch.set_num_threads(1)
    one = fingerprint(CPU, torch.float32)
    torch.set_num_threads(2)
    assert fingerprint(CPU, torch.float32) == one
    half = fingerprint(CPU, torch.bfloat16)
    assert half.keys() == one.keys()
    assert half["matmul_rows"] != one["matmul_rows"]
    assert half["random"] == one["random"]
    assert len(set(one.values())) == len(one)


def test_the_hash_of_a_fingerprint_is_of_every_part() -> None:
    parts = fingerprint(CPU, torch.float32)
    whole = fingerprint_hash(parts)
    assert len(whole) == 16
    for name in parts:
        assert fingerprint_hash(parts | {name: "0" * 12}) != whole


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(1, 4, 2, 4, 8), (1, 16, 3, 60, 104)])
def test_noise_does_not_depend_on_threads_or_the_global_generator(shape: tuple[int, ...]) -> None:
    draws = []
    for threads, seed in [(1, 0), (2, 0), (1, 99)]:
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        draws.append(draw_noise(shape, 7, 3, 0, "start"))
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(draw, draws[0]) for draw in draws)
    assert abs(float(draws[0].mean())) < 4 / draws[0].numel() ** 0.5


def test_noise_is_the_same_in_every_version() -> None:
    """A stored video can only be resumed if its noise can be drawn again."""
    noise = draw_noise((4, 4), 7, 1, 0, "start")
    digest = hashlib.sha256(noise.numpy().tobytes()).hexdigest()
    assert digest[:16] == "8b3fdfa671c9d0da"


def test_dtypes() -> None:
    assert [torch_dtype(name) for name in DTYPES] == [torch.float32, torch.bfloat16, torch.float16]
    assert {name: torch_dtype(name).itemsize for name in DTYPES} == ITEM_SIZES
    assert choose_dtype(None, CPU) == choose_dtype("auto", CPU) == "fp32"
    assert choose_dtype("bf16", CPU) == "bf16"
    assert choose_dtype(None, torch.device("cuda")) == "bf16"
    with pytest.raises(DeviceError, match=r"dtype='fp8': no such dtype; fp32, bf16, fp16"):
        choose_dtype("fp8", CPU)


def test_devices() -> None:
    assert choose_device("cpu") == CPU
    assert choose_device(None).type == choose_device("auto").type
    for name in ("toaster", "meta", "", "cuda:99"):
        with pytest.raises(DeviceError, match=rf"device='{name}': "):
            choose_device(name)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match=r"device='cuda': not available here; usable: .*cpu"):
            choose_device("cuda")


@pytest.mark.usefixtures("threads")
def test_configure_sets_threads() -> None:
    configure(1)
    assert torch.get_num_threads() == 1
    configure(None)
    assert torch.get_num_threads() == 1


def test_file_hash(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 100_000)
    assert file_hash(path) == hashlib.sha256(b"abc" * 100_000).hexdigest()
