"""The cache of offers for given requirements, of any kind of backend (docs/design.md#caches).

A hit is a small read of the backend's stamp, which each new value, change or deletion replaces for all processes.
Backends with sources are never waited for. Other backends are called by one caller at a time; the rest get the last
known offers, or wait for a moment.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import Count, Max
from django.utils import timezone

from dstackweb.backends import contract, registry
from dstackweb.backends.contract import Hidden, LimitedByQuotas, Offer, Sourced, SourceState
from dstackweb.backends.models import Backend
from dstackweb.offers import counts, refusals, single_flight, source_rows, sources, store
from dstackweb.offers.models import Result, SourceRow
from dstackweb.spec.effective import Requirements

log = logging.getLogger(__name__)

TTL_S = 60.0
"""Lifetime of offers in seconds, where DSTACKWEB_OFFERS_CACHE has no other."""
EMPTY_TTL_S = 10.0
STALE_S = 3600.0
"""How long the last offers of a failing backend are served."""
SLOTS = 10
"""Results per backend, where DSTACKWEB_OFFERS_CACHE has no other number."""
SKEW_S = 5.0
"""Clocks of two machines differ by less."""
USE_RECORDED_S = 10.0
"""The least time between two writes of a result's use."""

Key = tuple[int, int, Requirements, str | None]


class NothingKnown(Exception):
    """A backend's offers are unknown, which does not mean that it has none."""


class Unread(NamedTuple):
    """A source without a value: in its region (empty: in all) there may be more offers than are known."""

    region: str
    hides: Hidden


@dataclass
class CachedOffers:
    """A result with the token and time (seconds since the epoch) when it was made; `calls` is its cost without a cache.

    `unread`: what hides offers. Only `recorded_at`, when its use was last written, ever changes.
    """

    token: str
    made_at: float
    offers: tuple[Offer, ...]
    calls: int
    is_stale: bool
    digest: str
    unread: tuple[Unread, ...] = ()
    recorded_at: float = 0.0


_local: store.LocalCache[Key, CachedOffers] = store.LocalCache(20)
"""Few per process: thousands of offers take some megabytes."""


class CachedDriver:
    """As `registry.driver`, with cached offers. `wait_s`: how long to wait for a call in progress."""

    def __init__(self, backend: Backend, *, wait_s: float = single_flight.WAIT_S) -> None:
        self._backend, self._wait_s = backend, wait_s

    def offers(self, requirements: Requirements, *, image: str | None = None) -> Sequence[Offer]:
        """As `contract.Backend.offers`. Raises what `read` raises."""
        return self.read(requirements, image=image).offers

    def read(self, requirements: Requirements, *, image: str | None = None) -> CachedOffers:
        """The offers, with what was refused lately, and what hides others.

        Raises NothingKnown, UnknownKind, and the driver's own errors.
        """
        key, token = _key(self._backend, requirements, image), _token(self._backend)
        local = _current_local(key, token, self._backend.kind)
        result = self._look_up(requirements, image) if local is None else self._hit(local)
        offers = refusals.mark_refused(self._backend, result.offers)
        return result if offers is result.offers else dataclasses.replace(result, offers=offers)

    def _hit(self, result: CachedOffers) -> CachedOffers:
        now = timezone.now()
        if abs(now.timestamp() - result.recorded_at) > USE_RECORDED_S:
            result.recorded_at = now.timestamp()
            counts.record_use(self._backend.pk, result.digest, now)
        return _served(self._backend, result)

    def _look_up(self, requirements: Requirements, image: str | None) -> CachedOffers:
        """Offers that this process does not have: from the shared cache, or made."""
        current = Backend.objects.filter(pk=self._backend.pk).first()
        if current is None:
            raise NothingKnown(f"the backend {self._backend.name} was deleted")
        self._backend = current
        lookup = _Lookup(current, requirements, image)
        result = lookup.find(_token(current))
        if result is not None:
            return self._hit(result)
        code = registry.driver(current)
        if sources.is_sourced(code):
            return lookup.join(code)
        return lookup.call(code, self._wait_s)


class _Lookup:
    """One backend, as it is now, with the requirements of a lookup."""

    def __init__(self, backend: Backend, requirements: Requirements, image: str | None) -> None:
        self.backend, self.requirements, self.image = backend, requirements, image
        self.key = _key(backend, requirements, image)
        text = json.dumps([backend.version, requirements.model_dump(mode="json"), image], sort_keys=True)
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def find(self, token: str) -> CachedOffers | None:
        result = self._shared()
        if result is None or not _is_current(result, token, self.backend.kind):
            return None
        _local.put(self.key, result)
        return result

    def join(self, code: Sourced) -> CachedOffers:
        """Make the offers from the cached sources, without a network."""
        name = f"join:{self.backend.pk}:{self.digest}"
        with single_flight.one_thread_at_a_time(name) as first:
            # Read before the sources: a value stored meanwhile makes this result outdated.
            token = _token(self.backend)
            if not first and (local := _current_local(self.key, token, self.backend.kind)) is not None:
                return _served(self.backend, local)
            counts.add(self.backend.pk, misses=1)
            readings = sources.read_all(self.backend, code, code.wanted())
            offers = self._of_kind(code.join(readings, self.requirements, image=self.image))
            usable = [reading for reading in readings.values() if reading.state is not SourceState.FAILED]
            is_stale = any(reading.state is SourceState.STALE for reading in usable)
            counts.add(self.backend.pk, uncached=len(usable), stale_served=int(is_stale))
            unread = {
                Unread(key.region, hides)
                for key, reading in readings.items()
                if reading.state is SourceState.FAILED and (hides := code.sources[key.source].hides) is not Hidden.NONE
            }
            result = CachedOffers(
                token, timezone.now().timestamp(), offers, len(usable), is_stale, self.digest, tuple(sorted(unread))
            )
            self._keep(result)
            return result

    def call(self, code: contract.Backend, wait_s: float) -> CachedOffers:
        """Call the backend once for all callers; the others get the last known offers, or wait."""
        counts.add(self.backend.pk, misses=1, uncached=1)
        last = self._last()
        called = False

        def call(lead: single_flight.Lead) -> CachedOffers:
            nonlocal called
            called = True
            token = _token(self.backend)
            counts.add(self.backend.pk, calls=1)
            try:
                offers = self._of_kind(code.offers(self.requirements, image=self.image))
            except Exception:
                counts.add(self.backend.pk, failures=1)
                raise
            result = CachedOffers(token, timezone.now().timestamp(), offers, 1, False, self.digest)
            with transaction.atomic():
                is_current = source_rows.is_current(self.backend, lead)
            if is_current:
                self._keep(result)
            return result

        def find() -> CachedOffers | None:
            token = _token(self.backend)
            return _current_local(self.key, token, self.backend.kind) or self.find(token)

        name = f"offers:{self.backend.pk}:{self.digest}"
        try:
            result = single_flight.run(name, 0.0 if last is not None else wait_s, find, call)
        except Exception as error:
            if last is None:
                raise
            log.warning("backend %s can't be read, so its last offers are used: %s", self.backend.name, error)
            result = None
        if not called:
            counts.add(self.backend.pk, coalesced=1)
        if result is not None:
            return result
        if last is None:
            raise NothingKnown(f"the backend {self.backend.name} has not answered yet")
        counts.add(self.backend.pk, stale_served=1)
        return last

    def _of_kind(self, offers: Iterable[Offer]) -> tuple[Offer, ...]:
        return tuple(dataclasses.replace(offer, kind=self.backend.kind) for offer in offers)

    def _last(self) -> CachedOffers | None:
        """The last result of this version, current or not."""
        results = [result for result in (_local.get(self.key), self._shared()) if result is not None]
        newest = max(results, key=lambda result: result.made_at, default=None)
        return newest if newest and abs(timezone.now().timestamp() - newest.made_at) < STALE_S else None

    def _shared(self) -> CachedOffers | None:
        slot = Result.objects.filter(backend=self.backend, digest=self.digest).values_list("slot", flat=True).first()
        if slot is None:
            return None
        result: CachedOffers | None = store.get(_object(self.backend.pk, slot), CachedOffers)
        return result if result is not None and result.digest == self.digest else None

    def _keep(self, result: CachedOffers) -> None:
        result.recorded_at = result.made_at
        _local.put(self.key, result)
        slot = self._slot()
        if slot is not None:
            store.put(_object(self.backend.pk, slot), result, CachedOffers, STALE_S)

    def _slot(self) -> int | None:
        """The slot of this result: its own, a free or the least recently used one. None: the backend is deleted."""
        now = timezone.now()
        with transaction.atomic():
            if not Backend.objects.select_for_update(no_key=True).filter(pk=self.backend.pk).exists():
                return None
            slots = int(store.policy(self.backend.kind, "entries", SLOTS))
            # After a change to fewer, the others are not used any more.
            Result.objects.filter(backend=self.backend, slot__gte=slots).delete()
            taken = {result.slot: result for result in Result.objects.filter(backend=self.backend)}
            for slot, result in taken.items():
                if result.digest == self.digest:
                    Result.objects.filter(pk=result.pk).update(used_at=now)
                    return slot
            free = min(set(range(slots)) - set(taken), default=None)
            if free is None:
                oldest = min(taken.values(), key=lambda result: (result.used_at, result.slot))
                Result.objects.filter(pk=oldest.pk).update(digest=self.digest, used_at=now)
                return oldest.slot
            Result.objects.create(backend=self.backend, slot=free, digest=self.digest, used_at=now)
            return free


def backend_changed(instance: Backend, **_signal: Any) -> None:
    """A backend was saved, or deleted with its row kept: its cached offers are outdated."""
    if instance.deleted_at is not None:
        backend_deleted(instance)
        SourceRow.objects.filter(backend=instance).delete()
        Result.objects.filter(backend=instance).delete()
        return
    transaction.on_commit(lambda: store.restamp(source_rows.catalog_name(instance.pk)))


def backend_deleted(instance: Backend, **_signal: Any) -> None:
    """A backend is about to be deleted: drop its offers everywhere."""
    pk = instance.pk
    slots = Result.objects.filter(backend=pk).values_list("slot", flat=True)
    names = [*source_rows.objects_of(pk), *(_object(pk, slot) for slot in slots)]

    def drop() -> None:
        store.restamp(source_rows.catalog_name(pk))
        store.delete(*names)
        source_rows.drop(pk)
        _local.drop(lambda key: key[0] == pk)

    transaction.on_commit(drop)


def forget() -> None:
    _local.forget()


def _served(backend: Backend, result: CachedOffers) -> CachedOffers:
    """Count a cached result as a hit, and return it."""
    counts.add(backend.pk, hits=1, uncached=result.calls, stale_served=int(result.is_stale))
    return result


def _key(backend: Backend, requirements: Requirements, image: str | None) -> Key:
    return backend.pk, backend.version, requirements, image


def _current_local(key: Key, token: str, kind: str) -> CachedOffers | None:
    """Return this process's own result, or None if there is none or it is outdated."""
    result = _local.get(key)
    return result if result is not None and _is_current(result, token, kind) else None


def _token(backend: Backend) -> str:
    """Results made under another token are outdated: it changes with each refresh by hand and each new value.

    Where a quota limits what there is, it also changes with each own instance that is ordered or ends: its use is taken
    from rows. The newest one and how many there are tell two sets apart.
    """
    token = f"{backend.refresh_generation}:{store.stamp(source_rows.catalog_name(backend.pk))}"
    if backend.kind in registry.KINDS and isinstance(registry.driver(backend), LimitedByQuotas):
        token += ":{number}:{newest}".format(
            **backend.instances_in_use().aggregate(number=Count("pk"), newest=Max("created_at"))
        )
    return token


def _object(backend_id: int, slot: int) -> str:
    return f"result:{backend_id}:{slot}"


def _is_current(result: CachedOffers, token: str, kind: str) -> bool:
    age_s = timezone.now().timestamp() - result.made_at
    ttl_s = store.policy(kind, "offers", TTL_S)
    return result.token == token and -SKEW_S < age_s < (ttl_s if result.offers else min(ttl_s, EMPTY_TTL_S))
