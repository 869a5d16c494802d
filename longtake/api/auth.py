"""Who asks: API keys, or the one local owner while there are none.

Keys are needed once the settings say so, or once a key was ever made; a revoked last key does not
open the service again. ``longtake.api.guard`` checks every request before any route sees it, so a
new route cannot forget to.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request

from longtake.api.errors import ApiError
from longtake.queue.records import LOCAL_OWNER, ApiKey
from longtake.queue.store import Store
from longtake.settings import Settings

KEY_S = 2.0  # a revoked key is refused after at most this long
MAX_CACHED = 4096
MAX_SECRET = 200
CHALLENGE = {"www-authenticate": 'Bearer realm="longtake"'}
LIMITS = ("max_queued", "max_running_s", "max_bytes", "requests_per_minute")


@dataclass(frozen=True, slots=True)
class Principal:
    """Who sent a request, and what it may use; ``id`` owns what the request makes."""

    id: str
    limits: Mapping[str, int] = field(default_factory=dict)
    name: str = ""


class Authenticator:
    """Finds the principal of an ``Authorization`` header; remembers answers for two seconds.

    ``needs_keys`` is true once requests must bring a key.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._local = Principal(LOCAL_OWNER, limits_of(settings))
        self._found: OrderedDict[bytes, tuple[float, Principal | None]] = OrderedDict()
        self._lock = threading.Lock()
        self.needs_keys = settings.require_keys
        self._checked_at = -KEY_S

    @property
    def stale(self) -> bool:
        """True if ``refresh`` should look whether there are keys by now."""
        return not self.needs_keys and time.monotonic() - self._checked_at >= KEY_S

    def refresh(self) -> None:
        """Look into the database whether a key was ever made."""
        self.needs_keys = bool(self._store.keys.list())
        self._checked_at = time.monotonic()

    def cached(self, header: str | None) -> Principal | None:
        """The principal, if no look at the database is needed to know it."""
        if not self.needs_keys:
            return self._local
        secret = _secret(header)
        if secret is None:
            return None
        with self._lock:
            known = self._found.get(_digest(secret))
        return known[1] if known and time.monotonic() < known[0] else None

    def principal(self, header: str | None) -> Principal:
        """Who sent a request with that ``Authorization`` header. Looks into the database.

        Raises:
            ApiError: 401, no key or not a good one.
        """
        if not self.needs_keys:
            return self._local
        secret = _secret(header)
        if secret is None:
            message = "An API key is needed: Authorization: Bearer lt_..."
            raise ApiError(401, message, code="missing_api_key", headers=CHALLENGE)
        digest = _digest(secret)
        now = time.monotonic()
        with self._lock:
            known = self._found.get(digest)
        if known is None or now >= known[0]:
            key = self._store.keys.find(secret)
            known = (now + KEY_S, _of_key(key, self._settings))
            self._remember(digest, known)
        if known[1] is None:
            raise ApiError(401, "The API key is not valid.", headers=CHALLENGE)
        return known[1]

    def _remember(self, digest: bytes, known: tuple[float, Principal | None]) -> None:
        with self._lock:
            self._found[digest] = known
            self._found.move_to_end(digest)
            while len(self._found) > MAX_CACHED:
                self._found.popitem(last=False)


def limits_of(settings: Settings, own: Mapping[str, int] | None = None) -> dict[str, int]:
    """A key's limits; what it has none of comes from the settings. 0 is no limit."""
    own = own or {}
    return {name: int(own.get(name, getattr(settings, name))) for name in LIMITS}


async def principal(request: Request) -> Principal:
    """The request's principal, as a dependency; the guard has put it there."""
    return cast(Principal, request.state.principal)


Owner = Annotated[Principal, Depends(principal)]


def _of_key(key: ApiKey | None, settings: Settings) -> Principal | None:
    if key is None or key.revoked_at is not None:
        return None
    return Principal(key.id, limits_of(settings, key.limits), key.name)


def _secret(header: str | None) -> str | None:
    scheme, _, secret = (header or "").partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not 0 < len(secret) <= MAX_SECRET or not secret.isascii():
        return None
    return secret


def _digest(secret: str) -> bytes:
    """Names a secret in memory; lookups by digest take the same time whatever was guessed."""
    return hashlib.sha256(secret.encode()).digest()
