"""The shared cache: stamps, entries that can't be read, and going on without it."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import caches
from django.db import connection
from hypothesis import given, strategies as st

from dstackweb.backends.contract import SourceState
from dstackweb.backends.models import Backend
from dstackweb.lib.models import CacheRow
from dstackweb.offers import catalog, sources, store
from dstackweb.offers.models import SourceRow
from tests import servers
from tests.offers.cloud_stub import ANY, SPOT, TYPES, TYPES_US, Cloud, all_ended, at_once, fork, read
from tests.support import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def redis(tmp_path: Path, settings: Any) -> Iterator[servers.Server]:
    """A Redis of the test's own, which it may kill."""
    server = servers.redis(tmp_path / "redis")
    before = settings.CACHES
    options = {"SOCKET_CONNECT_TIMEOUT": 2, "SOCKET_TIMEOUT": 2, "IGNORE_EXCEPTIONS": False}
    redis = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url, "OPTIONS": options}
    settings.CACHES = {**before, "offers": redis}
    yield server
    server.stop()
    store.forget()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RETRY_S", 0.1)


def test_the_offers_cache_does_not_hide_connection_errors() -> None:
    from django.conf import settings

    options = settings.CACHES["offers"].get("OPTIONS", {})
    assert options.get("IGNORE_EXCEPTIONS") is (None if connection.vendor == "sqlite" else False)


def test_a_stamp_stays_until_it_is_replaced_and_is_never_reused() -> None:
    first = store.stamp("s")
    assert store.stamp("s") == first
    store.restamp("s")
    second = store.stamp("s")
    caches["offers"].clear()
    third = store.stamp("s")
    assert len({first, second, third}) == 3


def test_a_stamp_that_can_not_be_read_is_replaced() -> None:
    caches["offers"].set("s", 17)
    assert isinstance(store.stamp("s"), str)
    assert store.stamp("s") == store.stamp("s")
    _spoil("s")
    assert store.stamp("s") == store.stamp("s")


def test_an_unreadable_object_is_a_miss_and_no_cache_outage() -> None:
    store.put("o", [1], list[int], 60)
    assert store.get("o", list[int]) == [1]
    _spoil(store._object("o"))
    assert store.get("o", list[int]) is None
    assert store.health() is None
    store.put("o", [2], list[int], 60)
    assert store.get("o", list[str]) is None
    assert store.get("o", list[int]) is None


def test_a_dead_redis_is_reported_and_not_contacted_for_a_while(
    redis: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.put("o", [1], list[int], 60)
    assert store.health() is None
    redis.kill()
    assert store.get("o", list[int]) is None
    shown = store.health()
    assert shown is not None
    assert "onnection" in shown.error
    assert not store.put("o", [1], list[int], 60)
    attempts: list[object] = []
    monkeypatch.setattr(type(caches["offers"]), "get", lambda *given: attempts.append(given))
    assert store.stamp("s") == store.stamp("s")
    assert attempts == []
    assert store.health() == shown


@pytest.mark.usefixtures("quick")
def test_without_the_cache_a_process_fetches_for_itself_once_and_serves_that(
    redis: servers.Server, backend: Backend, cloud: Cloud
) -> None:
    """The process does it in the background, and nobody waits; what it held before is served all along."""
    sources.refresh(backend, TYPES)
    assert len(catalog.CachedDriver(backend).offers(ANY)) == 2
    redis.kill()
    store.get("x", str)
    assert read(backend, TYPES).state is SourceState.FRESH
    assert read(backend, SPOT).state is SourceState.FAILED
    assert eventually(lambda: read(backend, SPOT).state is SourceState.FRESH)
    assert len(catalog.CachedDriver(backend).offers(ANY)) == 2
    eventually(lambda: len(catalog.CachedDriver(backend).offers(ANY)) == 3)
    assert sorted(cloud.asked) == ["spot eu", "types eu", "types us"]
    assert SourceRow.objects.count() == 1
    _settle()


def test_without_the_cache_twenty_threads_of_a_process_make_one_call(
    redis: servers.Server, plain: Backend, cloud: Cloud
) -> None:
    cloud.takes_s = 0.3
    redis.kill()
    store.get("x", str)
    assert store.health() is not None
    found = at_once(20, lambda: len(catalog.CachedDriver(plain, wait_s=20).offers(ANY)))
    assert found == [1] * 20
    assert cloud.asked == ["offers 1"]


@pytest.mark.usefixtures("quick")
def test_a_failure_without_the_cache_is_held_off_as_well(redis: servers.Server, backend: Backend, cloud: Cloud) -> None:
    redis.kill()
    store.get("x", str)
    cloud.says = {TYPES: RuntimeError("away, too")}
    eventually(lambda: read(backend, TYPES).error)
    for _ in range(20):
        assert read(backend, TYPES).state is SourceState.FAILED
    _settle()
    assert cloud.asked == ["types eu"]


@pytest.mark.usefixtures("quick")
def test_a_redis_that_comes_back_empty_serves_no_old_object(
    redis: servers.Server, backend: Backend, cloud: Cloud
) -> None:
    sources.refresh(backend, TYPES)
    assert len(catalog.CachedDriver(backend).offers(ANY)) == 2
    redis.kill()
    assert store.stamp("s")
    redis.start()
    cloud.says[TYPES] = ["g7"]
    eventually(lambda: store.put("x", 1, int, 60))
    assert store.health() is None
    sources.forget()
    catalog.forget()
    assert read(backend, TYPES).state is SourceState.FAILED
    assert sources.refresh(backend, TYPES).value == ["g7"]
    assert [offer.instance_type for offer in catalog.CachedDriver(backend).offers(ANY)] == ["g7"]
    assert store.health() is None


@pytest.mark.usefixtures("quick")
def test_after_a_redis_outage_a_process_serves_only_its_latest_local_values(
    redis: servers.Server, backend: Backend, cloud: Cloud
) -> None:
    """Another process had landed something newer, which went with Redis: what this one kept of before is not served."""
    sources.refresh(backend, TYPES)
    sources.refresh(backend, TYPES_US)
    looking = catalog.CachedDriver(backend)
    assert [offer.instance_type for offer in looking.offers(ANY)] == ["g5", "g6", "p4d"]
    cloud.says[TYPES] = ["g7"]
    assert all_ended([fork(lambda: sources.refresh(backend, TYPES, share=0.0))])
    redis.kill()
    redis.start()
    eventually(lambda: store.put("x", 1, int, 60))
    assert [offer.instance_type for offer in looking.offers(ANY)] == ["p4d"]
    assert read(backend, TYPES).state is SourceState.FAILED
    assert sources.refresh(backend, TYPES).value == ["g7"]
    assert [offer.instance_type for offer in looking.offers(ANY)] == ["g7", "p4d"]


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["get", "put"]), st.integers(0, 6)), max_size=60))
def test_the_local_cache_keeps_at_most_the_last_used_entries(most: int, acts: list[tuple[str, int]]) -> None:
    kept: store.LocalCache[int, int] = store.LocalCache(most)
    used: list[int] = []
    for number, (act, key) in enumerate(acts):
        if act == "put":
            kept.put(key, number)
            used = [one for one in used if one != key] + [key]
        else:
            assert (kept.get(key) is not None) == (key in used)
            used = sorted(used, key=key.__eq__)
        used = used[-most:]
    assert {key for key in range(7) if kept.get(key) is not None} == set(used)


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("alias", ["default", "offers"])
def test_a_pickle_in_the_cache_is_never_loaded(alias: str, tmp_path: Path) -> None:
    """A job that reaches Redis could write one."""
    cache: Any = caches[alias]
    cache.set("k", {"a": [1, "two", None]})
    assert cache.get("k") == {"a": [1, "two", None]}
    bomb = pickle.dumps(Bomb(tmp_path / "gone-off"))
    if connection.vendor == "sqlite":
        CacheRow.objects.filter(key=cache.make_key("k")).update(value=base64.b64encode(bomb).decode())
    else:
        cache.client.get_client().set(cache.make_key("k"), bomb)
    with contextlib.suppress(ValueError):
        cache.get("k")
    assert not (tmp_path / "gone-off").exists()


def _settle() -> None:
    """Wait for what this process does in the background."""
    for refresh in list(sources._refreshes.values()):
        refresh.result(10)


def _spoil(name: str) -> None:
    """Write what is no JSON over an entry."""
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("UPDATE lib_cacherow SET value = %s WHERE key = %s", ["?nonsense?", f"offers:1:{name}"])
            assert cursor.rowcount == 1
    else:
        cache: Any = caches["offers"]
        cache.client.get_client().set(cache.make_key(name), b"nonsense")


def test_without_the_cache_all_threads_of_a_process_have_one_stamp(
    redis: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.kill()
    store.get("x", str)

    def made_slowly() -> str:
        stamp = secrets.token_hex(12)
        time.sleep(0.01)  # so that all are at it
        return stamp

    monkeypatch.setattr(store, "new_stamp", made_slowly)
    assert len(set(at_once(8, lambda: store.stamp("catalog:1")))) == 1
