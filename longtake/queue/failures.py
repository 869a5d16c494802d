"""What an error in the engine process means for the job."""

from __future__ import annotations

import errno
import logging

import torch

from longtake.errors import (
    BackendError,
    DecodeMemoryError,
    DeviceError,
    ModelError,
    OutputError,
    RequestError,
    ResumeError,
)
from longtake.queue.messages import Failed
from longtake.queue.records import ErrorCode
from longtake.video.memory import is_out_of_memory

STORAGE_ERRNO = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
log = logging.getLogger(__name__)


def failed(error: BaseException, stage: str, chunk: int | None, memory_bytes: int) -> Failed:
    """The message about an error; a fault of longtake goes to the log whole, and only there."""
    code = error_code(error)
    message = str(error)
    field = error.field if isinstance(error, RequestError) else None
    if code is ErrorCode.INTERNAL:
        log.error("an attempt failed in stage %s", stage, exc_info=error)
        message = f"{type(error).__name__} in stage {stage}; the worker's log has the details"
    elif code is ErrorCode.OUT_OF_MEMORY and not isinstance(error, DecodeMemoryError):
        message = f"out of memory in stage {stage}"
    broken = isinstance(error, torch.AcceleratorError) and code is not ErrorCode.OUT_OF_MEMORY
    return Failed(code, message, stage, chunk, memory_bytes, field, broken)


def error_code(error: BaseException) -> ErrorCode:
    """Which kind of failure an error is."""
    if isinstance(error, DecodeMemoryError) or is_out_of_memory(error):
        return ErrorCode.OUT_OF_MEMORY
    if isinstance(error, RequestError | ResumeError):
        return ErrorCode.INVALID_REQUEST
    if isinstance(error, ModelError | DeviceError | BackendError):
        return ErrorCode.MODEL_ERROR
    # a request names no path of its own here, so it is the service's disk
    if isinstance(error, OutputError):
        return ErrorCode.STORAGE
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNO:
        return ErrorCode.STORAGE
    return ErrorCode.INTERNAL
