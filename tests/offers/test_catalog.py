"""Offers through the cache: what a hit costs, what reaches every process, and what is never served."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from django.core.cache import caches
from django.db import connection
from django.db.models import F, Sum
from django.test.utils import CaptureQueriesContext
from hypothesis import given, settings as hypothesis_settings, strategies as st

from dstackweb import __version__
from dstackweb.backends.contract import Availability, Offer, SourceFailed, SourceState
from dstackweb.backends.models import Backend
from dstackweb.env import BadSetting
from dstackweb.offers import catalog, counts, single_flight, source_rows, sources, store
from dstackweb.offers.models import CacheCount, Result
from dstackweb.spec.effective import Requirements
from tests.offers.cloud_stub import ANY, SPOT, TYPES, TYPES_US, Clock, Cloud, at_once, read
from tests.support import eventually

pytestmark = pytest.mark.django_db
OTHER = (Offer("cluster", "other", 8, 2048, Availability.IDLE),)


def other_process() -> None:
    """Begin as a process that keeps nothing yet."""
    catalog.forget()
    sources.forget()


def refresh_all(backend: Backend, cloud: Cloud) -> None:
    for key in sorted(cloud.says):
        sources.refresh(backend, key)


def names(backend: Backend, requirements: Requirements = ANY) -> list[str]:
    return [offer.instance_type for offer in catalog.CachedDriver(backend, wait_s=0).offers(requirements)]


def counted(backend: Backend) -> dict[str, int]:
    """The counts of all hours."""
    counts.flush()
    fields = ("hits", "misses", "coalesced", "calls", "failures", "throttles", "stale_served", "uncached")
    sums = CacheCount.objects.filter(backend=backend).aggregate(**{name: Sum(name) for name in fields})
    return {name: number for name, number in sums.items() if number}


def test_offers_are_built_from_cached_sources_without_a_call_to_the_cloud(backend: Backend, cloud: Cloud) -> None:
    refresh_all(backend, cloud)
    assert len(cloud.asked) == 3
    assert names(backend) == ["g5", "g6", "p4d"]
    other_process()
    assert names(backend) == ["g5", "g6", "p4d"]
    assert len(cloud.asked) == 3


def test_a_hit_costs_two_small_reads_and_no_query(
    backend: Backend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh_all(backend, cloud)
    driver = catalog.CachedDriver(backend)
    first = driver.offers(ANY)
    read: list[str] = []
    ask = caches["offers"].get
    monkeypatch.setattr(caches["offers"], "get", lambda name: read.append(name) or ask(name))
    with CaptureQueriesContext(
        connection,
    ) as queries:
        assert driver.offers(ANY) is first
    assert read == [f"catalog:{backend.pk}", f"{__version__}:refusals:{backend.pk}:1"]
    of_the_cache = [query for query in queries if "lib_cacherow" in query["sql"]]
    assert len(queries) == len(of_the_cache) == (2 if connection.vendor == "sqlite" else 0)


def test_without_cached_sources_each_request_fails_rather_than_returning_no_offers(
    backend: Backend, cloud: Cloud
) -> None:
    for _ in range(2):
        with pytest.raises(SourceFailed):
            catalog.CachedDriver(backend).offers(ANY)
    assert cloud.asked == []


def test_one_region_that_fails_leaves_the_offers_of_the_others(backend: Backend, cloud: Cloud) -> None:
    cloud.says[TYPES] = SourceFailed("region_disabled", region="eu")
    refresh_all(backend, cloud)
    assert names(backend) == ["p4d"]


def test_a_refresh_by_another_process_is_visible_at_once(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    refresh_all(backend, cloud)
    assert names(backend) == ["g5", "g6", "p4d"]
    here = catalog._local.get((backend.pk, backend.version, ANY, None))
    cloud.says[TYPES] = ["g7"]
    clock.pass_s(30)
    sources.refresh_now(backend)
    sources.refresh(backend, TYPES)
    assert here is not None
    catalog._local.put((backend.pk, backend.version, ANY, None), here)  # as a process that did none of that keeps it
    assert names(backend) == ["g7", "p4d"]


def test_a_changed_configuration_serves_no_offer_of_the_one_before(backend: Backend, cloud: Cloud) -> None:
    refresh_all(backend, cloud)
    assert names(backend)
    Backend.objects.update(version=F("version") + 1, config={"families": ["p5"]})
    with pytest.raises(SourceFailed):
        names(Backend.objects.get())


@pytest.mark.django_db(transaction=True)
def test_a_saved_backend_invalidates_offers_also_for_holders_of_its_old_row(backend: Backend, cloud: Cloud) -> None:
    refresh_all(backend, cloud)
    old = Backend.objects.get()
    assert names(old)
    backend.version += 1
    backend.config = {"families": ["p5"]}
    backend.save()
    with pytest.raises(SourceFailed):
        names(old)


@pytest.mark.django_db(transaction=True)
def test_offers_of_a_deleted_backend_disappear_at_once_also_for_holders_of_its_row(
    backend: Backend, cloud: Cloud
) -> None:
    refresh_all(backend, cloud)
    old = Backend.objects.get()
    assert names(old)
    kept = [*source_rows.objects_of(backend.pk), f"result:{backend.pk}:0"]
    here = catalog._local.get((old.pk, old.version, ANY, None))
    backend.delete()
    assert here is not None
    catalog._local.put((old.pk, old.version, ANY, None), here)  # as another process keeps it
    with pytest.raises(catalog.NothingKnown, match="deleted"):
        names(old)
    assert [store.get(name, Any) for name in kept] == [None] * 4
    assert not Result.objects.exists()


def test_an_emptied_cache_serves_no_old_offers(plain: Backend, cloud: Cloud) -> None:
    assert names(plain) == ["worker"]
    cloud.answer = OTHER
    caches["offers"].clear()
    assert names(plain) == ["other"]


def test_an_unreadable_entry_counts_as_a_miss(plain: Backend, cloud: Cloud) -> None:
    assert names(plain) == ["worker"]
    cloud.answer = OTHER
    store.put(f"result:{plain.pk}:0", {"no": "result"}, Any, 60)
    other_process()
    assert names(plain) == ["other"]


def test_a_result_counts_for_a_minute_and_an_empty_one_for_ten_seconds(
    plain: Backend, cloud: Cloud, clock: Clock
) -> None:
    cloud.answer = ()
    assert names(plain) == []
    cloud.answer = OTHER
    clock.pass_s(9)
    assert names(plain) == []
    clock.pass_s(1)
    assert names(plain) == ["other"]
    cloud.answer = ()
    clock.pass_s(59)
    assert names(plain) == ["other"]
    clock.pass_s(1)
    assert names(plain) == []


def test_how_long_offers_count_and_how_many_results_are_kept_are_settings_of_a_kind(
    plain: Backend, cloud: Cloud, clock: Clock, settings: Any
) -> None:
    settings.DSTACKWEB_OFFERS_CACHE = {"plain.offers": 300.0, "plain.entries": 3.0, "aws.offers": 1.0}
    for cpus in range(5):
        names(plain, Requirements(cpu_min=cpus))
    assert Result.objects.count() == 3
    clock.pass_s(299)
    names(plain, Requirements(cpu_min=4))
    assert len(cloud.asked) == 5
    clock.pass_s(1)
    names(plain, Requirements(cpu_min=4))
    assert len(cloud.asked) == 6
    settings.DSTACKWEB_OFFERS_CACHE = {"plain.entries": 1.0}
    names(plain, Requirements(cpu_min=9))
    assert Result.objects.count() == 1


def test_how_long_a_source_counts_is_a_setting_of_a_kind(
    backend: Backend, cloud: Cloud, clock: Clock, settings: Any
) -> None:
    settings.DSTACKWEB_OFFERS_CACHE = {"aws.types": 30.0}
    sources.refresh(backend, TYPES)
    clock.pass_s(29)
    assert read(backend, TYPES).state is SourceState.FRESH
    clock.pass_s(1)
    assert read(backend, TYPES).state is SourceState.STALE


@pytest.mark.parametrize("name", ["aws.typos", "oracle.offers", "aws"])
def test_a_setting_of_the_cache_that_nothing_reads_stops_the_start(cloud: Cloud, settings: Any, name: str) -> None:
    settings.DSTACKWEB_OFFERS_CACHE = {"aws.types": 30.0, "plain.entries": 3.0}
    store.check_policy()
    settings.DSTACKWEB_OFFERS_CACHE = {name: 30.0}
    with pytest.raises(BadSetting, match="expected one of"):
        store.check_policy()


def test_a_clock_set_back_does_not_keep_a_result_forever(plain: Backend, cloud: Cloud, clock: Clock) -> None:
    assert names(plain) == ["worker"]
    cloud.answer = OTHER
    clock.pass_s(-86400)
    assert names(plain) == ["other"]


def test_a_failing_backend_serves_its_last_offers_and_the_error_is_not_cached(
    plain: Backend, cloud: Cloud, clock: Clock
) -> None:
    assert names(plain) == ["worker"]
    cloud.answer = RuntimeError("away")
    clock.pass_s(60)
    assert names(plain) == ["worker"]
    cloud.answer = OTHER
    assert names(plain) == ["other"]
    assert counted(plain) == {"misses": 3, "uncached": 3, "calls": 3, "failures": 1, "stale_served": 1}


def test_a_backend_that_never_answered_raises_its_error_each_time(plain: Backend, cloud: Cloud) -> None:
    cloud.answer = RuntimeError("away")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="away"):
            names(plain)
    cloud.answer = OTHER
    assert names(plain) == ["other"]


def test_an_answer_requested_before_a_change_is_not_cached_after_it(plain: Backend, cloud: Cloud) -> None:
    for change in (
        lambda: Backend.objects.update(version=F("version") + 1),
        lambda: Backend.objects.update(refresh_generation=F("refresh_generation") + 1),
    ):
        cloud.answer, cloud.during = OTHER, change
        assert names(plain) == ["other"]
        cloud.answer = (Offer("cluster", "new", 1, 1, Availability.IDLE),)
        plain.refresh_from_db()
        assert names(plain) == ["new"]
        caches["offers"].clear()


@given(asked=st.lists(st.integers(1, 14), max_size=60))
@hypothesis_settings(max_examples=25)
def test_the_cache_keeps_the_ten_last_used_results(asked: list[int]) -> None:
    """Against a list of what was used, the latest first."""
    latest: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        clock = Clock(patched)
        backend = Backend.objects.create(name=f"b{time.monotonic_ns()}", kind="aws")
        for cpus in asked:
            clock.pass_s(11)
            question = catalog._Lookup(backend, Requirements(cpu_min=cpus), None)
            slot = question._slot()
            latest = [cpus, *(other for other in latest if other != cpus)][:10]
            assert slot is not None
            assert slot < 10
        digests = {catalog._Lookup(backend, Requirements(cpu_min=cpus), None).digest for cpus in latest}
        assert set(Result.objects.filter(backend=backend).values_list("digest", flat=True)) == digests


def test_reading_a_result_protects_it_from_eviction(plain: Backend, cloud: Cloud, clock: Clock) -> None:
    """Reading writes nothing at once: that it was used is written every ten seconds at most, with the counts."""
    names(plain)
    for cpus in range(2, 15):
        clock.pass_s(4)
        names(plain, Requirements(cpu_min=cpus))
        names(plain)
        counts.flush()
    assert Result.objects.count() == 10
    other_process()
    names(plain)
    assert cloud.asked.count("offers 1") == 1


@pytest.mark.django_db(transaction=True)
def test_the_bound_holds_under_concurrent_requests(plain: Backend, cloud: Cloud) -> None:
    numbers = iter(range(1, 41))
    found = at_once(20, lambda: [names(plain, Requirements(cpu_min=next(numbers))) for _ in range(2)])
    assert found == [[["worker"], ["worker"]]] * 20
    assert Result.objects.count() == 10
    assert sorted(Result.objects.values_list("slot", flat=True)) == list(range(10))


@pytest.mark.django_db(transaction=True)
def test_twenty_concurrent_requests_make_one_call(plain: Backend, cloud: Cloud) -> None:
    def ask() -> list[str]:
        return [offer.instance_type for offer in catalog.CachedDriver(plain, wait_s=60).offers(ANY)]

    cloud.during = lambda: eventually(lambda: counted(plain).get("misses") == 20, every=0.02)
    assert at_once(20, ask) == [["worker"]] * 20
    assert cloud.asked == ["offers 1"]
    assert counted(plain) == {"misses": 20, "uncached": 20, "calls": 1, "coalesced": 19}
    assert sum(row.uncached - row.calls for row in CacheCount.objects.all()) == 19


@pytest.mark.django_db(transaction=True)
def test_during_a_refresh_other_callers_get_the_last_known_offers(plain: Backend, cloud: Cloud, clock: Clock) -> None:
    assert names(plain) == ["worker"]
    clock.pass_s(60)
    served = threading.Semaphore(0)
    cloud.answer, cloud.during = OTHER, lambda: [served.acquire(timeout=20) for _ in range(4)]

    def ask() -> list[str]:
        answer = names(plain)
        served.release()
        return answer

    assert at_once(5, ask) == [["worker"]] * 4 + [["other"]]
    assert counted(plain)["stale_served"] == 4


@pytest.mark.django_db(transaction=True)
def test_without_cached_offers_other_callers_wait_for_the_refresh_and_then_fail(plain: Backend, cloud: Cloud) -> None:
    cloud.takes_s = 1.5
    leader = threading.Thread(target=lambda: at_once(1, lambda: names(plain)))
    leader.start()
    while not cloud.asked:
        time.sleep(0.01)
    for wait_s in (0.0, 0.3):
        began = time.monotonic()
        with pytest.raises(catalog.NothingKnown):
            catalog.CachedDriver(plain, wait_s=wait_s).offers(ANY)
        assert wait_s <= time.monotonic() - began
        assert leader.is_alive()
    leader.join()
    assert names(plain) == ["worker"]
    assert single_flight.WAIT_S == 2


def test_hits_misses_and_refreshes_are_counted(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    cloud.says[SPOT] = SourceFailed("throttled", until=None)
    refresh_all(backend, cloud)
    for _ in range(3):
        names(backend)
    assert counted(backend) == {
        "calls": 3, "failures": 1, "throttles": 1, "misses": 1, "hits": 2, "uncached": 6,
    }  # fmt: skip
    clock.pass_s(600)
    for _ in range(2):
        names(backend)
    assert counted(backend)["stale_served"] == 2


def test_both_regions_are_joined_whatever_the_order(backend: Backend, cloud: Cloud) -> None:
    sources.refresh(backend, TYPES_US)
    assert names(backend) == ["p4d"]
    sources.refresh(backend, TYPES)
    assert names(backend) == ["g5", "g6", "p4d"]
