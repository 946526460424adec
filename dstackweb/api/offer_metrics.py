"""What clouds, their cache and their machines come to, for Prometheus: a few rows each."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator

from django.db.models import Case, Count, Exists, F, OuterRef, Q, Value, When
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dstackweb.accounts.models import Project
from dstackweb.backends.aws.pressure import pressures
from dstackweb.backends.contract import SourceState
from dstackweb.backends.models import Instance, InstanceStatus
from dstackweb.offers import figures, freshness, sources
from dstackweb.runs import spend

COUNTED = {
    "hits": "Looks at offers answered from a kept result",
    "misses": "Looks for which there was no kept result",
    "coalesced": "Callers that would have asked, too, while somebody was at it",
    "calls": "Times that a cloud was asked for something",
    "failures": "Calls to a cloud that came to nothing",
    "throttles": "Failures because a cloud was asked too often",
    "stale_served": "Answers made of something older than it should be",
    "uncached": "Calls that the same answers would have cost without a cache",
}


class Clouds(Collector):
    """The figures at `now`. Counters begin anew at midnight UTC, which Prometheus takes for a restart."""

    def __init__(self, now: dt.datetime) -> None:
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """All metrics of clouds; none of them asks a cloud."""
        yield from self._cache()
        yield from self._sources()
        yield from self._apis()
        yield from self._machines()
        yield from self._money()

    def _cache(self) -> Iterator[Metric]:
        midnight = self._now.astimezone(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        totals = figures.totals(midnight)
        for name, told in COUNTED.items():
            counter = CounterMetricFamily(f"dstackweb_offers_{name}", told, labels=["backend"])
            for backend, found in totals.items():
                counter.add_metric([backend], getattr(found, name))
            yield counter
        saved = GaugeMetricFamily(
            "dstackweb_offers_calls_saved", "Calls that the cache has saved since midnight UTC", labels=["backend"]
        )
        for backend, found in totals.items():
            saved.add_metric([backend], found.saved)
        yield saved

    def _sources(self) -> Iterator[Metric]:
        labels = ["backend", "source", "region"]
        age = GaugeMetricFamily("dstackweb_source_age_seconds", "Age of what a cloud said last", labels=labels)
        state = GaugeMetricFamily(
            "dstackweb_source_state", "1 for the state that a source is in", labels=[*labels, "state"]
        )
        for found in freshness.of_backends(sources.sourced_backends(), self._now):
            names = [found.backend, found.source, found.region]
            if found.fetched_at is not None:
                age.add_metric(names, (self._now - found.fetched_at).total_seconds())
            for each in SourceState:
                state.add_metric([*names, each.value], float(found.state is each))
        yield age
        yield state

    def _apis(self) -> Iterator[Metric]:
        labels = ["api", "region"]
        left = GaugeMetricFamily(
            "dstackweb_api_calls_left", "Calls that may be made at once; below zero: that wait", labels=labels
        )
        most = GaugeMetricFamily("dstackweb_api_calls_at_once", "Calls that may be made at once at most", labels=labels)
        alone = GaugeMetricFamily(
            "dstackweb_api_left_alone_seconds", "For how long an API that throttled is not asked", labels=labels
        )
        for found in pressures(self._now):
            names = [found.api, found.region]
            left.add_metric(names, found.left)
            most.add_metric(names, found.burst)
            alone.add_metric(names, (found.open_until - self._now).total_seconds() if found.open_until else 0.0)
        yield left
        yield most
        yield alone

    def _machines(self) -> Iterator[Metric]:
        there = Instance.objects.exclude(status=InstanceStatus.GONE).order_by()
        counts = GaugeMetricFamily(
            "dstackweb_instances", "Machines of clouds that are not gone; idle: kept for another run",
            labels=["backend", "status"],
        )  # fmt: skip
        idle = When(status=InstanceStatus.RUNNING, holder=None, then=Value("idle"))
        state = Case(idle, default=F("status"))
        for backend, status, count in there.values_list("backend__name", state).annotate(Count("pk")):
            counts.add_metric([backend, status], count)
        yield counts

    def _money(self) -> Iterator[Metric]:
        spent = GaugeMetricFamily("dstackweb_spent_usd", "USD spent on clouds this month (UTC)", labels=["project"])
        budget = GaugeMetricFamily("dstackweb_budget_usd", "USD that may be spent in a month", labels=["project"])
        pays = Exists(Instance.objects.filter(project=OuterRef("pk")))
        for project in Project.objects.filter(Q(monthly_budget__isnull=False) | pays).order_by("name"):
            spent.add_metric([project.name], float(spend.spent_this_month(project.pk, self._now)))
            if project.monthly_budget is not None:
                budget.add_metric([project.name], float(project.monthly_budget))
        yield spent
        yield budget
