"""Which user of this machine is at the other end of a TCP connection, as the kernel knows it (sock_diag(7))."""

from __future__ import annotations

import errno
import functools
import logging
import socket
import struct
from ipaddress import IPv6Address, ip_address

log = logging.getLogger(__name__)

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, NLMSG_ERROR = 4, 20, 1, 2
TIMEOUT_S = 2.0
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_PLACE = struct.Struct("!HH16s16s")
_WHOSE = struct.Struct("=II")
_WHOSE_AT = _HEADER.size + 4 + 48 + 12
"""Of the answer's uid and inode, behind the header, the state, the socket's addresses and its queues."""


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
    found, port = ip_address(str(address[0]).partition("%")[0]), address[1]
    assert isinstance(port, int)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found), port
