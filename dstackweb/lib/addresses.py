"""Addresses of servers: which of them only their own machine can reach, and which are encrypted."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether a name or an IP address means the machine itself; so do no address and a socket's path."""
    if host in ("", "localhost") or host.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_local(url: str) -> bool:
    """Whether a URL leads to the machine itself."""
    return is_loopback(urlsplit(url).hostname or "")


def is_exposed(url: str) -> bool:
    """Whether what is sent to an http(s) URL crosses a network unencrypted."""
    return urlsplit(url).scheme == "http" and not is_local(url)
