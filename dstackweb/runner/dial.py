"""Connections to what listens in a job's place, made by a process of the job's own user there.

The runner may be root, and its connections would get where the job's can't: to the server's database, or to a socket
that a link in the job's folder names. So this process connects, and hands the runner the open connection.
"""

from __future__ import annotations

import json
import socket

CONNECT_S = 3.0
REQUEST_MAX = 4096


def main(number: int = 0) -> None:
    """Answer requests on the socket that the descriptor `number` is, one after the other, until it is closed."""
    with socket.socket(fileno=number) as requests:
        while request := requests.recv(REQUEST_MAX):
            try:
                connection = connect(json.loads(request))
            except (OSError, ValueError, OverflowError) as error:
                text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                requests.send(json.dumps({"error": text[:300]}).encode())
                continue
            with connection:
                socket.send_fds(requests, [b"{}"], [connection.fileno()])


def connect(request: dict[str, object]) -> socket.socket:
    """To `port` of the loopback, or to the socket at `path`. Raises OSError."""
    if "path" in request:
        return _connected(socket.AF_UNIX, str(request["path"]))
    port = int(str(request["port"]))
    try:
        return _connected(socket.AF_INET, ("127.0.0.1", port))
    except ConnectionRefusedError:
        return _connected(socket.AF_INET6, ("::1", port))


def _connected(family: int, address: object) -> socket.socket:
    """No name is looked up: that would load modules, which the job's user may not be allowed to read."""
    found = socket.socket(family)
    try:
        found.settimeout(CONNECT_S)
        found.connect(address)  # type: ignore[arg-type]  # it is of the family
    except (OSError, OverflowError):
        found.close()
        raise
    return found


def ask(requests: socket.socket, request: dict[str, object]) -> socket.socket:
    """The connection that `main` at the other end makes. Raises OSError."""
    requests.send(json.dumps(request).encode())
    data, numbers, _flags, _address = socket.recv_fds(requests, REQUEST_MAX, 1)
    if not data:
        raise ConnectionError("what connects in the job's place has ended")
    if not numbers:
        raise ConnectionRefusedError(str(json.loads(data).get("error", "")))
    connection = socket.socket(fileno=numbers[0])
    connection.setblocking(False)
    return connection
