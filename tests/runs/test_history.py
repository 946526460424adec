"""The history of queues: what is counted per hour, and what pages and the API show of it."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import threading
from collections.abc import Sequence
from zoneinfo import ZoneInfo

import pytest
from django.db import connection, transaction
from django.utils import timezone
from hypothesis import given, strategies as st

from dstackweb.accounts.models import Project, User
from dstackweb.runs import history, services, wait_stats
from dstackweb.runs.history import HistoryRange, hour_of, span_starts
from dstackweb.runs.models import Queue, QueueHour, QueueSlot, Run
from dstackweb.runs.recount import differences
from dstackweb.runs.wait_stats import (
    BUCKETS,
    WaitStats,
    add_up,
    band_limits,
    band_of,
    bucket_of,
    bucket_span,
    join_spans,
    percentile,
)
from tests.factories import make_host, make_run, place_all

NOW = dt.datetime(2026, 11, 21, 14, 30, tzinfo=dt.UTC)
HOUR = dt.timedelta(hours=1)
WEEK, MONTH = HistoryRange(NOW, 7, hourly=True), HistoryRange(NOW, 30, hourly=False)
waits = st.one_of(st.integers(0, 4000), st.integers(0, 400_000))


def tally_of(seconds: Sequence[int], *, length: int | None = None) -> WaitStats:
    """The tally of these waits."""
    counts = [0] * len(BUCKETS)
    for waited in seconds:
        counts[bucket_of(waited)] += 1
    return WaitStats(
        placed=len(seconds), wait_s=sum(seconds), longest_s=max(seconds, default=0), counts=tuple(counts),
        lengths=length or 0, sampled=int(length is not None), length_max=length,
    )  # fmt: skip


def nearest_rank(seconds: Sequence[int], share: float) -> int:
    """The exact percentile, by its definition."""
    return sorted(seconds)[max(1, math.ceil(share * len(seconds) - 1e-9)) - 1]


@given(st.lists(waits, min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.01, 1.0]))
def test_an_estimated_percentile_lies_in_the_bucket_of_the_exact_one(seconds: list[int], share: float) -> None:
    tally = tally_of(seconds)
    exact = nearest_rank(seconds, share)
    low, high = bucket_span(bucket_of(exact), tally.longest_s)
    assert low <= exact <= high
    result = percentile(tally.counts, tally.longest_s, share)
    assert result is not None
    assert low <= result <= high


@given(st.lists(waits, min_size=1, max_size=60))
def test_percentiles_rise_and_end_at_the_longest_wait(seconds: list[int]) -> None:
    tally = tally_of(seconds)
    result = [percentile(tally.counts, tally.longest_s, share / 20) for share in range(1, 21)]
    assert result == sorted(result, key=lambda wait: wait or 0)
    assert result[-1] == max(seconds)


def test_no_placement_has_no_wait_rather_than_a_wait_of_nothing() -> None:
    assert (WaitStats().median_s, WaitStats().p90_s, WaitStats().length, WaitStats().length_max) == (
        None,
        None,
        None,
        None,
    )
    assert tally_of([0]).median_s == 0
    assert wait_stats.numbers(WaitStats())["wait_max_s"] is None


@given(st.lists(st.lists(waits, max_size=5), max_size=5))
def test_summed_spans_equal_one_count_of_everything(spans: list[list[int]]) -> None:
    whole = join_spans(tally_of(seconds) for seconds in spans)
    assert whole == tally_of([waited for seconds in spans for waited in seconds])
    assert add_up(tally_of(seconds) for seconds in spans) == whole


def test_lines_of_bands_add_up_and_lines_of_hours_are_averaged() -> None:
    hours = [(tally_of([], length=4), tally_of([], length=2)), (tally_of([], length=0), tally_of([], length=0))]
    both = join_spans(add_up(bands) for bands in hours)
    assert (both.length, both.length_max) == (3, 6)
    assert join_spans([both, WaitStats()]).length == 3  # an hour in which nobody looked says nothing


@given(st.integers(0, 100))
def test_every_priority_is_in_the_band_whose_limits_hold_it(priority: int) -> None:
    low, high = band_limits(band_of(priority))
    assert low <= priority <= high


@given(st.integers(1, 90), st.datetimes(dt.datetime(2025, 1, 1), dt.datetime(2027, 12, 31)))
def test_spans_follow_each_other_up_to_now_in_every_zone(days: int, naive: dt.datetime) -> None:
    now = naive.replace(tzinfo=dt.UTC)
    for zone in (dt.UTC, ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kolkata"), ZoneInfo("America/St_Johns")):
        times = span_starts(days, now, zone, hourly=days <= 7)
        assert times == sorted(set(times))
        assert times[-1] <= now
        if days <= 7:
            assert {later - at for at, later in itertools.pairwise(times)} <= {HOUR}
            assert now - times[-1] < HOUR
            assert (
                0 <= (now.astimezone(zone).date() - times[0].astimezone(zone).date()).days <= days
            )  # an hour over midnight
            assert days * 24 - 24 <= len(times) <= days * 24 + 1
        else:
            assert len(times) == days
            assert all((at.astimezone(zone).hour, at.astimezone(zone).minute) == (0, 0) for at in times)
            assert now.astimezone(zone).date() == times[-1].astimezone(zone).date()


def test_a_day_of_a_change_of_clocks_has_25_hours() -> None:
    zone = ZoneInfo("Europe/Berlin")
    times = span_starts(8, dt.datetime(2026, 10, 27, 12, tzinfo=dt.UTC), zone, hourly=False)
    assert [b - a for a, b in itertools.pairwise(times)].count(25 * HOUR) == 1


def waiting(project: Project, user: User, *, priority: int = 50, since: dt.datetime = NOW, queue: str = "") -> Run:
    """A run as placements are counted: never saved anywhere else."""
    found = services.ensure_queue(project, queue or "default")
    return Run(project=project, queue=found, user=user, priority=priority, queued_at=since)


def row(project: Project, band: int = 2, hour: dt.datetime = NOW) -> QueueHour:
    return QueueHour.objects.get(queue__project=project, queue__name="default", band=band, hour=hour_of(hour))


pytestmark = pytest.mark.django_db


def test_placements_are_counted_by_hour_and_band_with_their_waits(project: Project, member: User) -> None:
    runs = [waiting(project, member, since=NOW - dt.timedelta(seconds=s)) for s in (5, 60, 61, 90_000)]
    history.count_placed([*runs, waiting(project, member, priority=80)], NOW)
    history.count_placed([waiting(project, member, since=NOW - dt.timedelta(seconds=7))], NOW)
    kept = row(project)
    assert (kept.placed, kept.wait_s, kept.wait_max_s) == (5, 90_133, 90_000)
    assert (kept.waited_1m, kept.waited_5m, kept.waited_longer) == (3, 1, 1)
    assert row(project, band=3).placed == 1
    assert QueueHour.objects.count() == 2


def test_a_clock_that_was_put_back_makes_no_negative_wait(project: Project, member: User) -> None:
    history.count_placed([waiting(project, member, since=NOW + HOUR)], NOW)
    assert (row(project).wait_s, row(project).waited_1m) == (0, 1)


def test_a_pass_counts_placed_runs_with_their_wait_since_they_entered_the_queue(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, priority=30)
    Run.objects.filter(pk=run.pk).update(queued_at=timezone.now() - dt.timedelta(minutes=10))
    assert place_all() == 1
    kept = QueueHour.objects.get()
    assert (kept.band, kept.placed, kept.waited_15m) == (1, 1, 1)
    assert 600 <= kept.wait_s < 660
    assert list(differences()) == []


def test_a_recount_names_the_hour_that_was_counted_wrong(project: Project, member: User) -> None:
    make_host()
    make_run(project, member)
    place_all()
    QueueHour.objects.update(placed=3, waited_1m=2)
    result = [str(difference) for difference in differences()]
    hour = QueueHour.objects.get().hour
    assert result[0] == f"placed in main in the hour of {hour:%Y-%m-%d %H:%M} UTC: kept 3, counted 1"
    assert "kept 2, counted 3" in result[1]


def test_the_length_of_every_queue_is_sampled_even_when_it_is_empty(project: Project, member: User) -> None:
    for priority in (10, 50, 50):
        make_run(project, member, priority=priority)
    night = services.ensure_queue(project, "night")
    history.sample_lengths(NOW)
    Run.objects.update(status="done")
    history.sample_lengths(NOW + dt.timedelta(minutes=5))
    kept = list(QueueHour.objects.filter(queue__name="default").order_by("band").values_list("length", "length_max"))
    assert kept == [(0, 1), (0, 0), (0, 2), (0, 0)]
    assert set(night.queuehours.values_list("length", "length_max")) == {(0, 0)}
    history.count_placed([waiting(project, member)], NOW)
    assert QueueHour.objects.count() == 8


def test_sampling_takes_the_same_few_statements_for_any_number_of_queues(
    project: Project, django_assert_num_queries
) -> None:
    history.sample_lengths(NOW)
    for number in range(5):
        services.ensure_queue(project, f"q{number}")
    with django_assert_num_queries(6 + (2 if connection.in_atomic_block else 0)):
        history.sample_lengths(NOW)


def test_the_last_two_hours_are_kept_by_five_minutes_too(project: Project, member: User) -> None:
    for minutes, waited in ((130, 9), (50, 60), (49, 61), (1, 5)):
        at = NOW - dt.timedelta(minutes=minutes)
        history.count_placed([waiting(project, member, since=at - dt.timedelta(seconds=waited))], at)
    make_run(project, member)
    history.sample_lengths(NOW)
    history.sample_lengths(NOW + dt.timedelta(minutes=2))
    kept = QueueSlot.objects.filter(band=2).order_by("at").values_list("at", "placed", "wait_s", "length", "length_max")
    assert [(f"{at:%H:%M}", *numbers) for at, *numbers in kept] == [
        ("13:40", 2, 121, None, None),
        ("14:25", 1, 5, None, None),
        ("14:30", 0, 0, 1, 1),
    ]
    assert QueueHour.objects.filter(band=2).count() == 3


def test_the_last_hour_is_shown_by_five_minutes(project: Project, member: User) -> None:
    now = NOW + dt.timedelta(minutes=2)
    for minutes in (70, 58, 4, 0):
        history.count_placed([waiting(project, member)], now - dt.timedelta(minutes=minutes))
    past = history.series(services.ensure_queue(project), HistoryRange(now, 1, hourly=True, in_slots=True))
    assert (past.view.step, len(past.times), past.times[0], past.times[-1]) == ("minutes", 13, NOW - HOUR, NOW)
    assert [tally.placed for tally in past.all] == [1, *[0] * 10, 1, 1]
    whole, _each = history.overview(project, past.view)
    assert whole.all == past.all


def test_hours_are_removed_after_ninety_days(project: Project, member: User) -> None:
    for days in (0, 89, 91):
        at = NOW - dt.timedelta(days=days)
        history.count_placed([waiting(project, member, since=at)], at)
    history.old_hours(NOW).delete()
    assert sorted((NOW - kept.hour).days for kept in QueueHour.objects.all()) == [0, 89]


def test_a_week_is_shown_by_the_hour_with_gaps(project: Project, member: User) -> None:
    history.count_placed([waiting(project, member, since=NOW - 2 * HOUR)], NOW - HOUR)
    queue = Queue.objects.get()
    result = history.series(queue, WEEK)
    band = result.columns()["bands"][2]
    assert (len(result.times), result.columns()["step"], result.empty) == (6 * 24 + 15, "hour", False)
    assert (band["low"], band["high"]) == (50, 74)
    assert band["placed"][-3:] == [0, 1, 0]
    assert band["wait_median_s"][-3:] == [None, 3600, None]
    assert band["length"][-3:] == [None, None, None]
    assert result.since(result.today).placed == 1
    assert result.since(result.today, band=0).placed == 0


def test_a_month_is_shown_by_days_of_the_readers_zone(project: Project, member: User) -> None:
    late = dt.datetime(2026, 11, 20, 23, 30, tzinfo=dt.UTC)  # half past midnight of the 21st in Berlin
    history.count_placed([waiting(project, member, since=late)], late)
    assert [t.placed for t in history.overview(project, MONTH)[0].all][-2:] == [1, 0]
    berlin = history.overview(project, HistoryRange(NOW, 30, hourly=False, zone=ZoneInfo("Europe/Berlin")))[0]
    assert [t.placed for t in berlin.all][-2:] == [0, 1]
    assert berlin.columns()["zone"] == "Europe/Berlin"


def test_older_hours_and_other_projects_are_left_out(project: Project, member: User) -> None:
    from tests.factories import make_project

    other = make_project("other")
    history.count_placed([waiting(other, member)], NOW)
    history.count_placed([waiting(project, member)], NOW - dt.timedelta(days=8))
    assert history.overview(project, WEEK)[0].empty
    assert not history.overview(project, MONTH)[0].empty


def test_a_projects_history_is_the_sum_of_its_queues(project: Project, member: User) -> None:
    history.count_placed([waiting(project, member), waiting(project, member, queue="night")], NOW)
    for name in ("default", "night"):
        make_run(project, member, queue=name)
    history.sample_lengths(NOW)
    whole, each = history.overview(project, WEEK)
    assert (whole.all[-1].placed, whole.all[-1].length, whole.all[-1].length_max) == (2, 2, 2)
    assert [(queue.name, result.all[-1].placed) for queue, result in each] == [("default", 1), ("night", 1)]


@pytest.mark.django_db(transaction=True)
def test_counts_are_exact_under_concurrent_placing_and_sampling(project: Project, member: User) -> None:
    """The row is missing at first, so that the makers race as well."""
    bands = [[waiting(project, member, priority=p, since=NOW - dt.timedelta(seconds=p)) for p in (10, 80)]] * 2
    bands[1] = bands[0][::-1]  # the other way round: rows are still taken in one order
    faults: list[BaseException] = []

    def place(runs: list[Run]) -> None:
        try:
            for _ in range(10):
                with transaction.atomic():
                    history.count_placed(runs, NOW)
                history.sample_lengths(NOW)
        except BaseException as fault:
            faults.append(fault)
        finally:
            connection.close()

    threads = [threading.Thread(target=place, args=(bands[number % 2],)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    kept = QueueHour.objects.filter(placed__gt=0).order_by("band")
    assert list(kept.values_list("band", "placed", "wait_s", "waited_1m", "waited_5m")) == [
        (0, 60, 600, 60, 0),
        (3, 60, 4800, 0, 60),
    ]
