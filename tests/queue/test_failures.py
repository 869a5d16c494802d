"""What errors in the engine process mean for a job, and faults on purpose."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from longtake.errors import DeviceError, OutputError, RequestError, ResumeError, WeightsError
from longtake.queue.failures import error_code, failed
from longtake.queue.faults import Faults
from longtake.queue.records import ErrorCode


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("size", 1, "x"), ErrorCode.INVALID_REQUEST),
        (ResumeError("x"), ErrorCode.INVALID_REQUEST),
        (WeightsError("x"), ErrorCode.MODEL_ERROR),
        (DeviceError("x"), ErrorCode.MODEL_ERROR),
        (OutputError("output", "x", "no space left on the device"), ErrorCode.STORAGE),
        (OSError(errno.ENOSPC, "x"), ErrorCode.STORAGE),
        (OSError(errno.EPIPE, "x"), ErrorCode.INTERNAL),
        (MemoryError(), ErrorCode.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("x"), ErrorCode.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] can't allocate memory"), ErrorCode.OUT_OF_MEMORY),
        (RuntimeError("shapes do not match"), ErrorCode.INTERNAL),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), ErrorCode.INTERNAL),
    ],
)
def test_kinds_of_failure(error: Exception, code: ErrorCode) -> None:
    assert error_code(error) is code
    assert failed(error, "generating", 1, 0).broken is isinstance(error, torch.AcceleratorError)


def test_faults_that_do_not_exist_are_refused() -> None:
    with pytest.raises(RequestError, match="no such fault"):
        Faults("burn-step:1")
    with pytest.raises(RequestError, match="no such fault"):
        Faults("oom-step:x")


def test_a_fault_with_a_marker_strikes_once_in_all(tmp_path: Path) -> None:
    asked = f"oom-step:0@{tmp_path / 'marker'}"
    with pytest.raises(torch.OutOfMemoryError):
        Faults(asked).step()
    Faults(asked).step()
