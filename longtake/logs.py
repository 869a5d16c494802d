"""Logs: one JSON object a line for machines, one short line for a terminal.

Every line says to which request and job it belongs, as far as ``bind`` was told. Prompts are shown
at debug level only and secrets never: what looks like a key, a signing secret or a password in a
URL is masked wherever it stands.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

NAMES = ("request_id", "job_id")
MASK = "***"
MAX_VALUE = 2000
_CONTEXT: ContextVar[tuple[Mapping[str, Any], ...]] = ContextVar("log_context", default=())
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}
_PROMPTS = frozenset({"prompt", "negative_prompt", "prompts", "request", "body"})
_SECRETS = re.compile(
    r"(lt_[a-z0-9]{4,16}_)[A-Za-z0-9]{8,}"
    r"|(whsec_)[A-Za-z0-9+/=]{8,}"
    r"|(\b[Bb]earer\s+)[^\s\"',]+"
    r"|(\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)"
)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


@contextmanager
def bind(values: Mapping[str, Any]) -> Iterator[None]:
    """Have every line that is logged inside carry ``values`` (request_id, job_id).

    The mapping is read when a line is written, so it may be filled later.
    """
    token = _CONTEXT.set((*_CONTEXT.get(), values))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def bound() -> dict[str, str]:
    """The ids that belong to what is going on here."""
    found: dict[str, str] = {}
    for values in _CONTEXT.get():
        found |= {name: str(values[name]) for name in NAMES if values.get(name)}
    return found


def masked(text: str) -> str:
    """``text`` without its secrets."""
    return _SECRETS.sub(lambda match: next(part for part in match.groups() if part) + MASK, text)


class _Formatter(logging.Formatter):
    """What both forms need: the message, its ids and details, masked."""

    def __init__(self, *, prompts: bool) -> None:
        super().__init__()
        self._prompts = prompts

    def parts(self, record: logging.LogRecord) -> tuple[str, dict[str, Any], str]:
        """Message, ids and details, and the traceback."""
        details: dict[str, Any] = dict(bound())
        for name, value in vars(record).items():
            if name in _OWN or value is None or (name in _PROMPTS and not self._prompts):
                continue
            plain = isinstance(value, bool | int | float)
            details[name] = value if plain else masked(str(value))[:MAX_VALUE]
        trace = masked(self.formatException(record.exc_info)) if record.exc_info else ""
        return masked(record.getMessage()), details, trace


class JsonFormatter(_Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of ``record``."""
        message, details, trace = self.parts(record)
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            **details,
        }
        if trace:
            line["traceback"] = trace
        return json.dumps(line)


class TextFormatter(_Formatter):
    """One line for people; what a client sent cannot begin a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of ``record``; a traceback follows on lines of its own."""
        message, details, trace = self.parts(record)
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        extra = "".join(f" {name}={value}" for name, value in details.items())
        head = f"{record.levelname:<7} {record.name}: {message}{extra}"
        line = f"{time} {_CONTROL.sub(lambda found: repr(found.group())[1:-1], head)}"
        return f"{line}\n{trace}" if trace else line


def set_up(level: str, stream: TextIO | None = None, *, as_json: bool | None = None) -> None:
    """Send all logs to ``stream`` (standard error), as JSON unless it is a terminal."""
    stream = stream or sys.stderr
    as_json = not stream.isatty() if as_json is None else as_json
    prompts = level.lower() == "debug"
    handler = logging.StreamHandler(stream)
    form = JsonFormatter if as_json else TextFormatter
    handler.setFormatter(form(prompts=prompts))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # at debug they log every statement with its values, and every header they send
    for name in ("sqlalchemy", "httpx", "httpcore", "PIL", "botocore", "multipart"):
        logging.getLogger(name).setLevel(logging.WARNING)
