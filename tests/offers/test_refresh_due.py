"""The periodic refresh: what is asked for before it grows old, and what is left alone."""

from __future__ import annotations

import threading
import time

import pytest
from django.conf import settings

from dstackweb.backends import registry
from dstackweb.backends.contract import SourceFailed, SourceKey, SourceState
from dstackweb.backends.models import Backend
from dstackweb.offers import source_rows, sources
from dstackweb.offers.models import SourceRow
from dstackweb.scheduler.management.commands import up
from dstackweb.scheduler.models import PassRequest, PeriodicJob
from dstackweb.scheduler.processes import tasks
from tests.offers.cloud_stub import SPOT, TYPES, TYPES_US, Clock, Cloud, read

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long; what a tick begins is waited for here."""
    monkeypatch.setattr(sources, "TICK_S", 30.0)


def due(clock: Clock, cloud: Cloud) -> list[str]:
    """What a tick asks for now."""
    before = len(cloud.asked)
    sources.refresh_due(clock.now)
    return sorted(cloud.asked[before:])


def test_sources_that_were_never_fetched_are_all_due_at_once(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    assert due(clock, cloud) == ["spot eu", "types eu", "types us"]
    assert read(backend, SPOT).state is SourceState.FRESH
    assert due(clock, cloud) == []


def test_used_sources_are_refreshed_before_they_expire_and_unused_ones_are_not(
    backend: Backend, cloud: Cloud, clock: Clock
) -> None:
    due(clock, cloud)
    read(backend, SPOT)
    clock.pass_s(47)
    assert due(clock, cloud) == []
    clock.pass_s(1)
    assert due(clock, cloud) == ["spot eu"]
    clock.pass_s(3600 - 48)
    assert due(clock, cloud) == ["spot eu"]
    clock.pass_s(61)
    assert due(clock, cloud) == []
    read(backend, SPOT)
    assert due(clock, cloud) == ["spot eu"]


def test_at_startup_stale_sources_are_refreshed_even_if_unused_and_fresh_ones_are_not(
    backend: Backend, cloud: Cloud, clock: Clock
) -> None:
    due(clock, cloud)
    clock.pass_s(12 * 3600)
    assert due(clock, cloud) == []
    sources.preload(clock.now)
    assert due(clock, cloud) == ["spot eu", "types eu", "types us"]
    sources.preload(clock.now)
    assert due(clock, cloud) == []
    clock.pass_s(300)
    sources.preload(clock.now)
    assert due(clock, cloud) == ["spot eu"]


def test_a_server_that_starts_preloads(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    due(clock, cloud)
    clock.pass_s(7200)
    assert due(clock, cloud) == []
    up.prepare()
    assert due(clock, cloud) == ["spot eu", "types eu", "types us"]


def test_a_manual_refresh_fetches_all_sources_whether_used_or_not(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    due(clock, cloud)
    clock.pass_s(source_rows.REFRESH_EVERY_S)
    sources.refresh_now(backend)
    assert due(clock, cloud) == ["spot eu", "types eu", "types us"]
    assert due(clock, cloud) == []


def test_sources_are_fetched_concurrently_in_at_most_eight_threads(
    backend: Backend, cloud: Cloud, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.says = {SourceKey("types", f"region-{number:02}"): ["g5"] for number in range(12)}
    now, most, lock, all_in = [0], [0], threading.Lock(), threading.Event()
    ask = cloud.ask

    def watched(what: str, answer: object) -> object:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == 8:
                all_in.set()
        all_in.wait(30)
        time.sleep(0.05)  # A ninth thread would come in here.
        try:
            return ask(what, answer)
        finally:
            with lock:
                now[0] -= 1

    monkeypatch.setattr(cloud, "ask", watched)
    assert len(due(clock, cloud)) == 12
    assert most == [8]


def test_a_slow_source_does_not_delay_others_and_is_not_fetched_twice(
    backend: Backend, cloud: Cloud, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "TICK_S", 0.1)
    cloud.says = {TYPES: ["g5"]}
    answered = threading.Event()
    cloud.during = lambda: answered.wait(60)
    for _ in range(3):
        sources.refresh_due(clock.now)
    assert not sources._refreshes[backend.pk, TYPES].done()
    answered.set()
    sources._refreshes[backend.pk, TYPES].result(60)
    assert cloud.asked == ["types eu"]
    assert read(backend, TYPES).state is SourceState.FRESH


def test_a_failed_source_does_not_block_the_others(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    cloud.says[TYPES] = SourceFailed("throttled")
    due(clock, cloud)
    assert read(backend, TYPES_US).state is SourceState.FRESH
    clock.pass_s(10)
    assert due(clock, cloud) == ["types eu"]
    clock.pass_s(19)
    assert due(clock, cloud) == []
    clock.pass_s(1)
    assert due(clock, cloud) == ["types eu"]


def test_sources_no_longer_configured_are_deleted(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    due(clock, cloud)
    del cloud.says[TYPES_US]
    due(clock, cloud)
    assert set(SourceRow.objects.values_list("source", "region")) == {TYPES, SPOT}


def test_a_disabled_or_misconfigured_backend_is_not_refreshed(
    backend: Backend, cloud: Cloud, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    Backend.objects.update(enabled=False)
    assert due(clock, cloud) == []
    Backend.objects.update(enabled=True)

    def broken(_: Backend) -> None:
        raise ValueError("no such region")

    with monkeypatch.context() as patched:
        patched.setattr(registry, "driver", broken)
        assert due(clock, cloud) == []
    with monkeypatch.context() as patched:
        patched.setattr(registry.KINDS["aws"].driver_class, "wanted", broken)
        assert due(clock, cloud) == []
    assert len(due(clock, cloud)) == 3


def test_a_stored_result_requests_a_scheduling_pass(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    due(clock, cloud)
    assert PassRequest.is_waiting()


def test_ticks_are_enqueued_only_if_a_cloud_is_configured(
    cloud: Cloud, db: None, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    enqueued: list[str] = []
    monkeypatch.setattr(tasks, "enqueue", lambda *args, **kwargs: enqueued.append(kwargs["cluster"]))
    jobs = [job for job in tasks.control_jobs() if job.name == "offers"]
    tasks.ensure_rows(jobs)
    assert tasks.enqueue_due(jobs, clock.now) == 0
    Backend.objects.create(name="cluster", kind="plain")
    assert tasks.enqueue_due(jobs, clock.pass_s(5)) == 0
    off = Backend.objects.create(name="cloud", kind="aws", enabled=False)
    assert tasks.enqueue_due(jobs, clock.pass_s(5)) == 0
    Backend.objects.filter(pk=off.pk).update(enabled=True)
    assert tasks.enqueue_due(jobs, clock.now) == 0
    assert tasks.enqueue_due(jobs, clock.pass_s(5)) == 1
    assert enqueued == [settings.DSTACKWEB_CLUSTERS["cloud"]]
    assert PeriodicJob.objects.get().outstanding_until is not None


def test_a_manual_refresh_is_enqueued_at_once(backend: Backend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    enqueued: list[tuple[object, str]] = []
    monkeypatch.setattr(tasks, "enqueue", lambda task, cluster: enqueued.append((task, cluster)))
    sources.refresh_now(backend)
    assert enqueued == [(tasks.refresh_offers, settings.DSTACKWEB_CLUSTERS["cloud"])]
    assert cloud.asked == []
