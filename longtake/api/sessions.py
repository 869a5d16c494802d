"""A browser's session: an API key traded for a signed cookie that scripts cannot read.

The cookie names the key by its id and holds no secret of it; it is good until the key is revoked
or ``SESSION_S`` have passed. ``SameSite=Strict`` keeps other sites from sending it, and the door
checks the Origin of every write besides.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import secrets
import threading
import time
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from longtake.api.auth import KEY_S, Principal, limits_of
from longtake.queue.records import ApiKey
from longtake.queue.store import Store
from longtake.settings import DAY_S, Settings

COOKIE = "longtake_session"
SESSION_S = 14 * DAY_S
SECRET_FILE = "session.key"  # noqa: S105 - a file's name
SECRET_BYTES = 32
MAX_COOKIE = 512


class Sessions:
    """Makes and reads the cookies of one service."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._secret: bytes | None = None
        self._keys: dict[str, ApiKey] = {}
        self._read_at = -KEY_S
        self._lock = threading.Lock()

    def sign_in(self, secret: str) -> str | None:
        """The cookie's value for an API key's secret; None for one that opens nothing."""
        key = self._store.keys.find(secret)
        if key is None or key.revoked_at is not None:
            return None
        return self._signed(key.id, int(time.time()))

    def principal(self, cookies: bytes | None) -> Principal | None:
        """Who a ``Cookie`` header stands for, or None. May look into the database."""
        key_id = self._key_id(cookies)
        key = self._key(key_id) if key_id else None
        if key is None or key.revoked_at is not None:
            return None
        return Principal(key.id, limits_of(self._settings, key.limits), key.name)

    def _key_id(self, cookies: bytes | None) -> str | None:
        value = _cookie(cookies)
        if value is None:
            return None
        key_id, _, rest = value.partition(".")
        made, _, _ = rest.partition(".")
        if not made.isdecimal() or len(made) > 12:
            return None
        if not hmac.compare_digest(self._signed(key_id, int(made)).encode(), value.encode()):
            return None
        return key_id if 0 <= time.time() - int(made) < SESSION_S else None

    def _signed(self, key_id: str, made: int) -> str:
        text = f"{key_id}.{made}"
        digest = hmac.new(self._signing_secret(), text.encode(), hashlib.sha256).digest()
        return f"{text}.{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"

    def _signing_secret(self) -> bytes:
        with self._lock:
            if self._secret is None:
                given = self._settings.session_secret
                stored = given.get_secret_value().encode() if given is not None else None
                self._secret = stored or _stored_secret(self._settings.data_dir / SECRET_FILE)
            return self._secret

    def _key(self, key_id: str) -> ApiKey | None:
        """The key of an id; what is known is looked up anew after two seconds."""
        now = time.monotonic()
        with self._lock:
            if now - self._read_at < KEY_S and key_id in self._keys:
                return self._keys[key_id]
        keys = {key.id: key for key in self._store.keys.list()}
        with self._lock:
            self._keys, self._read_at = keys, now
        return keys.get(key_id)


def _cookie(header: bytes | None) -> str | None:
    if header is None:
        return None
    try:
        morsel = SimpleCookie(header.decode("latin-1")).get(COOKIE)
    except CookieError:
        return None
    value = morsel.value if morsel is not None else ""
    return value if 0 < len(value) <= MAX_COOKIE and value.isascii() else None


def _stored_secret(path: Path) -> bytes:
    """The secret of this data folder; made by whoever comes first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path.read_bytes()
