"""Where the service may connect: addresses in every spelling, names, redirects and limits."""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from longtake.errors import RequestError, TooLargeError
from longtake.queue.net import (
    AddressError,
    Fetched,
    check_url,
    fetch,
    guarded_client,
    is_public,
    resolve,
)

FORBIDDEN_ADDRESSES = [
    *("0.0.0.0", "10.1.2.3", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.0.3"),  # noqa: S104
    *("169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.2.1", "192.88.99.1"),
    *("192.168.1.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.255.255.250"),
    *("240.0.0.1", "255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1"),
    *("::ffff:8.8.8.8", "64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::7f00:1", "100::1"),
    *("2001::1", "2001:0:7f00:1::", "2001:db8::1", "2002:7f00:1::", "2002:808:808::", "3fff::1"),
    *("5f00::1", "fc00::1", "fd12:3456::1", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1"),
]
FORBIDDEN_URLS = [
    *("http://127.0.0.1/", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://[::]:80/"),
    *("http://[fe80::1%25eth0]/", "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/"),
    # one number, hexadecimal, octal, short and mixed
    *("http://2130706433/", "http://0x7f000001/", "http://017700000001/", "http://127.1/"),
    *("http://0x7f.0.0.1/", "http://0177.0.0.1/", "http://127.0.1/", "http://0/", "http://00/"),
    *("http://0xA9.0xFE.0xA9.0xFE/", "http://0300.0250.0.1/", "http://192.168.257/"),
    *("http://127.0.0.1./", "http://2130706433./", "http://0x7f.1./"),
    # digits that are none in ASCII, other full stops, escapes
    *("http://１２７.0.0.1/", "http://①②⑦.⓪.⓪.①/", "http://127。0。0。1/", "http://127｡0.0.1/"),
    *("http://%31%32%37.0.0.1/", "http://127%2e0%2e0%2e1/", "http://[::ffff:7f00:1]/"),
    # whose host that is, readers disagree
    *("http://user@example.com/", "http://a:b@127.0.0.1/", "http://example.com\\@127.0.0.1/"),
    *("http://example.com#@127.0.0.1/\t", "http://exa mple.com/", "http:// 127.0.0.1/"),
    *("http://example.com\r\nHost: 127.0.0.1/", "http://example.com\x00.test/"),
    # other protocols
    *("ftp://example.com/", "file:///etc/passwd", "gopher://example.com/", "dict://example.com/"),
    *("javascript:alert(1)", "data:text/plain,a", "//example.com/", "example.com", "", "http://"),
    *("http:///etc/passwd", "http:example.com", "unix:///run/x.sock", "http+unix://%2Frun%2Fx/"),
    *("http://example.com:22/", "http://example.com:25/", "http://example.com:0/"),
    *("http://example.com:99999/", "http://example.com:-1/", "http://example.com:a/"),
    *("http://a..b/", "http://-a.test/", "http://[v1.x]/", "http://[::1/", "http://" + "a" * 2048),
]
INNER_NAMES = [
    *("localhost", "LOCALHOST", "localhost.", "ip6-localhost", "a.localhost", "db", "nas.local"),
    *("metadata.google.internal", "metadata", "localhost.localdomain", "router.home.arpa."),
]


class Site(ThreadingHTTPServer):
    """A server that answers what a test says; ``asked`` keeps Host and path of each request."""

    daemon_threads = True

    def __init__(self, answers: dict[str, Callable[[BaseHTTPRequestHandler], None]]) -> None:
        self.asked: list[tuple[str, str]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append((self.headers["Host"], self.path))
                answers[self.path](self)

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


Serve = Callable[..., Site]


@pytest.fixture
def serve() -> Iterator[Serve]:
    sites: list[Site] = []

    def start(**answers: Callable[[BaseHTTPRequestHandler], None]) -> Site:
        site = Site({f"/{name}": answer for name, answer in answers.items()})
        sites.append(site)
        threading.Thread(target=site.serve_forever, args=(0.01,), daemon=True).start()
        return site

    yield start
    for site in sites:
        site.shutdown()
        site.server_close()


def send(
    body: bytes = b"", status: int = 200, **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def get(url: str, *, private: bool = True, limit: int = 100, timeout_s: float = 10) -> bytes:
    """What ``fetch`` writes."""
    target = io.BytesIO()

    async def run() -> Fetched:
        async with guarded_client(5, allow_private=private) as client:
            return await fetch(
                client,
                url,
                target,
                field="image",
                max_bytes=limit,
                timeout_s=timeout_s,
                allow_private=private,
            )

    fetched = asyncio.run(run())
    assert fetched.size == len(target.getvalue())
    return target.getvalue()


@pytest.mark.parametrize("address", FORBIDDEN_ADDRESSES)
def test_an_address_that_is_not_public_is_known(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "172.32.0.1", "2606:4700::1111", "2a00:1450::1"])
def test_a_public_address_is_known(address: str) -> None:
    assert is_public(address)
    host = f"[{address}]" if ":" in address else address
    assert check_url(f"https://{host}/hook", "url").host == address


@pytest.mark.parametrize("url", FORBIDDEN_URLS)
def test_no_spelling_of_a_forbidden_url_is_taken(url: str) -> None:
    with pytest.raises(RequestError, match=r"^url="):
        check_url(url, "url")


@pytest.mark.parametrize(
    "url", ["http://example.com", "https://bücher.example:8443/a?b=c#d", "https://a_b.example./x"]
)
def test_a_public_url_is_taken(url: str) -> None:
    assert check_url(url, "url").scheme in ("http", "https")


@pytest.mark.parametrize("name", INNER_NAMES)
def test_a_name_of_this_machine_or_network_is_refused(name: str) -> None:
    """Whether or not it has an address just now."""
    with pytest.raises(RequestError, match="name of this machine or network"):
        check_url(f"http://{name}:8080/", "url")
    with pytest.raises(AddressError):
        asyncio.run(resolve(httpx.URL(f"http://{name}/")))
    assert check_url(f"http://{name}:8080/", "url", allow_private=True)


def answering(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Have every ``.example`` resolve to ``addresses``; returns the names that were asked for."""
    names: list[str] = []
    real = socket.getaddrinfo

    def lookup(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if not host.endswith(".example"):
            return real(host, port, *args, **kwargs)
        names.append(host)
        kind = socket.SOCK_STREAM
        return [(socket.AF_INET, kind, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    return names


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["1.1.1.1", "10.0.0.1"], ["10.0.0.1", "1.1.1.1"]]
)
def test_a_name_is_refused_if_any_address_of_it_is_private(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    answering(monkeypatch, *addresses)

    with pytest.raises(AddressError, match="not a public address"):
        asyncio.run(resolve(httpx.URL("http://rebind.example/")))


def test_the_connection_goes_to_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    """One look-up for check and connection: a second answer of the DNS would change nothing."""
    site = serve(a=send(b"yes"))
    names = answering(monkeypatch, "127.0.0.1")

    assert get(f"http://hook.example:{site.server_port}/a") == b"yes"
    assert names == ["hook.example"]
    assert site.asked == [(f"hook.example:{site.server_port}", "/a")]


def test_the_next_address_is_tried(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    site = serve(a=send(b"yes"))
    answering(monkeypatch, "127.0.0.2", "127.0.0.1")

    assert get(f"http://hook.example:{site.server_port}/a") == b"yes"


def test_proxies_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    site = serve(a=send(b"yes"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    assert get(f"{site.url}/a") == b"yes"


def test_redirects_are_followed_up_to_three_times(serve: Serve) -> None:
    site = serve(
        a=send(status=302, Location="/b"),
        b=send(status=307, Location="c"),
        c=send(status=308, Location="d"),
        d=send(b"end"),
        e=send(status=301, Location="/a"),
    )

    assert get(f"{site.url}/a") == b"end"
    with pytest.raises(RequestError, match="redirects more than 3 times"):
        get(f"{site.url}/e")


@pytest.mark.parametrize(
    "target",
    ["http://user@example.com/", "file:///etc/passwd", "http://2130706433/", "ftp://example.com/"],
)
def test_a_redirect_is_checked_as_the_first_url_is(serve: Serve, target: str) -> None:
    site = serve(a=send(status=302, Location=target))

    with pytest.raises(RequestError, match=r"^image="):
        get(f"{site.url}/a")
    assert len(site.asked) == 1


def test_a_redirect_to_a_private_address_is_not_followed(
    monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    """The first server counts as public here, what it names does not."""
    inner = serve(secret=send(b"secret"))
    outer = serve(a=send(status=302, Location=f"{inner.url}/secret"))
    answering(monkeypatch, "127.0.0.1")
    monkeypatch.setattr("longtake.queue.net.is_public", lambda address: address == "127.0.0.1")
    url = f"http://outer.example:{outer.server_port}/a"
    assert get(url, private=False) == b"secret"  # as long as the address counts as public

    checked: list[str] = []

    def once(address: str) -> bool:
        checked.append(address)
        return len(checked) == 1

    monkeypatch.setattr("longtake.queue.net.is_public", once)
    with pytest.raises(RequestError, match="is not a public address"):
        get(url, private=False)
    assert len(inner.asked) == 1


@pytest.mark.parametrize("told", [True, False])
def test_the_size_is_bounded(serve: Serve, told: bool) -> None:
    long = send(b"x" * 101, Content_Length="101") if told else send(b"x" * 101)
    site = serve(a=long, b=send(b"x" * 100))

    assert get(f"{site.url}/b") == b"x" * 100
    with pytest.raises(TooLargeError, match="larger than 100 bytes"):
        get(f"{site.url}/a")


def test_time_is_bounded_as_a_whole(serve: Serve) -> None:
    """A server that sends a byte now and then keeps every single wait short."""
    stop = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        send()(handler)
        while not stop.wait(0.01):
            try:
                handler.wfile.write(b"x")
            except OSError:
                return

    site = serve(a=drip)
    with pytest.raises(RequestError, match=r"took longer than 0\.2 s"):
        get(f"{site.url}/a", limit=10**6, timeout_s=0.2)
    stop.set()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (send(status=404), "answers 404"),
        (send(b"x", Content_Encoding="gzip"), "packed data"),
        (send(status=302), "cannot be fetched|redirects more than 3"),
        (lambda handler: handler.wfile.write(b"nonsense"), "cannot be fetched"),
    ],
)
def test_a_bad_answer_is_told(
    serve: Serve, answer: Callable[[BaseHTTPRequestHandler], None], reason: str
) -> None:
    site = serve(a=answer)

    with pytest.raises(RequestError, match=reason):
        get(f"{site.url}/a")


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server that is ``name``, and of a client that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    text = made.public_bytes(serialization.Encoding.PEM)
    both = folder / "server.pem"
    both.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain) + text)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(both)
    return server, ssl.create_default_context(cadata=text.decode())


@pytest.mark.parametrize(("name", "good"), [("hook.example", True), ("other.example", False)])
def test_tls_is_for_the_name_and_not_for_the_address(
    monkeypatch: pytest.MonkeyPatch, serve: Serve, tmp_path: Path, name: str, good: bool
) -> None:
    server, trusting = certificate(tmp_path, "hook.example")
    asked: list[str | None] = []
    server.sni_callback = lambda _socket, sni, _context: asked.append(sni)
    site = serve(a=send(b"yes"))
    site.socket = server.wrap_socket(site.socket, server_side=True, do_handshake_on_connect=False)
    answering(monkeypatch, "127.0.0.1")

    async def run() -> int:
        async with guarded_client(5, allow_private=True, verify=trusting) as client:
            return (await client.get(f"https://{name}:{site.server_port}/a")).status_code

    if good:
        assert asyncio.run(run()) == 200
    else:
        with pytest.raises(httpx.ConnectError, match="certificate"):
            asyncio.run(run())
    assert asked == [name]
