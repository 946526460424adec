"""Whose a connection from this machine is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_network

import pytest

from dstackweb.lib import proxies

OF_A_JOB = 1_900_000_007
CLIENT = """
import os, socket, sys
_, to, port, uid = sys.argv
if int(uid):
    os.setuid(int(uid))
client = socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET)
client.connect((to, int(port)))
os.read(0, 1)
client.close()
os.read(0, 1)
"""


@contextmanager
def connected(family: socket.AddressFamily, to: str, *, uid: int | None = None) -> Iterator[tuple[socket.socket, int]]:
    """A server's end of a connection that another process has opened, and that process's stdin."""
    both = family == socket.AF_INET6
    with socket.create_server(("::" if both else to, 0), family=family, dualstack_ipv6=both) as server:
        server.settimeout(10)
        words = [sys.executable, "-I", "-S", "-c", CLIENT, to, str(server.getsockname()[1]), str(uid or 0)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, bufsize=0) as client:
            assert client.stdin is not None
            with client.stdin, server.accept()[0] as taken:
                yield taken, client.stdin.fileno()


@pytest.mark.parametrize("to", ["127.0.0.1", "::1"])
def test_the_user_is_known_until_their_end_is_closed(to: str) -> None:
    uid = OF_A_JOB if os.geteuid() == 0 else None
    with connected(socket.AF_INET6, to, uid=uid) as (taken, theirs):
        assert proxies.is_here(taken)
        assert proxies.user_of(taken) == (os.getuid() if uid is None else uid)
        os.write(theirs, b"x")
        assert taken.recv(1) == b""
        assert proxies.user_of(taken) is None, "or a job could send what it likes as anybody, and go"
    assert proxies.are_known()


@pytest.mark.needs("root")
@pytest.mark.parametrize(("uid", "believed"), [(OF_A_JOB, False), (65534, True), (None, True)])
def test_a_job_claims_no_address_where_a_proxy_beside_it_is_trusted(uid: int | None, believed: bool) -> None:
    with connected(socket.AF_INET, "127.0.0.1", uid=uid) as (taken, _theirs):
        environ = {"REMOTE_ADDR": "127.0.0.1", "HTTP_X_FORWARDED_FOR": "198.51.100.7", proxies.CONNECTION: taken}
        proxies.see_through(environ, [ip_network("127.0.0.1")])
    assert environ["REMOTE_ADDR"] == ("198.51.100.7" if believed else "127.0.0.1")
    assert ("HTTP_X_FORWARDED_FOR" in environ) == believed


@pytest.mark.needs("root")
def test_a_request_whose_sender_has_gone_is_taken_for_a_jobs() -> None:
    with connected(socket.AF_INET, "127.0.0.1", uid=OF_A_JOB) as (taken, theirs):
        os.write(theirs, b"x")
        assert taken.recv(1) == b""
        assert proxies.may_be_of_job(taken)
