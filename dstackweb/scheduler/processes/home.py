"""The home directory of a server: one uses it at a time. The locked file says where, and how its last reload went.

For a reload the supervisor becomes the new program by `exec`, which keeps its pid, its children and its open files.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, NoReturn

import psutil

from dstackweb.lib.process import try_lock

LOCK_NAME = "up.lock"
POLL_S = 0.2
LONGEST_RELOAD_S = 600.0
VARIABLE = "DSTACKWEB_HANDOVER"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Held back from before the `exec` until the new program handles them."""
SYSTEMD_FD = 3
BACKLOG = 2048


@dataclass(frozen=True)
class RunningServer:
    """What the file says. `loads` counts starts and reloads that have ended, `trouble` is why the last one failed."""

    address: str = ""
    pid: int = 0
    loads: int = 0
    trouble: str = ""


class HomeLock:
    """Held until this process ends; also across an `exec`, by the number of its file."""

    def __init__(self, file: IO[str], address: str) -> None:
        self.file, self.address = file, address

    @classmethod
    def take(cls, home: Path, address: str) -> HomeLock | None:
        """None while another process holds it."""
        file = try_lock(home / LOCK_NAME)
        if file is None:
            return None
        lock = cls(file, address)
        lock._write(0, "")
        return lock

    @classmethod
    def taken_over(cls, number: int, address: str) -> HomeLock:
        """The lock that the program before this one has taken."""
        return cls(os.fdopen(number, "r+"), address)

    def loaded(self, trouble: str = "") -> None:
        """Say that a start or a reload has ended, and how."""
        self.file.seek(0)
        self._write(_parsed(self.file.read()).loads + 1, trouble)

    def _write(self, loads: int, trouble: str) -> None:
        self.file.seek(0)
        self.file.truncate()
        self.file.write(f"{self.address}\n{os.getpid()}\n{loads}\n{trouble}\n")
        self.file.flush()


def running_server(home: Path) -> RunningServer:
    """The server last started in this home; empty if none was."""
    try:
        return _parsed((home / LOCK_NAME).read_text())
    except OSError:
        return RunningServer()


def _parsed(text: str) -> RunningServer:
    address, pid, loads, trouble = [*text.split("\n"), "", "", "", ""][:4]
    return RunningServer(address, int(pid) if pid.isdecimal() else 0, int(loads) if loads.isdecimal() else 0, trouble)


def holds(pid: int, home: Path) -> bool:
    """Whether that process has the locked file open: a number alone may belong to another process by now."""
    try:
        return any(file.path == str((home / LOCK_NAME).resolve()) for file in psutil.Process(pid).open_files())
    except (psutil.Error, ValueError):
        return False


def reload(home: Path) -> RunningServer | None:
    """Have the server of this home reload, and wait until it has; None if it can't be asked, or has ended meanwhile."""
    before = running_server(home)
    if before.pid <= 0 or not holds(before.pid, home):
        return None
    os.kill(before.pid, signal.SIGHUP)
    deadline = time.monotonic() + LONGEST_RELOAD_S
    while holds(before.pid, home) and time.monotonic() < deadline:
        now = running_server(home)
        if now.pid == before.pid and now.loads > before.loads:
            return now
        time.sleep(POLL_S)  # the other process says how it went in a file
    return None


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
    """A socket that listens there, systemd's if it has made one for this process. Raises OSError. The supervisor keeps
    it open: while no web process serves it, requests wait instead of being refused."""
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
