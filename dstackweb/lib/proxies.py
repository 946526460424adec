"""The address of a request's client where proxies stand in between.

A proxy appends the address that it sees to X-Forwarded-For; what stands before that is the client's own claim. So the
list is read from its end, and only as far as the addresses are of trusted proxies. On the server's own machine jobs
have a proxy's address too: there the user who opened the connection decides.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

log = logging.getLogger(__name__)

Network = IPv4Network | IPv6Network
FORWARDED = ("HTTP_X_FORWARDED_FOR", "HTTP_X_FORWARDED_PROTO")
_warned: set[str] = set()


CONNECTION = "dstackweb.connection"
"""The request's socket, in its environ."""


def see_through(
    environ: dict[str, Any],
    trusted: Sequence[Network],
    is_of_job: Callable[[socket.socket], bool] = lambda connection: False,
) -> None:
    """Make REMOTE_ADDR the client's address. Headers of others than the trusted proxies are dropped, if there are such.

    `is_of_job`: whether a connection from a trusted address may be a job's.

    Without trusted proxies X-Forwarded-Proto is believed as it is, since a server behind any proxy needs it.
    """
    peer, claimed = environ.get("REMOTE_ADDR", ""), environ.get("HTTP_X_FORWARDED_FOR", "")
    if not trusted:
        if claimed and peer not in _warned and len(_warned) < 10:
            _warned.add(peer)
            log.warning(
                "requests come through a proxy at %s that DSTACKWEB_TRUSTED_PROXIES does not name: all people behind "
                "it share its address in the audit log, and one of them can lock the others out",
                peer,
            )
        return
    connection = environ.get(CONNECTION)
    claims = any(name in environ for name in FORWARDED)
    forged = claims and connection is not None and is_of_job(connection)
    if forged or not is_in(peer, trusted):
        for name in FORWARDED:
            environ.pop(name, None)
        return
    environ["REMOTE_ADDR"] = client(peer, claimed, trusted)


def client(peer: str, claimed: str, trusted: Sequence[Network]) -> str:
    """The address before the trusted proxies. What is no address ends the search at the proxy that passed it on."""
    for text in reversed([part.strip() for part in claimed.split(",")]):
        address = _address(text)
        if address is None:
            break
        peer = str(address)
        if not is_in(peer, trusted):
            break
    return peer


def is_in(text: str, networks: Sequence[Network]) -> bool:
    address = _address(text)
    return address is not None and any(address in network for network in networks)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Of an address, which may have a port: `192.0.2.1:4711`, `[2001:db8::1]:4711`."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
