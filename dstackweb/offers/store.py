"""Objects shared by all processes through `caches["offers"]`, and what each process keeps of them.

A stamp is a random id in a small key of its own: whatever was made under another one is not current. Being random, it
can't come again after the cache was emptied, as a counter would.

A cache that is away is left alone for some seconds at a time. Till it is back, each process has only what it keeps
itself, and `health` says so. An entry that can't be read is none.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from django.core.cache import caches
from django.db import DatabaseError
from django.utils import timezone
from redis.exceptions import RedisError

from dstackweb import __version__

log = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

STAMP_TTL_S = 30 * 86400.0
RETRY_S = 5.0
"""How long a cache that did not answer is not asked: each try may cost its time-out."""
AWAY = (RedisError, OSError, DatabaseError)


@dataclass(frozen=True)
class Health:
    """That the shared cache is away, as this process sees it."""

    since: dt.datetime
    error: str


class LocalCache(Generic[K, V]):
    """What this process keeps, the least recently used given up over `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: OrderedDict[K, V] = OrderedDict()
        self.forget()
        os.register_at_fork(after_in_child=self._unlock)

    def get(self, key: K) -> V | None:
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def first(self, key: K, value: V) -> V:
        """What is there; else `value`, which is there from now on. Of several threads the first one's counts."""
        with self._lock:
            found = self._values.setdefault(key, value)
            self._give_up(key)
            return found

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._values[key] = value
            self._give_up(key)

    def _give_up(self, used: K) -> None:
        self._values.move_to_end(used)
        while len(self._values) > self.most:
            self._values.popitem(last=False)

    def drop(self, wanted: Callable[[K], bool]) -> None:
        with self._lock:
            for key in [key for key in self._values if wanted(key)]:
                del self._values[key]

    def __len__(self) -> int:
        return len(self._values)

    def forget(self) -> None:
        self._unlock()
        self._values.clear()

    def _unlock(self) -> None:
        self._lock = threading.Lock()


_own_stamps: LocalCache[str, str] = LocalCache(1000)
_health: Health | None = None
_ask_again_at = 0.0


def new_stamp() -> str:
    return secrets.token_hex(12)


def stamp(name: str) -> str:
    """The current stamp of `name`, made where there is none. While the cache is away, one of this process alone."""
    found = _try(lambda: caches["offers"].get(name), name)
    if isinstance(found, str):
        return found
    if not is_away():
        # Of several that find none, the first one's is everybody's.
        put_it = caches["offers"].add if found is None else caches["offers"].set
        _try(lambda: put_it(name, new_stamp(), STAMP_TTL_S), name)
        found = _try(lambda: caches["offers"].get(name), name)
        if isinstance(found, str):
            return found
    return _own_stamps.first(name, new_stamp())


def restamp(*names: str) -> None:
    """What was made under the stamps of `names` is current no more, here and everywhere."""
    for name in names:
        _own_stamps.put(name, new_stamp())
        _try(lambda name=name: caches["offers"].set(name, new_stamp(), STAMP_TTL_S), name)  # type: ignore[misc]


def get(name: str) -> Any:
    """The object under `name`; None where there is none, or none that can be read, or the cache is away."""
    return _try(lambda: caches["offers"].get(_object(name)), _object(name))


def put(name: str, value: Any, ttl_s: float) -> bool:
    """Store an object. False where the cache is away."""
    _try(lambda: caches["offers"].set(_object(name), value, ttl_s), _object(name))
    return not is_away()


def delete(*names: str) -> None:
    """Drop objects."""
    for name in map(_object, names):
        _try(lambda name=name: caches["offers"].delete(name), name)  # type: ignore[misc]


def is_away() -> bool:
    """Whether the shared cache did not answer this process when last asked."""
    return _health is not None


def health() -> Health | None:
    """What is wrong with the shared cache; None where it answers."""
    return _health


def forget() -> None:
    """Begin as a new process does."""
    global _health, _ask_again_at
    _own_stamps.forget()
    _health, _ask_again_at = None, 0.0


def _object(name: str) -> str:
    """Objects are pickles: those of another version of this program may not fit its code."""
    return f"{__version__}:{name}"


def _try(ask: Callable[[], T], name: str) -> T | None:
    global _health, _ask_again_at
    if _health is not None and time.monotonic() < _ask_again_at:
        return None
    try:
        found = ask()
    except AWAY as error:
        if _health is None:
            log.error("the cache of offers is away, so each process has only its own: %s", error)
            _health = Health(timezone.now(), f"{type(error).__name__}: {error}")
        _ask_again_at = time.monotonic() + RETRY_S
        return None
    except Exception as error:
        log.warning("the entry %s of the cache of offers can't be read, and is dropped: %s", name, error)
        _health = None
        with contextlib.suppress(*AWAY):
            caches["offers"].delete(name)
        return None
    if _health is not None:
        log.warning("the cache of offers is back")
        _health = None
    return found
