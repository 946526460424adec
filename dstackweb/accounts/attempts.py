"""Limits of wrong passwords and tokens from one address, so that nobody can try many."""

from __future__ import annotations

import time
from ipaddress import IPv6Address, ip_address, ip_network

from django.core.cache import cache

from dstackweb.lib.errors import TooMany

WINDOW_S = 600
MOST = 60
"""Within WINDOW_S, of one IPv4 address or one /64 of IPv6; beside the lock of a name (AXES_* in the settings)."""


def count_failure(address: str) -> None:
    """Count a wrong password or token. While the cache is away nothing is counted."""
    key = _key(address)
    cache.add(key, 0, WINDOW_S)
    try:
        cache.incr(key)
    except ValueError:
        return


def check(address: str) -> None:
    """Raises TooMany after too many failures from there."""
    if (cache.get(_key(address)) or 0) >= MOST:
        wait_s = WINDOW_S - time.time() % WINDOW_S
        raise TooMany("there were too many wrong passwords or tokens from your address", retry_after=wait_s)


def _key(address: str) -> str:
    try:
        found = ip_address(address)
        place = str(ip_network(f"{found}/64", strict=False)) if isinstance(found, IPv6Address) else str(found)
    except ValueError:
        place = "unknown"
    return f"failures:{place.replace(':', '.')}:{int(time.time() // WINDOW_S)}"
