"""A runner's state as files that survive it: a later runner decides from them what remains to be done.

`lock` is held for the runner's life, `nonce` identifies it at the API, `started` exists before the commands can run and
has their user, `ticket` is there before it and lets a server that was restored know the job again, `spool` is their
output, locked while more may come, `exit` is how they ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sys
import time

import dstackweb

PROGRAM = os.path.dirname(os.path.dirname(os.path.abspath(dstackweb.__file__)))
"""The folder or archive that this program is imported from."""
HOST_CONFIG = "host.json"
"""In the home of a host's agent: `url`, `name`, `token`, `insecure`, `job_user`, `job_writable`, `shared_uid`,
`engine`, `container_network`, `job_volumes`."""
LOCK_TRIES, LOCK_WAIT_S = 100, 0.02
"""Checking for a runner takes a shared lock for an instant, which must not be mistaken for a runner."""


def runner_lives(folder: str) -> bool:
    return is_locked(os.path.join(folder, "lock"))


def is_locked(path: str) -> bool:
    """Whether a process holds an exclusive lock on a file, which may not exist.

    Checking takes a shared lock for an instant, never an exclusive one.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def job_uid(folder: str) -> int | None:
    """The user that a job's commands run as; None before their start, and where they run as the runner's own."""
    try:
        with open(os.path.join(folder, "started"), encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


class StateDir:
    """The private folder of one job's runners."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._lock = -1

    @property
    def home(self) -> str:
        """The folder of the agent or server whose job this is."""
        return os.path.dirname(os.path.dirname(self.folder))

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def make(self) -> None:
        os.makedirs(self.folder, mode=0o700, exist_ok=True)

    def lock(self) -> bool:
        """Become the job's only runner on this machine; False if it has another."""
        self._lock = os.open(self.path("lock"), os.O_RDWR | os.O_CREAT, 0o600)
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._holder_lives():
                    return False
                time.sleep(LOCK_WAIT_S)
            else:
                # Always of the same length, so that a full disk affects only the first.
                os.pwrite(self._lock, b"%-19d\n" % os.getpid(), 0)
                return True
        return False

    def _holder_lives(self) -> bool:
        """Whether a runner holds the lock: beside a mere check, another shared lock is granted."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        return False

    def nonce(self) -> str:
        """The nonce that claims this job: made once, so that a later runner can repeat the claim."""
        if nonce := self.read("nonce"):
            return nonce
        nonce = secrets.token_hex(16)
        self.write("nonce", nonce)
        return nonce

    def has(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def write(self, name: str, text: str) -> None:
        """Write a file whole and synced, with its name, before going on."""
        draft = self.path(f".{name}")
        with open(draft, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path(name))
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def read(self, name: str) -> str:
        """The content of a file; empty when there is none."""
        try:
            with open(self.path(name), encoding="utf-8") as file:
                return file.read()
        except FileNotFoundError:
            return ""


def say(text: str) -> None:
    """Write a line to runner.log, if the disk has room."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        sys.stderr.flush()
