"""The address of a request's client where proxies stand in between.

A proxy appends the address that it sees to X-Forwarded-For; what stands before that is the client's own claim. So the
list is read from its end, and only as far as the addresses are of trusted proxies. On the server's own machine jobs
have a proxy's address too: there the user who opened the connection decides, as the kernel knows it (sock_diag(7)).
"""

from __future__ import annotations

import errno
import functools
import logging
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

from django.conf import settings

from dstackweb.runner.isolation import find_user, uids_of

log = logging.getLogger(__name__)

Network = IPv4Network | IPv6Network
FORWARDED = ("HTTP_X_FORWARDED_FOR", "HTTP_X_FORWARDED_PROTO")
_warned: set[str] = set()
CONNECTION = "dstackweb.connection"
"""The request's socket, in its environ."""
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, NLMSG_ERROR = 4, 20, 1, 2
TIMEOUT_S = 2.0
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_PLACE = struct.Struct("!HH16s16s")
_WHOSE = struct.Struct("=II")
_WHOSE_AT = _HEADER.size + 4 + 48 + 12
"""Of the answer's uid and inode, behind the header, the state, the socket's addresses and its queues."""


def see_through(environ: dict[str, Any], trusted: Sequence[Network]) -> None:
    """Make REMOTE_ADDR the client's address. Headers of others than the trusted proxies are dropped, if there are such.

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
    forged = claims and connection is not None and may_be_of_job(connection)
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


@functools.cache
def _job_uids() -> range:
    if uids := uids_of(settings.DSTACKWEB_JOB_USER):
        return range(uids[0], uids[1] + 1)
    user = find_user(settings.DSTACKWEB_JOB_USER)
    return range(user.pw_uid, user.pw_uid + 1) if user else range(0)


def may_be_of_job(connection: socket.socket) -> bool:
    """Whether a job on this machine may have opened a connection: a user of jobs, or no one knows who any more.

    The process that waits for the answer is known.
    """
    try:
        if not is_here(connection) or not are_known():
            return False
        uid = user_of(connection)
    except OSError:
        return True
    return uid is None or uid in _job_uids()


def is_here(connection: socket.socket) -> bool:
    """Whether a connection comes from this machine: from a loopback address, or from the one that it goes to."""
    there, _port = _end(connection.getpeername())
    return ip_address(there).is_loopback or there == _end(connection.getsockname())[0]


def user_of(connection: socket.socket) -> int | None:
    """The uid of the process that opened a connection from this machine.

    None once that end is closed: the kernel forgets whose it was. Raises OSError.
    """
    (there, port), (here, own_port) = _end(connection.getpeername()), _end(connection.getsockname())
    family = socket.AF_INET6 if ip_address(there).version == 6 else socket.AF_INET
    place = _PLACE.pack(port, own_port, *(socket.inet_pton(family, one).ljust(16, b"\0") for one in (there, here)))
    asked = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + place + struct.pack("=I", 0) + b"\xff" * 8
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(TIMEOUT_S)
        kernel.send(_HEADER.pack(_HEADER.size + len(asked), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + asked)
        answer = kernel.recv(8192)
    if _HEADER.unpack_from(answer)[1] == NLMSG_ERROR:
        (code,) = struct.unpack_from("=i", answer, _HEADER.size)
        if -code == errno.ENOENT:
            return None
        raise OSError(-code, "the kernel does not say whose a connection is")
    uid, inode = _WHOSE.unpack_from(answer, _WHOSE_AT)
    return int(uid) if inode else None


@functools.cache
def are_known() -> bool:
    """Whether this kernel says whose connections are, as tried with one."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            taken, _address = server.accept()
            with taken:
                known = user_of(taken) is not None
    except OSError as error:
        log.warning("whose connections from this machine are is not known: %s", error)
        return False
    return known


def _end(address: tuple[object, ...]) -> tuple[str, int]:
    """Address and port of one end, of IPv4 also where the server listens on IPv6."""
    port = address[1]
    assert isinstance(port, int)
    return str(_address(str(address[0]))), port
