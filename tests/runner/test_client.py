"""Where the runner sends its token."""

from __future__ import annotations

import socket

import pytest

from dstackweb.runner.client import Client


def own_address() -> str:
    """An address of this machine's that is no loopback's; skips where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


def client(api: str, **options: bool) -> Client:
    return Client(api, "jobs/1", "token", "nonce", **options)


def test_plain_http_is_allowed_to_any_address_of_this_machine() -> None:
    for address in ("127.0.0.1", "localhost", "[::1]", own_address()):
        client(f"http://{address}:8000")


@pytest.mark.parametrize("host", ["192.0.2.1", "8.8.8.8", "[2001:db8::1]", "gpus.example.org", "0.0.0.0", ""])
def test_plain_http_to_another_machine_needs_an_explicit_option(host: str) -> None:
    with pytest.raises(ValueError, match="plain HTTP is for this machine only"):
        client(f"http://{host}:8000")
    client(f"https://{host}:8000")
    client(f"http://{host}:8000", insecure=True)
