"""Requests to addresses that people have typed: to what they may reach, for a bounded time, and nowhere else.

A name is resolved once, the address is checked, and the connection goes to that very address: a name server that
answers differently the next time leads nowhere. Redirects are not followed, and of an answer only its status and
`Retry-After` are read.
"""

from __future__ import annotations

import contextlib
import email.utils
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import httpcore
from django.utils.translation import gettext as _

TIMEOUT_S = 10.0
"""Of a request, from the connection to the answer's status."""
Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address
_NAT64, _UNICAST = IPv6Network("64:ff9b::/96"), IPv6Network("2000::/3")


class Refused(Exception):
    """The address may not be reached; nothing was sent."""


class Unreachable(Exception):
    """There was no connection; nothing was sent. The message says what happened."""


class NoAnswer(Exception):
    """The connection broke before there was an answer: the request may have arrived or not."""


class Answer(NamedTuple):
    """`retry_after_s`: for so many seconds the receiver wants no further request; 0 if it doesn't say."""

    status: int
    retry_after_s: float = 0.0


def check_url(url: str) -> str:
    """The host of an http(s) URL. Raises ValueError for anything else, and for one with a password."""
    parts = _parts(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(_("expected a URL such as https://example.org/hook"))
    if parts.username or parts.password:
        raise ValueError(_("a URL with a name or password is not supported"))
    return parts.hostname


def _parts(url: str) -> SplitResult | None:
    """None for what has other characters than a URL, such as spaces, or a port out of range."""
    try:
        parts = urlsplit(url)
        _port = parts.port
    except ValueError:
        return None
    return parts if re.fullmatch(r"[!-~]+", url) else None


def is_public(address: Address) -> bool:
    """Whether an address is of the Internet, and neither this machine's nor of a private network.

    An IPv6 address that stands for an IPv4 one is judged as that.
    """
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address not in _UNICAST:
            return False
    return address.is_global and not address.is_multicast


def post(
    url: str, body: bytes, headers: Mapping[str, str], allowed: Sequence[Network] = (), timeout_s: float = TIMEOUT_S
) -> Answer:
    """Post `body`; returns the answer, whatever its status is. Raises Refused, Unreachable, NoAnswer.

    Private networks are reached if `allowed` has them; over plain http nothing else is. `timeout_s` is in seconds.
    """
    backend = _Checked(allowed, plain=urlsplit(url).scheme == "http", timeout_s=timeout_s)
    try:
        with httpcore.ConnectionPool(network_backend=backend, max_keepalive_connections=0) as pool:
            asked = list({"Host": urlsplit(url).netloc, **headers}.items())
            with pool.stream("POST", url, headers=asked, content=body) as response:
                found = {name.lower(): value for name, value in response.headers}
                return Answer(int(response.status), _seconds_until(found.get(b"retry-after", b"")))
    except (httpcore.ConnectError, httpcore.ConnectTimeout, OSError, UnicodeError) as error:
        raise Unreachable(str(error) or type(error).__name__) from None
    except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
        raise NoAnswer(str(error) or type(error).__name__) from None


def _seconds_until(retry_after: bytes) -> float:
    """A `Retry-After` in seconds or as a date; 0 for anything else."""
    text = retry_after.decode("ascii", "replace").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    with contextlib.suppress(ValueError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0


class _Checked(httpcore.NetworkBackend):
    """Connects to checked addresses only, until a deadline."""

    def __init__(self, allowed: Sequence[Network], *, plain: bool, timeout_s: float) -> None:
        self.allowed, self.plain = allowed, plain
        self.deadline = time.monotonic() + timeout_s
        self.inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        found = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        usable = [str(address) for address in found if self._may_reach(address)]
        if not usable:
            raise Refused(host)
        *others, last = usable
        for address in others:
            # Such as an IPv6 address where only IPv4 leads out. None may take the whole time.
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return self._connect(address, port, local_address, socket_options, share=0.5)
        return self._connect(last, port, local_address, socket_options)

    def _connect(
        self, address: str, port: int, local_address: str | None, options: Iterable[Any] | None, share: float = 1.0
    ) -> httpcore.NetworkStream:
        left = _left(self.deadline, httpcore.ConnectTimeout) * share
        stream = self.inner.connect_tcp(address, port, left, local_address, socket_options=options)
        return _Bounded(stream, self.deadline)

    def _may_reach(self, address: Address) -> bool:
        if any(address in network for network in self.allowed):
            return True
        return is_public(address) and not self.plain


class _Bounded(httpcore.NetworkStream):
    """A stream whose reads and writes end at a deadline, however little at a time the other side sends."""

    def __init__(self, inner: httpcore.NetworkStream, deadline: float) -> None:
        self.inner, self.deadline = inner, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self.inner.read(max_bytes, _left(self.deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.inner.write(buffer, _left(self.deadline))

    def close(self) -> None:
        self.inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = _left(self.deadline, httpcore.ConnectTimeout)
        return _Bounded(self.inner.start_tls(ssl_context, server_hostname, left), self.deadline)

    def get_extra_info(self, info: str) -> Any:
        return self.inner.get_extra_info(info)


def _left(deadline: float, late: type[httpcore.TimeoutException] = httpcore.ReadTimeout) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise late
    return left
