"""Becoming a process of one's own: no parent, no session, no file and no signal setting of whoever started it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

MAYBE_IGNORED = ("HUP", "INT", "QUIT", "TERM", "CHLD", "USR1", "USR2", "TSTP", "TTIN", "TTOU")


def detached(body: Callable[[Callable[[bytes], None]], None], log: str) -> bytes:
    """Run `body` in a detached process, with its standard error appended to the file `log`.

    Returns what `body` says with the function that it is given, as soon as it has; empty when it died without a word.
    """
    read_end, write_end = os.pipe()
    if pid := os.fork():
        os.close(write_end)
        with os.fdopen(read_end, "rb") as answer:
            said = answer.read()
        os.waitpid(pid, 0)
        return said
    status = 1
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        _forget_the_starter(write_end, log)

        def say(text: bytes) -> None:
            os.write(write_end, text)
            os.close(write_end)

        body(say)
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _forget_the_starter(keep: int, log: str) -> None:
    close_all_but(keep)
    os.chdir("/")
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDWR)
    notes = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, null), (2, notes)):
        os.dup2(source, target)
    os.close(null)
    os.close(notes)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name in MAYBE_IGNORED:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)


def close_all_but(*keep: int) -> None:
    """Close every file but the three standard ones and these."""
    for fd in map(int, os.listdir("/dev/fd")):
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)
