"""Objects shared by all processes through `caches["offers"]` as JSON, and each process's local copies.

A stamp is a random id in a small key of its own: objects made under another stamp are outdated. Unlike a counter, it
cannot repeat after the cache was emptied.

A cache that is down is retried every few seconds. Meanwhile each process has only its own copies, and `health` says so.
An unreadable entry counts as missing.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from django.conf import settings
from django.core.cache import caches
from django.db import DatabaseError
from django.utils import timezone
from pydantic import TypeAdapter

from dstackweb import __version__
from dstackweb.backends import registry
from dstackweb.env import BadSetting

log = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

STAMP_TTL_S = 30 * 86400.0
RETRY_S = 5.0
"""The pause between attempts to reach a cache that is down: each may take as long as its time-out."""


@dataclass(frozen=True)
class Health:
    """Since when the shared cache is down for this process, and why."""

    since: dt.datetime
    error: str


def policy(kind: str, what: str, default: float) -> float:
    """A number of the cache for a kind of backend: for how many seconds a source or `offers` are fresh, or how many
    `entries` there are."""
    return settings.DSTACKWEB_OFFERS_CACHE.get(f"{kind}.{what}", default)


def check_policy() -> None:
    """Raises BadSetting for a number that nothing reads."""
    for name in settings.DSTACKWEB_OFFERS_CACHE:
        kind, _, number = name.partition(".")
        driver = registry.KINDS[kind].driver_class if kind in registry.KINDS else None
        allowed = {"offers", "entries", *getattr(driver, "sources", ())} if driver else set(registry.KINDS)
        if number not in allowed:
            prefix = f"{kind}." if driver else ""
            choices = ", ".join(prefix + choice for choice in sorted(allowed))
            raise BadSetting("DSTACKWEB_OFFERS_CACHE", name, f"one of {choices}")


class LocalCache(Generic[K, V]):
    """A thread-safe LRU cache of `most` entries."""

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
        """The entry; if missing, `value` is stored. Among threads the first counts."""
        with self._lock:
            found = self._values.setdefault(key, value)
            self._evict(key)
            return found

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._values[key] = value
            self._evict(key)

    def _evict(self, used: K) -> None:
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
_retry_at = 0.0


def new_stamp() -> str:
    return secrets.token_hex(12)


def stamp(name: str) -> str:
    """The current stamp of `name`, created if missing. While the cache is down, this process's own."""
    found = _try(lambda: caches["offers"].get(name), name)
    if isinstance(found, str):
        return found
    if not is_down():
        # Among several processes the first one's counts.
        write = caches["offers"].add if found is None else caches["offers"].set
        _try(lambda: write(name, new_stamp(), STAMP_TTL_S), name)
        found = _try(lambda: caches["offers"].get(name), name)
        if isinstance(found, str):
            return found
    return _own_stamps.first(name, new_stamp())


def restamp(*names: str) -> None:
    """Replace the stamps of `names`: what was made under the old ones is outdated everywhere."""
    for name in names:
        _own_stamps.put(name, new_stamp())
        _try(partial(caches["offers"].set, name, new_stamp(), STAMP_TTL_S), name)


def get(name: str, kind: Any) -> Any:
    """The object, which is of the type `kind`, or None: missing, unreadable, or the cache is down."""

    def read() -> Any:
        found = caches["offers"].get(_object(name))
        return None if found is None else _adapter(kind).validate_json(found)

    return _try(read, _object(name))


def put(name: str, value: Any, kind: Any, ttl_s: float) -> bool:
    """Store an object of the type `kind`, one that pydantic knows; False if the cache is down."""
    text = _adapter(kind).dump_json(value).decode()
    _try(lambda: caches["offers"].set(_object(name), text, ttl_s), _object(name))
    return not is_down()


def checked(value: Any, kind: Any) -> Any:
    """The value, which can be stored as an object of the type `kind`. Raises ValueError for any other."""
    return _adapter(kind).validate_python(value)


def delete(*names: str) -> None:
    for name in map(_object, names):
        _try(partial(caches["offers"].delete, name), name)


def is_down() -> bool:
    return _health is not None


def health() -> Health | None:
    return _health


def forget() -> None:
    global _health, _retry_at
    _own_stamps.forget()
    _health, _retry_at = None, 0.0


def _object(name: str) -> str:
    """With this program's version: objects of another version may not fit its types."""
    return f"{__version__}:{name}"


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _connection_errors() -> tuple[type[Exception], ...]:
    """Of a cache that is down. Redis is loaded only here: it takes a seventh of a program's start."""
    from redis.exceptions import RedisError

    return RedisError, OSError, DatabaseError


def _try(call: Callable[[], T], name: str) -> T | None:
    global _health, _retry_at
    if _health is not None and time.monotonic() < _retry_at:
        return None
    try:
        found = call()
    except _connection_errors() as error:
        if _health is None:
            log.error("the cache of offers is down, so each process has only its own copies: %s", error)
            _health = Health(timezone.now(), f"{type(error).__name__}: {error}")
        _retry_at = time.monotonic() + RETRY_S
        return None
    except Exception as error:
        log.warning("the entry %s of the cache of offers can't be read, and is deleted: %s", name, error)
        _health = None
        with contextlib.suppress(*_connection_errors()):
            caches["offers"].delete(name)
        return None
    if _health is not None:
        log.warning("the cache of offers is up again")
        _health = None
    return found
