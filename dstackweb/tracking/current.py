"""This process's own sender: made when something is first reported, made anew in a fork's child, closed at the end."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading

from dstackweb.tracking.sender import EXIT_S, Sender

log = logging.getLogger("dstackweb.tracking")

URL, TOKEN = "DSTACKWEB_TASKS_URL", "DSTACKWEB_TASKS_TOKEN"
"""Where a job's tasks are told, and what opens that: in the environment of its commands."""


class _Process:
    """What there is once per process. `off`: nothing is reported from here, or no more."""

    def __init__(self) -> None:
        self.sender: Sender | None = None
        self.off = False
        self.lock = threading.Lock()


_process = _Process()


def current() -> Sender | None:
    """This process's sender; None where the environment does not say where to report."""
    process = _process
    if process.sender is not None or process.off:
        return process.sender
    with process.lock:
        if process.sender is None and not process.off:
            process.sender = _made()
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


def _made() -> Sender | None:
    url, token = os.environ.get(URL), os.environ.get(TOKEN)
    if not url or not token:
        log.debug("%s and %s are not set: tasks are not reported", URL, TOKEN)
        return None
    try:
        sender = Sender(url, token)
    except ValueError as error:
        log.warning("tasks are not reported: %s: %s", URL, error)
        return None
    if _is_child_of_multiprocessing():  # which ends without the functions of atexit
        from multiprocessing.util import Finalize

        Finalize(None, close, exitpriority=10)
    return sender


def _is_child_of_multiprocessing() -> bool:
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def _forked() -> None:
    """The sender's thread is not in the child, and its locks may be held for ever: the child starts afresh."""
    global _process
    _process = _Process()


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
