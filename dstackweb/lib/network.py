"""Names and addresses of machines, URLs that are not encrypted, and the time to wait before a retry."""

from __future__ import annotations

import ipaddress
import random
import re
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from dstackweb.lib.language import gettext_noop

HOST_NAME = r"(?!.{101})[\w.-]*[^\W_][\w.-]*"
"""A host's name, which is part of its address in the API."""
HOST_NAME_TEXT = gettext_noop(
    "up to 100 letters, digits, dots, dashes and underscores, with at least one letter or digit"
)


def machine_name() -> str:
    """This machine's name as a host's name: other characters become dashes."""
    return re.sub(r"[^\w.-]", "-", socket.gethostname()) or "localhost"


def is_loopback(host: str) -> bool:
    """Whether a host name or IP address is the machine itself; an empty one and a socket's path are."""
    if host in ("", "localhost") or host.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def network_of(address: str) -> str:
    """What one client has at least: an IPv4 address, or the /64 of an IPv6 one, whose 2^64 addresses cost nothing.

    "unknown" for what is no address.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return "unknown"
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    # Without a link's name, which is no part of the address.
    return str(found.ipv4_mapped or ipaddress.IPv6Network((int(found), 64), strict=False))


def is_local(url: str) -> bool:
    return is_loopback(urlsplit(url).hostname or "")


def is_exposed(url: str) -> bool:
    """Whether data sent to an http(s) URL crosses a network unencrypted."""
    return urlsplit(url).scheme == "http" and not is_local(url)


def full_jitter(attempt: int, base_s: float, cap_s: float, rnd: Callable[[], float] = random.random) -> float:
    """Seconds to wait after failed attempt `attempt` (from 0): uniform from 0 to `base_s * 2**attempt`, at most
    `cap_s`. `rnd` returns numbers in [0, 1).

    Full jitter: clients that failed together don't retry together.
    (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/)
    """
    # The exponent is bounded: a large number of attempts must not overflow.
    return rnd() * min(cap_s, base_s * 2.0 ** min(attempt, 60))
