"""How a supervisor becomes the program that is installed now, without ending its processes.

`exec` keeps the process: its pid, its children and its open files. What the new program must know of them is in one
variable.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

VARIABLE = "DSTACKWEB_HANDOVER"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Held back from before the `exec` until the new program handles them."""
SYSTEMD_FD = 3
BACKLOG = 2048


@dataclass(frozen=True)
class FormerChild:
    """A process of the program before. `output` is the number of the file that reads what it prints."""

    name: str
    pid: int
    output: int


@dataclass(frozen=True)
class Handover:
    """Numbers of open files (the listening socket, the lock of the home), and the processes."""

    listener: int
    lock: int
    children: Sequence[FormerChild] = ()


class AdoptedProcess:
    """A child that the program before has started: what a supervisor needs of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it is alive."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def taken_over() -> Handover | None:
    """What the program before has handed over; None at a start."""
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return None
    facts = json.loads(text)
    children = [FormerChild(**child) for child in facts.pop("children")]
    for number in (facts["listener"], facts["lock"], *(child.output for child in children)):
        os.set_inheritable(number, False)
    return Handover(**facts, children=children)


def hand_over(argv: Sequence[str], env: Mapping[str, str], what: Handover) -> NoReturn:
    """Become `argv` with the environment `env`. SIGNALS must be blocked."""
    for number in (what.listener, what.lock, *(child.output for child in what.children)):
        os.set_inheritable(number, True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execve(argv[0], list(argv), {**env, VARIABLE: json.dumps(asdict(what))})


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, made by systemd if it has made one for this process. Raises OSError.

    The server's own process keeps it open: while no web process serves it, requests wait instead of being refused.
    """
    if os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1":
        made = socket.socket(fileno=SYSTEMD_FD)
        made.set_inheritable(False)
        return made
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made
