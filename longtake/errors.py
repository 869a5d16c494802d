"""Every exception that longtake raises on purpose.

    LongtakeError                 exit code
    ├── RequestError              2    a field holds a value that is not legal; names legal ones
    │   ├── MediaError            2    an input file cannot be read as what it should be
    │   └── TooLargeError         2    more bytes, items or pixels than are taken (HTTP 413)
    ├── OutputError               2    the output cannot be written where it was asked for
    ├── ResumeError               2    stored latents do not fit the request
    ├── ModelError                3    a model, its manifest or one of its components is not usable
    │   └── WeightsError          3    weights and architecture do not match
    ├── DeviceError               3    the device or dtype asked for is not there
    ├── BackendError              3    the attention backend asked for is missing or unable
    ├── StateError                3    a snapshot was restored after its state had been overwritten
    ├── ParallelError             3    ranks do not agree, or one of them is gone
    ├── DecodeMemoryError         3    VAE decode ran out of memory; the chunk's latents are whole
    ├── NotFoundError             2    no such video, batch, key or webhook, or it is another's
    ├── ConflictError             2    the job's state does not allow what was asked
    ├── LimitError                3    a quota or rate is used up; says when to come again
    ├── ServiceError              3    the service cannot start, or does not take work just now
    ├── LeaseLostError            3    another worker has the job by now; what was made is discarded
    └── Interrupted               130  a stop was asked for before anything was finished

Nothing here imports more than the standard library, so every package may import it.
"""

from __future__ import annotations

from collections.abc import Iterable

LISTED_KEYS = 10


class LongtakeError(Exception):
    """Base of all errors that a caller can cause or must handle."""

    exit_code = 3


class RequestError(LongtakeError):
    """A request's field holds an illegal value.

    Attributes:
        field: name of the field, as in design.md section 8 (the REST name).
        value: what was asked for.
        legal: the nearest legal values, in words, or None where there is no near one.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, reason: str, legal: str | None = None) -> None:
        shown = self._shown(value)
        text = f"{field}={shown}: {reason}"
        super().__init__(f"{text}; {legal}" if legal else text)
        self.field = field
        self.value = value
        self.legal = legal

    @staticmethod
    def _shown(value: object) -> str:
        """The value in the message; a long one is cut."""
        shown = repr(value) if isinstance(value, str) else str(value)
        return shown if len(shown) <= 80 else f"{shown[:60]}... ({len(shown)} characters)"


class MediaError(RequestError):
    """An input image, clip or folder cannot be read; the value is its path, shown whole."""

    @staticmethod
    def _shown(value: object) -> str:
        return str(value)


class TooLargeError(RequestError):
    """An upload or a body holds more bytes or items than a setting takes."""


class OutputError(LongtakeError):
    """A target cannot be written: read-only, no space, wrong kind of file."""

    exit_code = 2

    def __init__(self, field: str, path: object, reason: str) -> None:
        super().__init__(f"{field}={path}: {reason}")
        self.field = field
        self.path = path


class ResumeError(LongtakeError):
    """Stored chunk latents belong to another request, or are damaged."""

    exit_code = 2


class ModelError(LongtakeError):
    """A model cannot be found, its manifest is wrong or a component does not load."""


class WeightsError(ModelError):
    """Weights do not fit the architecture; lists the first ten keys of each kind."""

    def __init__(
        self,
        component: str,
        *,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        shapes: Iterable[str] = (),
    ) -> None:
        kinds = {"missing": missing, "unexpected": unexpected, "wrong shape": shapes}
        parts = [_listed(kind, sorted(keys)) for kind, keys in kinds.items()]
        super().__init__(f"{component}: weights do not fit; " + "; ".join(p for p in parts if p))
        self.component = component


class DeviceError(LongtakeError):
    """The device or dtype asked for is not available here."""


class BackendError(LongtakeError):
    """The attention backend asked for is missing or cannot do what the plan needs."""


class StateError(LongtakeError):
    """A snapshot can no longer be restored."""


class ParallelError(LongtakeError):
    """The ranks of one video do not agree on what to do, or one of them is gone."""


class DecodeMemoryError(LongtakeError):
    """VAE decode ran out of memory; the latents of ``chunk`` are whole."""

    def __init__(self, chunk: int) -> None:
        super().__init__(f"out of memory in VAE decode of chunk {chunk}")
        self.chunk = chunk


class NotFoundError(LongtakeError):
    """Nothing of that kind and id belongs to the caller."""

    exit_code = 2

    def __init__(self, kind: str, name: str, why: str | None = None) -> None:
        super().__init__(f"no {kind} {name!r}" + (f": {why}" if why else ""))
        self.kind = kind
        self.name = name
        self.why = why


class ConflictError(LongtakeError):
    """The state of a job does not allow what was asked; ``code`` names why, for programs."""

    exit_code = 2

    def __init__(self, message: str, code: str = "conflict") -> None:
        super().__init__(message)
        self.code = code


class LimitError(LongtakeError):
    """A quota, a queue bound or a rate is used up."""

    def __init__(self, message: str, code: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class ServiceError(LongtakeError):
    """The service cannot start, or takes no work just now (draining, disk full)."""

    def __init__(self, message: str, retry_after_s: int = 30) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LeaseLostError(LongtakeError):
    """A write under an old fence was refused: the job belongs to another attempt by now."""


class Interrupted(LongtakeError):
    """The stop flag was raised before the first chunk was finished."""

    exit_code = 130


def _listed(kind: str, keys: list[str]) -> str:
    """``"3 missing: a, b, c"``, cut after ten keys; empty for no key."""
    if not keys:
        return ""
    more = f" and {len(keys) - LISTED_KEYS} more" if len(keys) > LISTED_KEYS else ""
    return f"{len(keys)} {kind}: {', '.join(keys[:LISTED_KEYS])}{more}"
