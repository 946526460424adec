"""This process's own sender: made when something is first reported, made anew in a fork's child, closed at the end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from dstackweb.tracking.entries import Entry
from dstackweb.tracking.journal import Journal, folder_of, left
from dstackweb.tracking.sender import EXIT_S, Sender, reporter_name

log = logging.getLogger("dstackweb.tracking")

URL, TOKEN = "DSTACKWEB_TASKS_URL", "DSTACKWEB_TASKS_TOKEN"
"""Where a job's tasks are told, and what opens that: in the environment of its commands."""


CHILDREN_EVERY_S = 5.0
"""How often a process that reports looks for children that were ended; and once more at its own end."""


class _Process:
    """What there is once per process. `off`: nothing is reported from here, or no more."""

    def __init__(self) -> None:
        self.sender: Sender | None = None
        self.off = False
        self.lock = threading.RLock()  # a signal's handler may report while its thread makes the sender


_process = _Process()


def current() -> Sender | None:
    """This process's sender; None where the environment does not say where to report."""
    process = _process
    if process.sender is not None or process.off:
        return process.sender
    with process.lock:
        if process.sender is None and not process.off:
            made = _made()
            process.sender = process.sender or made
            process.off = process.sender is None
        return process.sender


def flush(timeout_s: float = EXIT_S) -> bool:
    """Send now what was reported so far; whether all had been delivered within `timeout_s` seconds.

    Needed only before a process ends in a way that runs no exit functions, such as `os._exit`.
    """
    sender = _process.sender
    return sender.flush(timeout_s) if sender is not None else True


def close(timeout_s: float = EXIT_S) -> None:
    """Send the rest, within `timeout_s` seconds, and report nothing more from this process."""
    process = _process
    sender, process.sender, process.off = process.sender, None, True
    if sender is not None:
        sender.close(timeout_s)
    _tell_for_children(timeout_s)


def _made() -> Sender | None:
    url, token = os.environ.get(URL), os.environ.get(TOKEN)
    if not url or not token:
        log.debug("%s and %s are not set: tasks are not reported", URL, TOKEN)
        return None
    try:
        parent = _parent()
        if parent is None:
            return Sender(url, token, beside=_now_and_then(_tell_for_children))
        name = reporter_name()
        sender = Sender(url, token, reporter=name, journal=_journal(parent, token, name))
    except ValueError as error:
        log.warning("tasks are not reported: %s: %s", URL, error)
        return None
    # These processes end without the functions of atexit.
    from multiprocessing.util import Finalize

    Finalize(None, close, exitpriority=10)
    return sender


def _journal(parent: int, token: str, reporter: str) -> Journal | None:
    try:
        return Journal(folder_of(parent, token), reporter)
    except OSError as error:  # a machine may have no temporary directory, too
        log.debug("what is reported last may be lost: %s", error)
        return None


def _parent() -> int | None:
    """The process that started this one by multiprocessing."""
    module = sys.modules.get("multiprocessing.process")
    parent = module.parent_process() if module is not None else None
    return parent.pid if parent is not None else None


def _now_and_then(act: Callable[[], None]) -> Callable[[], None]:
    """`act`, but only when it was not done for CHILDREN_EVERY_S seconds."""
    last = time.monotonic()

    def sometimes() -> None:
        nonlocal last
        if time.monotonic() - last >= CHILDREN_EVERY_S:
            act()
            last = time.monotonic()

    return sometimes


def _tell_for_children(timeout_s: float = EXIT_S) -> None:
    """Tell what children of multiprocessing could not tell before they were ended."""
    url, token = os.environ.get(URL), os.environ.get(TOKEN)
    if not url or not token or "multiprocessing.process" not in sys.modules:
        return
    until = time.monotonic() + timeout_s

    def tell(reporter: str, entries: list[Entry]) -> bool:
        sender = Sender(url, token, reporter=reporter)
        return sender.tell_for(entries, max(until - time.monotonic(), 0.0))

    with contextlib.suppress(Exception):  # whatever lies there, this process goes on
        left(folder_of(os.getpid(), token), tell)


def _forked() -> None:
    """The sender's thread is not in the child, and its locks may be held for ever: the child starts afresh."""
    global _process
    if _process.sender is not None and _process.sender.journal is not None:
        _process.sender.journal.close()
    _process = _Process()


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
