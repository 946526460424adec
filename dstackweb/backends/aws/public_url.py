"""Whether instances of a cloud could reach this server at its public URL, as far as the URL itself tells."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from dstackweb.lib.addresses import is_loopback

_PRIVATE_NAMES = (".home.arpa", ".internal", ".lan", ".local", ".localhost")


def problem(url: str, *, allow_private: bool) -> str | None:
    """A code: `missing`, `not_https` or `private`; None where nothing speaks against it.

    Private ones may be allowed: a network that instances are in, or a cloud on this very machine, which needs no HTTPS.
    """
    if not url:
        return "missing"
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host) and allow_private:
        return None
    if parts.scheme != "https":
        return "not_https"
    return None if allow_private or not _is_private(host) else "private"


def _is_private(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return is_loopback(host) or "." not in host.strip(".") or host.rstrip(".").endswith(_PRIVATE_NAMES)
