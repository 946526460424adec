"""The sender of this process: created at the first report, again in a forked child, closed at exit."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from dstackweb.tracking.client import Entry, reporter_name
from dstackweb.tracking.sender import EXIT_S, Sender
from dstackweb.tracking.spool import Spool, resend_orphans, spool_folder

log = logging.getLogger("dstackweb.tracking")

URL, TOKEN = "DSTACKWEB_TASKS_URL", "DSTACKWEB_TASKS_TOKEN"
"""Environment variables of a job's commands: where to report tasks, and the token for it."""

CHILDREN_EVERY_S = 5.0
"""How often a reporting process checks for terminated children. It checks once more at exit."""


class _ProcessState:
    """State kept once per process. `off`: this process reports nothing, or nothing more."""

    def __init__(self) -> None:
        self.sender: Sender | None = None
        self.off = False
        self.lock = threading.RLock()  # a signal handler may report while its thread creates the sender


_process = _ProcessState()


def current_sender() -> Sender | None:
    """The sender of this process. None without URL and token in the environment."""
    process = _process
    if process.sender is not None or process.off:
        return process.sender
    with process.lock:
        if process.sender is None and not process.off:
            made = _make_sender()
            process.sender = process.sender or made
            process.off = process.sender is None
        return process.sender


def flush(timeout_s: float = EXIT_S) -> bool:
    """Send all reports now. Returns whether all were delivered within `timeout_s` seconds.

    Needed only before a process ends without running exit functions, for example by `os._exit`.
    """
    sender = _process.sender
    return sender.flush(timeout_s) if sender is not None else True


def close(timeout_s: float = EXIT_S) -> None:
    """Send the remaining reports within `timeout_s` seconds. This process then reports nothing more."""
    process = _process
    sender, process.sender, process.off = process.sender, None, True
    if sender is not None:
        sender.close(timeout_s)
    _report_for_children(timeout_s)


def _make_sender() -> Sender | None:
    url, token = os.environ.get(URL), os.environ.get(TOKEN)
    if not url or not token:
        log.debug("%s and %s are not set: tasks are not reported", URL, TOKEN)
        return None
    try:
        parent = _parent_pid()
        if parent is None:
            return Sender(url, token, after_send=_at_intervals(_report_for_children))
        name = reporter_name()
        sender = Sender(url, token, reporter=name, spool=_open_spool(parent, token, name))
    except ValueError as error:
        log.warning("tasks are not reported: %s: %s", URL, error)
        return None
    # These processes end without the functions of atexit.
    from multiprocessing.util import Finalize

    Finalize(None, close, exitpriority=10)
    return sender


def _open_spool(parent: int, token: str, reporter: str) -> Spool | None:
    try:
        return Spool(spool_folder(parent, token), reporter)
    except OSError as error:  # for example no temporary directory
        log.debug("the last reports may be lost: %s", error)
        return None


def _parent_pid() -> int | None:
    """The id of the process that started this one by multiprocessing, else None."""
    module = sys.modules.get("multiprocessing.process")
    parent = module.parent_process() if module is not None else None
    return parent.pid if parent is not None else None


def _at_intervals(act: Callable[[], None]) -> Callable[[], None]:
    """`act`, at most every CHILDREN_EVERY_S seconds."""
    last = time.monotonic()

    def sometimes() -> None:
        nonlocal last
        if time.monotonic() - last >= CHILDREN_EVERY_S:
            act()
            last = time.monotonic()

    return sometimes


def _report_for_children(timeout_s: float = EXIT_S) -> None:
    """Send what multiprocessing children had not delivered when they were terminated."""
    url, token = os.environ.get(URL), os.environ.get(TOKEN)
    if not url or not token or "multiprocessing.process" not in sys.modules:
        return
    until = time.monotonic() + timeout_s

    def send(reporter: str, entries: list[Entry]) -> bool:
        sender = Sender(url, token, reporter=reporter)
        return sender.send_for(entries, max(until - time.monotonic(), 0.0))

    with contextlib.suppress(Exception):  # a damaged file must not stop this process
        resend_orphans(spool_folder(os.getpid(), token), send)


def _after_fork() -> None:
    """Start afresh in a forked child: it has no sender thread, and inherited locks may stay held."""
    global _process
    if _process.sender is not None and _process.sender.spool is not None:
        _process.sender.spool.close()
    _process = _ProcessState()


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
