"""Faults on purpose, for tests: what ``LONGTAKE_FAULT`` asks the engine process to do.

``KIND:N`` or ``KIND:N@FILE``, several with commas between:

- ``oom-step:N``, ``die-step:N``, ``crash-step:N``, ``hang-step:N``: out of memory, SIGKILL, SIGABRT
  or no answer in the N-th denoising step that an attempt starts, counted from 0;
- ``oom-decode:N``, ``die-decode:N``: out of memory or SIGKILL in VAE decode of chunk N.

Each strikes once in every process. With ``@FILE`` once in all: the first to make that file does.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch

from longtake.errors import RequestError
from longtake.video.codec import StreamingDecoder

VARIABLE = "LONGTAKE_FAULT"
KINDS = ("oom-step", "die-step", "crash-step", "hang-step", "oom-decode", "die-decode")


class Faults:
    """Faults that have not struck yet; without the variable, none."""

    def __init__(self, asked: str) -> None:
        self._left: dict[tuple[str, int], str] = {}
        for item in filter(None, asked.split(",")):
            kind, _, place = item.partition(":")
            number, _, marker = place.partition("@")
            if kind not in KINDS or not number.isdecimal():
                raise RequestError(VARIABLE, item, "no such fault", f"{', '.join(KINDS)} and :N")
            self._left[kind, int(number)] = marker
        self._steps = 0
        self._decodes = 0
        if any(kind.endswith("decode") for kind, _ in self._left):
            self._wrap_decode()

    def begin(self) -> None:
        """An attempt begins."""
        self._steps = self._decodes = 0

    def step(self) -> None:
        """A step begins."""
        number, self._steps = self._steps, self._steps + 1
        if self._strikes("oom-step", number):
            raise torch.OutOfMemoryError("injected")
        if self._strikes("die-step", number):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._strikes("crash-step", number):
            os.abort()
        if self._strikes("hang-step", number):
            threading.Event().wait()

    def _wrap_decode(self) -> None:
        plain = StreamingDecoder.decode

        def decode(decoder: StreamingDecoder, latents: torch.Tensor) -> Any:
            number, self._decodes = self._decodes, self._decodes + 1
            if self._strikes("oom-decode", number):
                raise torch.OutOfMemoryError("injected")
            if self._strikes("die-decode", number):
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(decoder, latents)

        StreamingDecoder.decode = decode  # type: ignore[method-assign,assignment]

    def _strikes(self, kind: str, number: int) -> bool:
        marker = self._left.pop((kind, number), None)
        if not marker:
            return marker is not None
        try:
            Path(marker).open("x").close()
        except FileExistsError:
            return False
        return True
