"""What a runner knows, as files that survive it: whoever comes after decides from them what is left to do.

`lock` is held for the runner's life, `nonce` names it at the API, `started` is there before the commands can run,
`spool` is their output, locked while more may come, `exit` is how they ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from typing import Any

LOCK_TRIES, LOCK_WAIT_S = 100, 0.02
"""Others look whether a runner lives by taking a shared lock for an instant; that must not look like a runner."""


def runner_lives(folder: str) -> bool:
    """Whether a runner holds a job's lock. Asking takes a shared lock for an instant, and never an exclusive one."""
    try:
        file = os.open(os.path.join(folder, "lock"), os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


class State:
    """The private folder of one job's runners."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._lock = -1

    def path(self, name: str) -> str:
        """A file in the folder."""
        return os.path.join(self.folder, name)

    def make(self) -> None:
        """The folder, closed to others."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)

    def lock(self) -> bool:
        """Become the job's one living runner on this machine; False when another is."""
        self._lock = os.open(self.path("lock"), os.O_RDWR | os.O_CREAT, 0o600)
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._holder_lives():
                    return False
                time.sleep(LOCK_WAIT_S)
            else:
                # Always as long, so that a full disk holds up none but the first.
                os.pwrite(self._lock, b"%-19d\n" % os.getpid(), 0)
                return True
        return False

    def _holder_lives(self) -> bool:
        """Whether the lock is a runner's: a second shared lock would go through beside a mere look."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        return False

    def nonce(self) -> str:
        """The name under which this job was, or will be, claimed: made once, so that a successor may ask again."""
        with contextlib.suppress(FileNotFoundError), open(self.path("nonce"), encoding="utf-8") as file:
            if nonce := file.read():
                return nonce
        nonce = secrets.token_hex(16)
        self.write("nonce", nonce)
        return nonce

    def has(self, name: str) -> bool:
        """Whether a file was written."""
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

    def read_json(self, name: str) -> Any:
        """The content of a JSON file; None when there is none."""
        try:
            with open(self.path(name), encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return None
