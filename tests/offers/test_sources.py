"""What is known of a cloud's sources: how long it counts, and what lands."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.core.cache import caches
from django.db.models import F
from django.utils import timezone

from dstackweb.backends.contract import SourceFailed, SourceState
from dstackweb.backends.models import Backend
from dstackweb.lib.models import Lease
from dstackweb.offers import source_rows, sources, store
from dstackweb.offers.models import SourceRow
from tests.offers.cloud_stub import SPOT, TYPES, TYPES_US, Clock, Cloud, read

pytestmark = pytest.mark.django_db
FRESH, STALE, FAILED = SourceState.FRESH, SourceState.STALE, SourceState.FAILED


def other_process() -> None:
    """Begin as a process that keeps nothing yet."""
    sources.forget()


def test_reading_a_source_that_was_never_fetched_fails_without_a_call(backend: Backend, cloud: Cloud) -> None:
    assert read(backend, TYPES).state is FAILED
    assert cloud.asked == []


def test_a_stored_result_is_fresh_for_every_process_until_it_expires_and_then_stale(
    backend: Backend, cloud: Cloud, clock: Clock
) -> None:
    landed = sources.refresh(backend, TYPES)
    assert (landed.state, landed.value, landed.fetched_at) == (FRESH, ["g5", "g6"], clock.now)
    other_process()
    clock.pass_s(599)
    assert read(backend, TYPES).state is FRESH
    assert sources.refresh(backend, TYPES).state is FRESH
    assert cloud.asked == ["types eu"]
    clock.pass_s(1)
    assert (read(backend, TYPES).state, read(backend, TYPES).value) == (STALE, ["g5", "g6"])


def test_a_failure_is_reported_with_the_last_good_value_and_is_never_cached(
    backend: Backend, cloud: Cloud, clock: Clock
) -> None:
    sources.refresh(backend, TYPES)
    had_at = clock.now
    cloud.says[TYPES] = SourceFailed("access_denied", action="ec2:DescribeInstanceTypes")
    clock.pass_s(600)
    reading = sources.refresh(backend, TYPES)
    assert (reading.state, reading.value, reading.fetched_at) == (STALE, ["g5", "g6"], had_at)
    assert reading.error == {"code": "access_denied", "action": "ec2:DescribeInstanceTypes"}
    cloud.says[TYPES] = ["g7"]
    clock.pass_s(source_rows.RETRY_S)
    reading = sources.refresh(backend, TYPES)
    assert (reading.state, reading.value, reading.error) == (FRESH, ["g7"], None)


def test_an_unexpected_error_is_reported_as_failed_and_not_raised(backend: Backend, cloud: Cloud) -> None:
    cloud.says[TYPES] = ZeroDivisionError("oops")
    reading = sources.refresh(backend, TYPES)
    assert (reading.state, reading.error) == (FAILED, {"code": "service_error", "text": "ZeroDivisionError: oops"})


def test_a_failed_source_is_retried_with_exponential_backoff(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    cloud.says[TYPES] = SourceFailed("unreachable", endpoint="ec2")
    waits = []
    for _ in range(7):
        sources.refresh(backend, TYPES)
        row = SourceRow.objects.get()
        until = source_rows.retry_at(row)
        assert until is not None
        waits.append((until - clock.now).total_seconds())
        asked = len(cloud.asked)
        sources.refresh(backend, TYPES)
        assert len(cloud.asked) == asked
        clock.pass_s(waits[-1])
    assert waits == [10, 20, 40, 80, 160, 300, 300]


def test_a_throttled_source_is_not_fetched_before_its_retry_time(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    cloud.says[TYPES] = SourceFailed("throttled", until=clock.now + dt.timedelta(seconds=33))
    sources.refresh(backend, TYPES)
    clock.pass_s(32)
    sources.refresh(backend, TYPES)
    assert len(cloud.asked) == 1
    clock.pass_s(1)
    sources.refresh(backend, TYPES)
    assert len(cloud.asked) == 2
    cloud.says[TYPES] = SourceFailed("throttled", until="some day")
    clock.pass_s(33)
    sources.refresh(backend, TYPES)
    sources.refresh(backend, TYPES)
    assert len(cloud.asked) == 3


def test_an_empty_result_is_fresh_for_ten_seconds(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    cloud.says[TYPES] = []
    assert (sources.refresh(backend, TYPES).state, read(backend, TYPES).value) == (FRESH, [])
    cloud.says[TYPES] = ["g5"]
    clock.pass_s(9)
    assert sources.refresh(backend, TYPES).value == []
    clock.pass_s(1)
    assert sources.refresh(backend, TYPES).value == ["g5"]


def test_a_result_of_an_older_configuration_is_not_stored(backend: Backend, cloud: Cloud) -> None:
    cloud.during = lambda: Backend.objects.update(version=F("version") + 1)
    assert sources.refresh(backend, TYPES).state is FAILED
    backend.refresh_from_db()
    assert read(backend, TYPES).state is FAILED
    cloud.says[TYPES] = ["new"]
    assert sources.refresh(backend, TYPES).value == ["new"]


def test_a_failure_of_an_older_configuration_is_not_stored(backend: Backend, cloud: Cloud) -> None:
    cloud.says[TYPES] = SourceFailed("bad_credentials")
    cloud.during = lambda: Backend.objects.update(version=F("version") + 1)
    sources.refresh(backend, TYPES)
    backend.refresh_from_db()
    assert read(backend, TYPES).error is None


def test_a_changed_configuration_serves_nothing_of_the_one_before(backend: Backend, cloud: Cloud) -> None:
    sources.refresh(backend, TYPES)
    Backend.objects.update(version=F("version") + 1, config={"families": ["p5"]})
    backend.refresh_from_db()
    assert read(backend, TYPES).state is FAILED
    cloud.says[TYPES] = SourceFailed("bad_credentials")
    reading = sources.refresh(backend, TYPES)
    assert (reading.state, reading.value, reading.error) == (FAILED, None, {"code": "bad_credentials"})


def test_a_refresh_asked_for_during_a_call_follows_it_and_the_calls_result_counts_meanwhile(
    backend: Backend, cloud: Cloud, clock: Clock
) -> None:
    sources.refresh(backend, TYPES)
    clock.pass_s(600)
    cloud.says[TYPES] = ["of before"]
    cloud.during = lambda: sources.refresh_now(backend)
    assert sources.refresh(backend, TYPES).value == ["of before"]
    backend.refresh_from_db()
    age, *_ = [age for age in source_rows.of_backends(sources.sourced_backends(), clock.now) if age.source == "types"]
    assert age.requested
    cloud.says[TYPES] = ["of after"]
    clock.pass_s(source_rows.REFRESH_EVERY_S)
    assert sources.refresh(backend, TYPES).value == ["of after"]
    assert len(cloud.asked) == 3


def test_refreshes_by_hand_in_quick_succession_cost_a_call_every_two_seconds(
    backend: Backend, cloud: Cloud, clock: Clock
) -> None:
    sources.refresh(backend, TYPES)
    clock.pass_s(100)
    for _ in range(40):
        sources.refresh_now(backend)
        sources.refresh(backend, TYPES)
        clock.pass_s(0.25)
    assert len(cloud.asked) == 1 + 5


def test_a_manual_refresh_fetches_fresh_sources_again(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    sources.refresh(backend, TYPES)
    clock.pass_s(source_rows.REFRESH_EVERY_S)
    sources.refresh_now(backend)
    backend.refresh_from_db()
    assert sources.refresh(backend, TYPES).state is FRESH
    assert cloud.asked == ["types eu"] * 2


def test_a_value_is_fresh_by_its_age_alone_though_a_later_refresh_failed(
    backend: Backend, cloud: Cloud, clock: Clock
) -> None:
    sources.refresh(backend, TYPES)
    cloud.says[TYPES] = SourceFailed("unreachable", endpoint="ec2")
    clock.pass_s(500)
    reading = sources.refresh(backend, TYPES, share=0.8)
    assert (reading.state, reading.error) == (FRESH, {"code": "unreachable", "endpoint": "ec2"})
    clock.pass_s(100)
    assert read(backend, TYPES).state is STALE


def test_a_changed_choice_serves_the_old_value_as_stale_until_the_new_one_is_there(
    backend: Backend, cloud: Cloud, clock: Clock
) -> None:
    sources.refresh(backend, TYPES)
    backend.config, backend.version = {"sizes": ["large"]}, backend.version + 1
    backend.save()
    assert (read(backend, TYPES).state, read(backend, TYPES).value) == (STALE, ["g5", "g6"])
    cloud.says[TYPES] = SourceFailed("unreachable", endpoint="ec2")
    assert (sources.refresh(backend, TYPES).state, read(backend, TYPES).value) == (STALE, ["g5", "g6"])
    cloud.says[TYPES] = ["g7"]
    clock.pass_s(source_rows.RETRY_S)
    assert (sources.refresh(backend, TYPES).state, read(backend, TYPES).value) == (FRESH, ["g7"])


def test_a_call_without_an_answer_for_ten_seconds_shows_as_such(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    seen = []

    def wait() -> None:
        for seconds in (10, 1):
            clock.pass_s(seconds)
            seen.append(read(backend, TYPES))

    cloud.during = wait
    sources.refresh(backend, TYPES)
    assert [(reading.state, (reading.error or {}).get("code")) for reading in seen] == [
        (FAILED, None),
        (FAILED, "no_answer"),
    ]
    assert read(backend, TYPES).error is None


def test_a_manual_refresh_retries_failed_sources_at_once_but_not_throttled_ones(
    backend: Backend, cloud: Cloud, clock: Clock
) -> None:
    cloud.says[TYPES] = SourceFailed("access_denied", action="ec2:DescribeInstanceTypes")
    cloud.says[SPOT] = SourceFailed("throttled", until=clock.now + dt.timedelta(seconds=100))
    for key in (TYPES, SPOT):
        sources.refresh(backend, key)
    cloud.says |= {TYPES: ["g5"], SPOT: {"g5": "1"}}
    clock.pass_s(source_rows.REFRESH_EVERY_S)
    sources.refresh_now(backend)
    assert sources.refresh(backend, TYPES).state is FRESH
    assert sources.refresh(backend, SPOT).state is FAILED
    assert cloud.asked == ["types eu", "spot eu", "types eu"]


def test_a_result_stored_during_a_read_is_not_taken_for_a_lost_one(
    backend: Backend, cloud: Cloud, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources.refresh(backend, TYPES)
    before = source_rows.rows_of(backend)
    clock.pass_s(600)
    cloud.says[TYPES] = ["new"]
    sources.refresh(backend, TYPES)
    other_process()
    with monkeypatch.context() as patched:
        patched.setattr(source_rows, "rows_of", lambda _: before)
        assert (read(backend, TYPES).state, read(backend, TYPES).value) == (FRESH, ["new"])


def test_a_leader_that_lost_its_lease_does_not_store_its_result(backend: Backend, cloud: Cloud) -> None:
    cloud.during = lambda: Lease.objects.update(holder="somebody else")
    assert sources.refresh(backend, TYPES).state is FAILED
    assert not SourceRow.objects.exclude(stamp="").exists()


def test_a_result_for_a_deleted_backend_is_not_stored_and_its_sources_are_unknown(
    backend: Backend, cloud: Cloud
) -> None:
    sources.refresh(backend, SPOT)
    cloud.during = lambda: Backend.objects.get().delete()
    assert sources.refresh(backend, TYPES).state is FAILED
    assert read(backend, SPOT).state is FAILED
    assert sources.refresh(backend, SPOT).error == {"code": "deleted"}
    assert not SourceRow.objects.exists()


def test_an_emptied_cache_is_refilled_and_serves_no_old_values(backend: Backend, cloud: Cloud) -> None:
    sources.refresh(backend, TYPES)
    caches["offers"].clear()
    other_process()
    cloud.says[TYPES] = ["new"]
    assert read(backend, TYPES).state is FAILED
    assert sources.refresh(backend, TYPES).value == ["new"]


def test_an_unreadable_entry_counts_as_a_miss(backend: Backend, cloud: Cloud) -> None:
    sources.refresh(backend, TYPES)
    (name,) = source_rows.objects_of(backend.pk)
    for garbage in ("text", {"another": ["old"]}, [1, 2, 3]):
        store.put(name, garbage, Any, 60)
        other_process()
        assert read(backend, TYPES).state is FAILED
        cloud.says[TYPES] = [str(garbage)]
        assert sources.refresh(backend, TYPES).value == [str(garbage)]
        (name,) = source_rows.objects_of(backend.pk)


def test_an_answer_of_another_type_is_a_failure_and_the_last_good_value_stays(
    backend: Backend, cloud: Cloud, clock: Clock
) -> None:
    sources.refresh(backend, TYPES)
    cloud.says[TYPES] = {"not": "a list"}
    clock.pass_s(600)
    reading = sources.refresh(Backend.objects.get(), TYPES)
    assert (reading.state, reading.value) == (STALE, ["g5", "g6"])
    assert reading.error is not None
    assert reading.error["code"] == "service_error"


def test_one_region_that_fails_leaves_the_others(backend: Backend, cloud: Cloud) -> None:
    cloud.says[TYPES] = SourceFailed("region_disabled", region="eu")
    for key in (TYPES, TYPES_US):
        sources.refresh(backend, key)
    assert (read(backend, TYPES).state, read(backend, TYPES_US).state) == (FAILED, FRESH)


def test_a_clock_set_back_keeps_no_source_fresh_forever(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    clock.pass_s(86400)
    sources.refresh(backend, TYPES)
    cloud.says[SPOT] = SourceFailed("unreachable")
    sources.refresh(backend, SPOT)
    cloud.says |= {TYPES: ["new"], SPOT: {"g5": "1"}}
    clock.pass_s(-86400)
    assert read(backend, TYPES).state is STALE
    assert sources.refresh(backend, TYPES).value == ["new"]
    assert sources.refresh(backend, SPOT).state is FRESH
    assert read(backend, TYPES).state is FRESH


def test_pages_show_the_age_of_each_source_and_its_next_refresh(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    sources.refresh(backend, TYPES)
    had_at = clock.now
    cloud.says[TYPES_US] = SourceFailed("access_denied", action="ec2:DescribeInstanceTypes")
    sources.refresh(backend, TYPES_US)
    spot, eu, us = source_rows.of_backends(sources.sourced_backends(), clock.now)
    assert (spot.source, spot.region, spot.state, spot.due_at) == ("spot", "eu", FAILED, None)
    assert (eu.state, eu.fetched_at, eu.due_at) == (FRESH, had_at, had_at + dt.timedelta(seconds=480))
    assert eu.expires_at == had_at + dt.timedelta(seconds=600)
    assert (us.state, us.fetched_at, us.failed_at) == (FAILED, None, had_at)
    assert us.error == {"code": "access_denied", "action": "ec2:DescribeInstanceTypes"}
    assert us.due_at == had_at + dt.timedelta(seconds=10)


def test_that_a_source_is_used_is_written_every_ten_seconds_at_most(backend: Backend, clock: Clock) -> None:
    sources.refresh(backend, TYPES)
    read(backend, TYPES)
    noted = clock.now
    clock.pass_s(10)
    read(backend, TYPES)
    assert SourceRow.objects.get().used_at == noted
    clock.pass_s(1)
    read(backend, TYPES)
    assert SourceRow.objects.get().used_at == timezone.now()


def test_only_settings_that_a_source_depends_on_outdate_it(backend: Backend, cloud: Cloud) -> None:
    """`types` of the stub depends on `families`, `spot` on all settings."""
    for key in (TYPES, SPOT):
        sources.refresh(backend, key)
    settings = {"regions": ["eu"], "families": ["g5"], "disk_gb": 50}
    Backend.objects.update(config=settings, version=2)
    changed = Backend.objects.get()
    assert (read(changed, TYPES).state, read(changed, SPOT).state) == (FAILED, FAILED)
    for key in (TYPES, SPOT):
        sources.refresh(changed, key)
    Backend.objects.update(config={**settings, "disk_gb": 60}, version=3)
    bigger = Backend.objects.get()
    assert (read(bigger, TYPES).state, read(bigger, SPOT).state) == (FRESH, FAILED)
    Backend.objects.update(secret="another", version=4)
    assert read(Backend.objects.get(), TYPES).state is FAILED


def test_a_source_shows_since_when_it_is_being_fetched(backend: Backend, cloud: Cloud, clock: Clock) -> None:
    def asked_at() -> dt.datetime | None:
        [found] = [
            age for age in source_rows.of_backends(sources.sourced_backends(), clock.now) if age.source == "spot"
        ]
        return found.asked_at

    seen: list[dt.datetime | None] = []
    cloud.during = lambda: seen.append(asked_at())
    sources.refresh(backend, SPOT)
    assert (seen, asked_at()) == ([clock.now], None)
    clock.pass_s(100)
    cloud.says[SPOT] = SourceFailed("unreachable")
    cloud.during = lambda: seen.append(asked_at())
    sources.refresh(backend, SPOT)
    assert (seen[1], asked_at()) == (clock.now, None)


def test_a_call_that_was_lost_with_its_process_is_not_shown_for_ever(
    backend: Backend, cloud: Cloud, clock: Clock
) -> None:
    sources.refresh(backend, SPOT)
    SourceRow.objects.filter(source="spot").update(asked_at=clock.pass_s(60))
    ages = {age.source: age.asked_at for age in source_rows.of_backends(sources.sourced_backends(), clock.now)}
    assert ages["spot"] == clock.now
    ages = {age.source: age.asked_at for age in source_rows.of_backends(sources.sourced_backends(), clock.pass_s(600))}
    assert ages["spot"] is None
