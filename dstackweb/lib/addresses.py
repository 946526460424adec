"""Which server addresses only the machine itself can reach, and which URLs are not encrypted."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether a host name or IP address is the machine itself; an empty one and a socket's path are."""
    if host in ("", "localhost") or host.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_local(url: str) -> bool:
    """Whether a URL's host is the machine itself."""
    return is_loopback(urlsplit(url).hostname or "")


def is_exposed(url: str) -> bool:
    """Whether data sent to an http(s) URL crosses a network unencrypted."""
    return urlsplit(url).scheme == "http" and not is_local(url)
