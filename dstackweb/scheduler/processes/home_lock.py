"""The lock of a home directory: one server uses it. The locked file says where it is, and how its last reload went."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from dstackweb.lib.process import try_lock

NAME = "up.lock"
POLL_S = 0.2
LONGEST_RELOAD_S = 600.0


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
        file = try_lock(home / NAME)
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
        return _parsed((home / NAME).read_text())
    except OSError:
        return RunningServer()


def _parsed(text: str) -> RunningServer:
    address, pid, loads, trouble = [*text.split("\n"), "", "", "", ""][:4]
    return RunningServer(address, int(pid) if pid.isdecimal() else 0, int(loads) if loads.isdecimal() else 0, trouble)


def holds(pid: int, home: Path) -> bool:
    """Whether that process has the locked file open: a number alone may belong to another process by now."""
    try:
        return any(file.path == str((home / NAME).resolve()) for file in psutil.Process(pid).open_files())
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
        time.sleep(POLL_S)
    return None
