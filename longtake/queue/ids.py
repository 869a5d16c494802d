"""Opaque ids: what kind of thing it is, and 120 random bits."""

from __future__ import annotations

import secrets

ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # 32 characters, none that looks like another
LENGTH = 24


def new_id(kind: str) -> str:
    """``kind`` (video, batch, key, wh, evt, file), an underscore and 24 random characters."""
    return f"{kind}_{random_text(LENGTH)}"


def random_text(length: int) -> str:
    """``length`` characters of five random bits each."""
    return "".join(ALPHABET[byte & 31] for byte in secrets.token_bytes(length))
