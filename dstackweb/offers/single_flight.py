"""One call for all that need the same: an event coordinates threads of a process, a leased row processes.

If a leader dies, the others wait for the rest of its lease. A slow leader that lost its lease notices when it stores
its result, and must not store it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from django.db import DatabaseError, connection
from django.utils import timezone

from dstackweb.lib.models import Lease
from dstackweb.offers import store

log = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_S = 5.0
WAIT_S = 2.0
"""How long callers without any data wait."""
POLL_S = 0.1

_lock = threading.Lock()
_here: dict[str, threading.Event] = {}


@dataclass(frozen=True)
class Lead:
    """The right to do the call. Without a holder it is this process's alone, because the cache is down."""

    name: str
    holder: str | None

    def holds(self) -> bool:
        """Whether it is still valid; called first in the storing transaction, which so keeps the lease."""
        return self.holder is None or Lease.renew(self.name, self.holder, LEASE_S, timezone.now())


def run(name: str, wait_s: float, landed: Callable[[], T | None], work: Callable[[Lead], T | None]) -> T | None:
    """The result of `work`, done by one caller for all; None if there is none, or not within `wait_s`.

    `landed` returns a usable result stored since the caller began. Only the leader waits longer than `wait_s`. Call it
    outside any transaction.
    """
    deadline = time.monotonic() + wait_s
    while True:
        mine, event = _enter(name)
        if mine:
            try:
                return _run_leased(name, deadline, landed, work)
            finally:
                _leave(name)
        event.wait(max(0.0, deadline - time.monotonic()))
        found = landed()
        if found is not None or time.monotonic() >= deadline:
            return found


@contextmanager
def one_thread_at_a_time(name: str) -> Iterator[bool]:
    """A lock for threads of this process; True if the thread did not have to wait."""
    mine, event = _enter(name)
    first = mine
    while not mine:
        event.wait()
        mine, event = _enter(name)
    try:
        yield first
    finally:
        _leave(name)


def _run_leased(
    name: str, deadline: float, landed: Callable[[], T | None], work: Callable[[Lead], T | None]
) -> T | None:
    if store.is_away():
        found = landed()
        return work(Lead(name, None)) if found is None else found
    holder = f"{os.getpid()}.{secrets.token_hex(8)}"
    while True:
        if Lease.take(name, holder, LEASE_S, timezone.now()):
            with _renewed(name, holder):
                found = landed()
                return work(Lead(name, holder)) if found is None else found
        found = landed()
        if found is not None or time.monotonic() >= deadline:
            return found
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))


def _enter(name: str) -> tuple[bool, threading.Event]:
    with _lock:
        event = _here.get(name)
        if event is not None:
            return False, event
        return True, _here.setdefault(name, threading.Event())


def _leave(name: str) -> None:
    with _lock:
        _here.pop(name).set()


@contextmanager
def _renewed(name: str, holder: str) -> Iterator[None]:
    """Renew the lease meanwhile, then release it."""
    ended = threading.Event()
    thread = threading.Thread(target=_renew, args=(name, holder, ended), name=f"lease of {name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        Lease.release(name, holder)


def _renew(name: str, holder: str, ended: threading.Event) -> None:
    try:
        while not ended.wait(LEASE_S / 3):
            try:
                if not Lease.renew(name, holder, LEASE_S, timezone.now()):
                    return
            except DatabaseError as error:
                log.warning("the lease of %s can't be renewed: %s", name, error)
    finally:
        connection.close()


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    _here.clear()


os.register_at_fork(after_in_child=_forked)
