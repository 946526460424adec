"""Whether instances can reach this server at its public URL: by the URL alone, and by requesting it."""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from dstackweb.lib.network import is_loopback

_PRIVATE_NAMES = (".home.arpa", ".internal", ".lan", ".local", ".localhost")


def find_problem(url: str, *, allow_private: bool) -> str | None:
    """A code: `missing`, `not_https` or `private`; None if the URL looks usable.

    Private ones may be allowed: in a network with the instances, or for a cloud on this machine, which needs no HTTPS.
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


TIMEOUT_S = 6.0
MOST_BYTES = 1000
RUNNER = "/api/v1/runner/pyz"

UNSURE = ("resolves_private", "no_answer")
"""Codes that prove nothing: behind some routers a server can't call its own public name, and in its own hosts file a
machine's name is often a private address."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def check(url: str, *, allow_private: bool, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """A code with its data, `ok` or a problem; never raises. If the URL looks usable, this requests /healthz, and the
    runner as instances do: a proxy with a sign-in may let one through and not the other.
    """
    found: dict[str, Any] = {"code": "ok", "url": url}
    if problem := find_problem(url, allow_private=allow_private):
        return {**found, "code": problem}
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxied = parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)
    try:
        # Behind a proxy, external names often have no addresses.
        addresses = [] if proxied else _addresses(host, parts.port or (443 if parts.scheme == "https" else 80))
    except OSError as error:
        return {**found, "code": "no_such_name", "host": host, "text": str(error)}
    base = url.rstrip("/")
    if (code := _get(f"{base}/healthz", _is_healthy, host, timeout_s, found)) != "ok":
        return {**found, "code": code}
    if (code := _get(f"{base}{RUNNER}", _is_runner, host, timeout_s, found)) != "ok":
        return {**found, "code": "no_answer" if code == "no_answer" else "api_blocked"}
    private = [address for address in addresses if not ipaddress.ip_address(address).is_global]
    if private and not allow_private:
        return {**found, "code": "resolves_private", "host": host, "address": private[0]}
    return found


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]).partition("%")[0] for *_, address in found})


def _get(url: str, is_ours: Callable[[bytes], bool], host: str, timeout_s: float, found: dict[str, Any]) -> str:
    """A code; details are added to `found`. No proxy is used for this machine itself."""
    own = [urllib.request.ProxyHandler({})] if is_loopback(host) else []
    try:
        with urllib.request.build_opener(_NoRedirects, *own).open(url, timeout=timeout_s) as answer:
            return "ok" if is_ours(answer.read(MOST_BYTES)) else "other_server"
    except urllib.error.HTTPError as error:
        found.update(status=error.code, to=error.headers.get("Location", ""))
        return "redirect" if 300 <= error.code < 400 else "other_server"
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        found["text"] = str(reason)
        return "certificate" if isinstance(reason, ssl.SSLCertVerificationError) else "no_answer"


def _is_healthy(body: bytes) -> bool:
    try:
        return bool(json.loads(body) == {"status": "ok"})
    except ValueError:
        return False


def _is_runner(body: bytes) -> bool:
    return body.startswith(b"PK")
