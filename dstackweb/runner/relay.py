"""The small process between the commands and the spool: copies what they write, up to the log's limit.

The commands could write to the file themselves. But a command that opens /dev/stdout or /dev/stderr, as `tee` and
many scripts do, would then empty the file, or be refused where it runs as another user; and a flood would fill the
disk. A pipe has neither trouble, and this process, which outlives the runner, still brings every byte to the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import sys
import time

from dstackweb.runner.detach import close_all_but

PIECE = 1 << 16
DISK_FULL_WAIT_S = 1.0


def start(spool: str, limit: int, owner: tuple[int, int] | None) -> int:
    """Start the relay; returns the end of the pipe that the commands are to write to.

    It ends when the last writer has closed the pipe. Until then it holds a lock on the spool. It must not come back to
    the runner as an orphan: call this before `tree.adopt_orphans`. `owner` (uid, gid) may open the pipe anew, which
    is what opening /dev/stdout means.
    """
    source, sink = os.pipe()
    if owner is not None:
        os.fchown(sink, *owner)
    file = os.open(spool, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    if pid := os.fork():
        os.waitpid(pid, 0)
        os.close(source)
        os.close(file)
        return sink
    try:
        os.setsid()
        if os.fork() == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            close_all_but(source, file)
            copy(source, file, limit)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def copy(source: int, file: int, limit: int) -> None:
    """Everything from `source` to the end of `file`; after `limit` bytes one last line, and the rest is dropped."""
    room = limit
    while data := os.read(source, PIECE):
        if room < 0:
            continue
        _append(file, data[:room])
        room -= len(data)
        if room < 0:
            _append(file, last_line(limit))


def last_line(limit: int) -> bytes:
    """What a log says at its end when it was cut."""
    size = f"{limit >> 20} MB" if limit >= 1 << 20 else f"{limit} bytes"
    return f"\n[dstackweb: the log reached its limit of {size}; what followed is lost]\n".encode()


def _append(file: int, data: bytes) -> None:
    """Write all of it. A full disk is waited for, and the commands wait with it as at any full pipe."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(file, rest) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            time.sleep(DISK_FULL_WAIT_S)


def finished(spool: str) -> bool:
    """Whether nothing will be added to a spool any more."""
    with contextlib.suppress(FileNotFoundError):
        file = os.open(spool, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(file)
    return True
