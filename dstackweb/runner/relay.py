"""The process between the commands and the spool, which copies their output up to the log's limit.

With the file itself as their output, a command that opens /dev/stdout or /dev/stderr, as many scripts do, would
truncate it, or be refused where it runs as another user, and a flood of output would fill the disk. A pipe avoids both,
and this process, which outlives the runner, still writes every byte to the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import signal
import sys
import time

PIECE = 1 << 16
DISK_FULL_WAIT_S = 1.0


def start(spool: str, limit: int, account: pwd.struct_passwd) -> int:
    """Start the relay; returns the end of the pipe that the commands, run by `account`, are to write to.

    The relay ends when the last writer has closed the pipe; until then it holds a lock on the spool. Call this before
    `tree.adopt_orphans`, so that it doesn't become an orphan of the job.
    """
    source, sink = os.pipe()
    if account.pw_uid != os.getuid():
        os.fchown(sink, account.pw_uid, account.pw_gid)  # opening /dev/stdout opens the pipe anew
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
            _relay(source, file, limit)
    finally:
        os._exit(0)


def _relay(source: int, file: int, limit: int) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(source, 0)
    os.dup2(file, 1)
    os.closerange(3, 65536)  # among them the runner's lock, which must end with the runner
    try:
        copy(0, 1, limit)
    except OSError as error:
        sys.stderr.write(f"the output can't be stored any more: {error}\n")
        sys.stderr.flush()


def copy(source: int, file: int, limit: int) -> None:
    """Copy `source` to the end of `file`; after `limit` bytes one last line instead."""
    room = limit
    while data := os.read(source, PIECE):
        if room < 0:
            continue
        _append(file, data[:room])
        room -= len(data)
        if room < 0:
            _append(file, last_line(limit))


def last_line(limit: int) -> bytes:
    """The last line of a log of more than `limit` bytes."""
    size = f"{limit >> 20} MB" if limit >= 1 << 20 else f"{limit} bytes"
    return f"\n[dstackweb: the log reached its limit of {size}; further output is discarded]\n".encode()


def _append(file: int, data: bytes) -> None:
    """Write all of it. On a full disk it waits, and the commands wait as for any full pipe."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(file, rest) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            time.sleep(DISK_FULL_WAIT_S)


def is_done(spool: str) -> bool:
    """Whether a spool is complete."""
    try:
        file = os.open(spool, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True
