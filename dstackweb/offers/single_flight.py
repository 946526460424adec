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

_running: dict[str, threading.Event] = {}


@dataclass(frozen=True)
class Lead:
    """The right to make the call. Without a holder it is valid in this process only, because the cache is down."""

    name: str
    holder: str | None

    def holds(self) -> bool:
        """Whether it is still valid. Call it first in the storing transaction: it also extends the lease."""
        return self.holder is None or Lease.renew(self.name, self.holder, LEASE_S, timezone.now())


def run(name: str, wait_s: float, find: Callable[[], T | None], call: Callable[[Lead], T | None]) -> T | None:
    """The result of `call`, made by one caller for all; None if there is none, or not within `wait_s`.

    `find` returns a usable stored result, or None. Only the leader waits longer than `wait_s`. Call it
    outside any transaction.
    """
    deadline = time.monotonic() + wait_s
    while True:
        is_leader, event = _enter(name)
        if is_leader:
            try:
                return _run_leased(name, deadline, find, call)
            finally:
                _leave(name)
        event.wait(max(0.0, deadline - time.monotonic()))
        found = find()
        if found is not None or time.monotonic() >= deadline:
            return found


@contextmanager
def one_thread_at_a_time(name: str) -> Iterator[bool]:
    """A lock for threads of this process; True if the thread did not have to wait."""
    is_leader, event = _enter(name)
    first = is_leader
    while not is_leader:
        event.wait()
        is_leader, event = _enter(name)
    try:
        yield first
    finally:
        _leave(name)


def _run_leased(name: str, deadline: float, find: Callable[[], T | None], call: Callable[[Lead], T | None]) -> T | None:
    if store.is_down():
        found = find()
        return call(Lead(name, None)) if found is None else found
    holder = f"{os.getpid()}.{secrets.token_hex(8)}"
    while True:
        if Lease.take(name, holder, LEASE_S, timezone.now()):
            with _keep_renewed(name, holder):
                found = find()
                return call(Lead(name, holder)) if found is None else found
        found = find()
        if found is not None or time.monotonic() >= deadline:
            return found
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))


def _enter(name: str) -> tuple[bool, threading.Event]:
    mine = threading.Event()
    event = _running.setdefault(name, mine)
    return event is mine, event


def _leave(name: str) -> None:
    _running.pop(name).set()


@contextmanager
def _keep_renewed(name: str, holder: str) -> Iterator[None]:
    """Renew the lease during the call, then release it."""
    done = threading.Event()
    thread = threading.Thread(target=_renew, args=(name, holder, done), name=f"lease of {name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        Lease.release(name, holder)


def _renew(name: str, holder: str, done: threading.Event) -> None:
    try:
        while not done.wait(LEASE_S / 3):
            try:
                if not Lease.renew(name, holder, LEASE_S, timezone.now()):
                    return
            except DatabaseError as error:
                log.warning("the lease of %s can't be renewed: %s", name, error)
    finally:
        connection.close()


os.register_at_fork(after_in_child=_running.clear)
