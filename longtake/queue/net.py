"""Where the service connects on behalf of others: public addresses only, checked when used.

A name is resolved once, every address it has is checked, and the connection goes to a checked
address with the name in ``Host`` and TLS, so a second answer of the DNS changes nothing. Proxies of
the environment are not used and redirects are never followed without the same check.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, TypeAlias
from urllib.parse import unquote, urljoin

import httpx

from longtake import __version__
from longtake.errors import RequestError, TooLargeError

MAX_URL_CHARACTERS = 2048
MAX_REDIRECTS = 3
MAX_ADDRESSES = 4  # of one name, tried one after the other
USER_AGENT = f"longtake/{__version__}"
_DEFAULT_PORTS = {"http": 80, "https": 443}
_FIRST_FREE_PORT, _LAST_PORT = 1024, 65_535  # below are the ports of other protocols
_NAME = re.compile(r"^(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?$")
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f-\x9f\\\s]")
_NUMBER = re.compile(r"^(0x[0-9a-f]*|[0-9]+)$")
# reserved for names that only a machine or its network knows
_INNER_NAMES = (".localhost", ".local", ".localdomain", ".internal", ".home.arpa")
_REDIRECTS = (301, 302, 303, 307, 308)

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

# IANA's special-purpose registries. Of IPv6 only the part that is given out is allowed at all, so
# mapped, NAT64, unique local, link-local and multicast addresses need no entry.
_SPECIAL_4 = tuple(
    ipaddress.IPv4Network(net)
    for net in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16"),
        *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    )
)
_GIVEN_OUT_6 = ipaddress.IPv6Network("2000::/3")
# IETF protocols with Teredo, documentation (two), 6to4
_SPECIAL_6 = tuple(
    ipaddress.IPv6Network(net) for net in ("2001::/23", "2001:db8::/32", "3fff::/20", "2002::/16")
)


class AddressError(httpx.TransportError):
    """A host is not to be connected to; with ``unknown``, it has no address just now."""

    def __init__(self, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown


@dataclass(frozen=True, slots=True)
class Fetched:
    """What ``fetch`` wrote: its size in bytes and the last part of the URL's path."""

    size: int
    name: str


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet; transition spellings do not."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return not any(parsed in net for net in _SPECIAL_4)
    return (
        parsed.scope_id is None
        and parsed in _GIVEN_OUT_6
        and not any(parsed in net for net in _SPECIAL_6)
    )


def check_url(url: str, field: str, *, allow_private: bool = False) -> httpx.URL:
    """``url`` in parts, if it is one that may be connected to as far as its text tells.

    Raises:
        RequestError: another scheme, a user name, a port of another protocol, an unusual spelling
            of an address, or an address that is not public.
    """
    legal = "an http or https URL with a public host"
    if len(url) > MAX_URL_CHARACTERS:
        raise RequestError(field, url, f"is longer than {MAX_URL_CHARACTERS} characters")
    if _UNPRINTABLE.search(url):
        raise RequestError(field, url, "holds a blank, a backslash or a control character", legal)
    try:
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode("ascii").lower()
    except (httpx.InvalidURL, UnicodeError, ValueError):
        raise RequestError(field, url, "is not a URL", legal) from None
    if parsed.scheme not in _DEFAULT_PORTS or not host:
        raise RequestError(field, url, "is not an http or https URL", legal)
    if parsed.userinfo:
        raise RequestError(field, url, "holds a user name or password", "leave it out")
    reason = _bad_host(host, allow_private=allow_private)
    if reason:
        raise RequestError(field, url, reason, legal)
    port = _DEFAULT_PORTS[parsed.scheme] if parsed.port is None else parsed.port
    if port not in _DEFAULT_PORTS.values() and not _FIRST_FREE_PORT <= port <= _LAST_PORT:
        raise RequestError(field, url, f"port {port} is not a web server's", "80, 443 or >= 1024")
    return parsed


def _bad_host(host: str, *, allow_private: bool) -> str:
    """Why a host must not be used; empty for a good one."""
    literal = _literal(host)
    if literal is not None:
        return "" if allow_private or is_public(str(literal)) else "is not a public address"
    if not _NAME.match(host):
        return "its host is not a name or an address"
    name = host.rstrip(".")
    if _NUMBER.match(name.rpartition(".")[2]):
        return "its host is an address in an unusual spelling"
    if not allow_private and ("." not in name or name.endswith(_INNER_NAMES)):
        return "its host is a name of this machine or network"
    return ""


def _literal(host: str) -> Address | None:
    """The address that a host is, in its usual spelling; None for a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


async def resolve(url: httpx.URL, *, allow_private: bool = False) -> list[str]:
    """Every address of the URL's host, all of them checked.

    Raises:
        AddressError: there is none, or one of them is not public.
    """
    host = url.raw_host.decode("ascii").lower()
    reason = _bad_host(host, allow_private=allow_private)
    if reason:
        raise AddressError(reason)
    literal = _literal(host)
    if literal is not None:
        return [str(literal)]
    port = url.port or _DEFAULT_PORTS[url.scheme]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise AddressError("its host has no address", unknown=True) from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not allow_private and not all(is_public(address) for address in addresses):
        raise AddressError("its host is not a public address")
    return addresses


class GuardedTransport(httpx.AsyncBaseTransport):
    """Connects to the addresses that ``resolve`` gave, under the name that was asked for."""

    def __init__(
        self, *, allow_private: bool = False, verify: ssl.SSLContext | bool = True
    ) -> None:
        self._allow_private = allow_private
        # Nothing is kept open: a pool knows addresses only, and two names may share one.
        self._inner = httpx.AsyncHTTPTransport(
            verify=verify, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` to the first address that takes the connection."""
        name = request.url.raw_host.decode("ascii")
        addresses = await resolve(request.url, allow_private=self._allow_private)
        if _literal(name) is None:
            request.extensions = {**request.extensions, "sni_hostname": name.rstrip(".")}
        asked = request.url
        try:
            return await self._send(request, addresses[:MAX_ADDRESSES])
        finally:
            request.url = asked

    async def _send(self, request: httpx.Request, addresses: Sequence[str]) -> httpx.Response:
        asked = request.url
        for address in addresses[:-1]:
            request.url = asked.copy_with(host=address)
            try:
                return await self._inner.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        request.url = asked.copy_with(host=addresses[-1])
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Close what is open."""
        await self._inner.aclose()


def guarded_client(
    timeout_s: float, *, allow_private: bool = False, verify: ssl.SSLContext | bool = True
) -> httpx.AsyncClient:
    """A client that reaches public hosts only and follows no redirect.

    ``timeout_s`` bounds each wait for the network; bound the whole with ``asyncio.timeout``.
    """
    return httpx.AsyncClient(
        transport=GuardedTransport(allow_private=allow_private, verify=verify),
        timeout=timeout_s,
        follow_redirects=False,
        trust_env=False,
        # identity, because an unpacked answer may be a thousand times as long as it came
        headers={"User-Agent": USER_AGENT, "Accept-Encoding": "identity"},
    )


async def fetch(
    client: httpx.AsyncClient,
    url: str,
    target: IO[bytes],
    *,
    field: str,
    max_bytes: int,
    timeout_s: float,
    allow_private: bool = False,
) -> Fetched:
    """Write what ``url`` answers to ``target``; up to three redirects, each checked anew.

    Raises:
        TooLargeError: more than ``max_bytes``.
        RequestError: no answer in time, not a good one, or not a public host.
    """
    try:
        async with asyncio.timeout(timeout_s):
            step = url
            for _ in range(MAX_REDIRECTS + 1):
                check_url(step, field, allow_private=allow_private)
                async with client.stream("GET", step) as answer:
                    if answer.status_code not in _REDIRECTS:
                        return await _store(answer, url, target, field, max_bytes)
                    step = urljoin(step, answer.headers.get("location", ""))
            raise RequestError(field, url, f"redirects more than {MAX_REDIRECTS} times")
    except TimeoutError:
        raise RequestError(field, url, f"took longer than {timeout_s:g} s") from None
    except AddressError as error:
        raise RequestError(field, url, str(error)) from None
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeError) as error:
        raise RequestError(field, url, f"cannot be fetched: {type(error).__name__}") from None


async def _store(
    answer: httpx.Response, url: str, target: IO[bytes], field: str, max_bytes: int
) -> Fetched:
    if answer.status_code != httpx.codes.OK:
        raise RequestError(field, url, f"answers {answer.status_code}")
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise RequestError(field, url, "answers packed data that was not asked for")
    length = answer.headers.get("content-length", "")
    size = int(length) if length.isdecimal() else 0
    if size <= max_bytes:
        size = 0
        async for block in answer.aiter_raw():
            size += len(block)
            if size > max_bytes:
                break
            target.write(block)
    if size > max_bytes:
        raise TooLargeError(field, url, f"is larger than {max_bytes} bytes")
    return Fetched(size, PurePosixPath(unquote(answer.url.path)).name)
