"""A submission that is sent twice makes one job.

An ``Idempotency-Key`` (draft-ietf-httpapi-idempotency-key-header-07, quoted or bare) is remembered
for ``settings.idempotency_s``: the same key with the same body answers with the first one's job,
with another body it is a 422. OpenAI's SDK sends no key but counts its tries in
``x-stainless-retry-count``: from 1 on, the same body of the same caller on the same route within a
quarter of an hour (its own timeout is ten minutes) is the job that an earlier try made.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from longtake.api.errors import ApiError
from longtake.queue.ids import random_text
from longtake.queue.lookups import Lookups
from longtake.queue.records import Job

RETRY_S = 900
MAX_KEY = 200
_QUOTED = re.compile(r'^"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"$')
_BARE = re.compile(r"^[\x21\x23-\x7e]+$")
_COUNT = re.compile(r"^[0-9]{1,3}$")


def read_key(header: str) -> str:
    """The value of an ``Idempotency-Key``.

    Raises:
        ApiError: 400, it is no string of printable characters.
    """
    text = header.strip()
    quoted = _QUOTED.match(text)
    value = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else text
    if not 0 < len(value) <= MAX_KEY or not (quoted or _BARE.match(text)):
        message = f"Idempotency-Key: 1 to {MAX_KEY} printable ASCII characters, in quotes or bare"
        raise ApiError(400, message, code="invalid_idempotency_key")
    return value


class Flights:
    """Which submissions are at work in this process, by what makes them the same."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._landed = threading.Condition()

    @contextmanager
    def together(self, key: str) -> Iterator[None]:
        """At work beside others of the same key."""
        with self._landed:
            self._counts[key] += 1
        try:
            yield
        finally:
            self._leave(key)

    @contextmanager
    def alone(self, key: str) -> Iterator[None]:
        """At work once all others of the same key have ended."""
        with self._landed:
            self._landed.wait_for(lambda: key not in self._counts)
            # counted before the lock is let go, so that the next one waits
            self._counts[key] += 1
        try:
            yield
        finally:
            self._leave(key)

    def _leave(self, key: str) -> None:
        with self._landed:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                self._landed.notify_all()


class Once:
    """Runs submissions, each once."""

    def __init__(self, lookups: Lookups, remember_s: float) -> None:
        self._lookups = lookups
        self._remember_s = remember_s
        self._flights = Flights()

    def submit(
        self,
        owner: str,
        headers: Mapping[str, str],
        fingerprint: Callable[[], str],
        submit: Callable[[tuple[str, str] | None], Job],
    ) -> Job:
        """``submit`` a job unless this repeats a submission that made one.

        Args:
            owner: keys and repetitions are of one owner.
            headers: of the request.
            fingerprint: of route and body; asked for only where it is needed.
            submit: makes the job, and has the (key, fingerprint) that it is given remembered.

        Raises:
            ApiError: 400, the key is not legal.
            ConflictError: the key came with another body before.
        """
        header = headers.get("idempotency-key")
        tries = headers.get("x-stainless-retry-count", "")
        if header is not None:
            key = f"key:{read_key(header)}"
            mark = fingerprint()
            with self._flights.alone(f"{owner} {key}"):
                made = self._lookups.by_key(owner, key, mark, self._remember_s)
                return made or submit((key, mark))
        if not _COUNT.match(tries):
            return submit(None)
        mark = fingerprint()
        prefix = f"try:{mark}:"
        remembered = (f"{prefix}{random_text(12)}", mark)
        if int(tries) == 0:
            with self._flights.together(f"{owner} {prefix}"):
                return submit(remembered)
        # the first try may still be at work while its client has given up on it
        with self._flights.alone(f"{owner} {prefix}"):
            made = self._lookups.by_tries(owner, prefix, mark, RETRY_S)
            return made or submit(remembered)
