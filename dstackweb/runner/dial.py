"""Connections to what listens in a job's place, made by a process of the job's own user there.

The runner may be root, and its connections would get where the job's can't: to the server's database, or to a socket
that a link in the job's folder names. So this process connects, and hands the runner the open connection.
"""

from __future__ import annotations

import json
import socket
import sys

AT_ONCE_S = 0.01
"""How long a connection is waited for. On one machine it is made at once, unless as many wait to be accepted
as the one who listens has room for; the kernel's repetitions, each after twice the time, then come too rarely."""
REQUEST_MAX = 4096
REFUSED, FOREIGN, TIMEOUT = "refused", "foreign", "timeout"
LISTENS = "0A"
_WORDS = {
    *(socket.inet_pton(socket.AF_INET, text) for text in ("0.0.0.0", "127.0.0.1")),
    *(socket.inet_pton(socket.AF_INET6, text) for text in ("::", "::1", "::ffff:127.0.0.1")),
}
LOCAL = {
    "".join(f"{int.from_bytes(words[at : at + 4], sys.byteorder):08X}" for at in range(0, len(words), 4))
    for words in _WORDS
}
"""How the kernel writes the loopback's addresses, and that of all addresses."""


def main(number: int = 0) -> None:
    """Answer requests on the socket that the descriptor `number` is, one after the other, until it is closed."""
    with socket.socket(fileno=number) as requests:
        while request := requests.recv(REQUEST_MAX):
            try:
                connection = connect(json.loads(request))
            except (OSError, ValueError, OverflowError) as error:
                text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                requests.send(json.dumps({"error": text[:300], "code": _code(error)}).encode())
                continue
            with connection:
                socket.send_fds(requests, [b"{}"], [connection.fileno()])


class NotMade(ConnectionRefusedError):
    """No connection was made. `code` says why, if that is known: REFUSED, FOREIGN or TIMEOUT."""

    def __init__(self, why: str, code: str) -> None:
        super().__init__(why)
        self.code = code


def _code(error: Exception) -> str:
    if isinstance(error, NotMade):
        return error.code
    if isinstance(error, (TimeoutError, BlockingIOError)):  # the latter of a socket with a path
        return TIMEOUT
    return REFUSED if isinstance(error, ConnectionRefusedError) else ""


def connect(request: dict[str, object]) -> socket.socket:
    """To `port` of the loopback, or to the socket at `path`. Raises OSError, of which `_code` says what it means.

    With a `uid` only to a port on which no other user's process listens: the machine's ports are shared.
    """
    if "path" in request:
        return _connected(socket.AF_UNIX, str(request["path"]))
    port = int(str(request["port"]))
    try:
        found = _connected(socket.AF_INET, ("127.0.0.1", port))
    except ConnectionRefusedError:
        found = _connected(socket.AF_INET6, ("::1", port))
    if "uid" in request and listeners(port) - {int(str(request["uid"]))}:
        found.close()
        raise NotMade(f"a process of another user listens on port {port}", FOREIGN)
    return found


def listeners(port: int) -> set[int]:
    """The users whose processes listen on this port, on the loopback or on all addresses."""
    found = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(name, encoding="ascii") as file:
                lines = [line.split() for line in file]
        except OSError:  # a kernel without IPv6
            continue
        for words in lines[1:]:
            address, _, number = words[1].partition(":")
            if words[3] == LISTENS and int(number, 16) == port and address in LOCAL:
                found.add(int(words[7]))
    return found


def _connected(family: int, address: object) -> socket.socket:
    """No name is looked up: that would load modules, which the job's user may not be allowed to read."""
    found = socket.socket(family)
    try:
        found.settimeout(AT_ONCE_S)
        found.connect(address)  # type: ignore[arg-type]  # it is of the family
    except (OSError, OverflowError):
        found.close()
        raise
    return found


def ask(requests: socket.socket, request: dict[str, object]) -> socket.socket:
    """The connection that `main` at the other end makes. Raises NotMade, or another OSError if that end has gone."""
    requests.send(json.dumps(request).encode())
    data, numbers, _flags, _address = socket.recv_fds(requests, REQUEST_MAX, 1)
    if not data:
        raise ConnectionError("what connects in the job's place has ended")
    if not numbers:
        found = json.loads(data)
        raise NotMade(str(found.get("error", "")), str(found.get("code", "")))
    connection = socket.socket(fileno=numbers[0])
    connection.setblocking(False)
    return connection
