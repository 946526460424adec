"""What a runner knows, as files that survive it: whoever comes after decides from them what is left to do.

`lock` is held for the runner's life, `nonce` names it at the API, `started` is there before the commands can run,
`shell` says which process they are, `spool` is their output, `exit` is how they ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from typing import Any

LOCK_TRIES, LOCK_WAIT_S = 100, 0.02
NOTES_LIMIT = 256 * 1024


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
        os.chmod(self.folder, 0o700)

    def lock(self) -> bool:
        """Become the job's one living runner on this machine; False when another is.

        Others find out whether a runner lives by taking a shared lock for an instant; that is waited out.
        """
        self._lock = os.open(self.path("lock"), os.O_RDWR | os.O_CREAT, 0o600)
        for _ in range(LOCK_TRIES):
            if self._flock(fcntl.LOCK_EX):
                # Always as long, so that a full disk holds up none but the first.
                os.pwrite(self._lock, b"%-19d\n" % os.getpid(), 0)
                return True
            if not self._flock(fcntl.LOCK_SH):
                return False
            self._flock(fcntl.LOCK_UN)
            time.sleep(LOCK_WAIT_S)
        return False

    def _flock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def nonce(self) -> str:
        """The name under which this job was, or will be, claimed: made once, so that a successor may ask again."""
        with contextlib.suppress(FileNotFoundError), open(self.path("nonce"), encoding="ascii") as file:
            if nonce := file.read():
                return nonce
        nonce = os.urandom(16).hex()
        self.write("nonce", nonce)
        return nonce

    def has(self, name: str) -> bool:
        """Whether a file was written."""
        return os.path.exists(self.path(name))

    def write(self, name: str, text: str, *, synced: bool = True) -> None:
        """Write a file whole; synced, it is there after a power failure too, with its name, before this returns."""
        draft = self.path(f".{name}")
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, self.path(name))
        if not synced:
            return
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

    def size(self, name: str) -> int:
        """Bytes in a file; 0 when there is none."""
        try:
            return os.path.getsize(self.path(name))
        except FileNotFoundError:
            return 0


def note(text: str) -> None:
    """A line in runner.log, which is the runner's standard error and begins anew where it would grow too long."""
    with contextlib.suppress(OSError):
        if os.fstat(2).st_size > NOTES_LIMIT:
            os.ftruncate(2, 0)
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} [{os.getpid()}] {text}\n")
    sys.stderr.flush()
