"""Numbers as people read them; the templates' filters."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

UNITS = ("B", "kB", "MB", "GB", "TB")
MINUTE, HOUR, DAY = 60, 3600, 86_400


def seconds(value: float | None) -> str:
    """``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``; empty for None."""
    if value is None:
        return ""
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 2 * MINUTE:
        return f"{whole} s"
    if whole < 2 * HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE} s"
    return f"{whole // HOUR} h {whole % HOUR // MINUTE} min"


def days(value: float) -> str:
    """A long time: ``30 days``, ``1 day``, or as of ``seconds``."""
    whole = round(value / DAY)
    if whole < 1:
        return seconds(value)
    return f"{whole} day" if whole == 1 else f"{whole} days"


def timecode(value: float | None) -> str:
    """Running time of a video: ``0:05.1``, ``1:04.0``; empty for None."""
    if value is None:
        return ""
    minutes, rest = divmod(round(value, 1), MINUTE)
    return f"{int(minutes)}:{rest:04.1f}"


def size(value: float | None) -> str:
    """``3.4 MB``; powers of 1000."""
    if value is None:
        return ""
    amount = float(value)
    for unit in UNITS:
        if amount < 1000 or unit == UNITS[-1]:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return ""


def middle(text: str, limit: int) -> str:
    """A text that is too long without its middle: what is legal stands at the end."""
    if len(text) <= limit:
        return text
    start = limit // 4
    head, tail = text[:start].rpartition(" "), text[start + 3 - limit :].partition(" ")
    return f"{head[0] or head[2]} … {tail[2] or tail[0]}"


def number(value: Any) -> str:
    """A float without needless zeros, anything else as it is."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def moment(value: float | None) -> str:
    """A time as ISO 8601 in UTC, for a ``time`` element."""
    return "" if value is None else datetime.fromtimestamp(value, UTC).isoformat("T", "seconds")


def day(value: float | None) -> str:
    """``30 Nov 2026, 08:24`` in UTC; the page's script shows the reader's own time."""
    if value is None:
        return ""
    return datetime.fromtimestamp(value, UTC).strftime("%-d %b %Y, %H:%M UTC")


def plural(count: int, one: str, many: str | None = None) -> str:
    """``1 video``, ``2 videos``."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {many or one + 's'}"


FILTERS: dict[str, Callable[..., str]] = {
    "seconds": seconds,
    "days": days,
    "timecode": timecode,
    "size": size,
    "middle": middle,
    "number": number,
    "moment": moment,
    "day": day,
    "plural": plural,
}
