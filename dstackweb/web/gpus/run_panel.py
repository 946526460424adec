"""The GPUs of one run: how they are used now, how they were over time, and how the run stands with its policy."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.urls import reverse

from dstackweb.gpus.clock import to_moment, to_ms
from dstackweb.gpus.models import GpuSeries, HostSampling, Keep, PolicyStop
from dstackweb.gpus.policy.binding import policy_of
from dstackweb.gpus.policy.exemptions import policies_of
from dstackweb.gpus.policy.policy_status import Standing, standing
from dstackweb.gpus.policy.window import Kind
from dstackweb.gpus.samples import selectors
from dstackweb.gpus.samples.latest import held_back, is_fresh
from dstackweb.gpus.samples.selectors import Columns
from dstackweb.profiles import selectors as profiles
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import ENDED, RunStatus
from dstackweb.web.common.pages import whole_number
from dstackweb.web.gpus import alerts
from dstackweb.web.gpus import chart as gpu_chart
from dstackweb.web.runs import details
from dstackweb.wording import policy as policy_words

KEEPS_SHOWN = 5
COLOURS, DASHES = 8, 4
"""As in static/run-gpus.css and static/js/gpu-charts.js."""
RANGES = {
    "1h": dt.timedelta(hours=1),
    "6h": dt.timedelta(hours=6),
    "24h": dt.timedelta(hours=24),
    "30d": dt.timedelta(days=30),
}
POLL_S = {"1h": 5, "6h": 15, "24h": 30, "30d": 30}
"""How often it is asked for: the longer the chart, the more it costs, and the less a sample changes of it."""


def wanted(run: Run) -> bool:
    """Whether a run's page has charts of GPUs: it asks for some."""
    return bool(run.spec["requirements"]["gpu_count_min"])


@dataclass(frozen=True)
class Asked:
    """What the reader asked to see: how far back, of which node, and whether as a table."""

    back: str
    node: int | None
    as_table: bool

    @classmethod
    def of(cls, request: HttpRequest) -> Asked:
        """From the query string."""
        node = whole_number(request.GET["node"]) if "node" in request.GET else None
        return cls(request.GET.get("range", ""), node, request.GET.get("as") == "table")

    def query(self, **changed: Any) -> str:
        """The same with something else, as a query string."""
        values = {"range": self.back, "node": self.node, "as": "table" if self.as_table else ""} | changed
        return "?" + "&".join(f"{key}={value}" for key, value in values.items() if value not in ("", None))


@dataclass(frozen=True)
class RunGpu:
    """One GPU as it was seen last, with its line in the charts."""

    series: GpuSeries
    place: int
    fresh: bool

    @property
    def at(self) -> dt.datetime | None:
        """The moment of its newest sample."""
        return None if self.series.last_ms is None else to_moment(self.series.last_ms)

    @property
    def held_back(self) -> list[str]:
        """What holds its clocks down now, in words."""
        return policy_words.held_back(held_back(self.series.throttle)) if self.fresh else []

    @property
    def colour(self) -> int:
        """Which of the charts' colours it has."""
        return self.place % COLOURS

    @property
    def dash(self) -> int:
        """Which of their dashes."""
        return self.place // 2 % DASHES

    @property
    def memory_percent(self) -> float | None:
        """How much of its memory is used."""
        used, size = self.series.memory_used_mib, self.series.memory_mib
        return None if used is None or not size else min(100.0, 100 * used / size)


@dataclass(frozen=True)
class Source:
    """Where a policy comes from, in words and, if there is such a place, its address."""

    text: str
    url: str


class Panel:
    """What the panel shows of one run; `version` changes with all of it."""

    def __init__(self, run: Run, jobs: Sequence[Job], asked: Asked, now: dt.datetime) -> None:
        self.run, self.asked, self.now = run, asked, now
        self.jobs = [job for job in jobs if job.attempt == run.attempt and job.gpus]
        self.standing: Standing | None = standing(run, now)
        self.job = self._job()
        found = GpuSeries.objects.filter(job=self.job).order_by("index", "uuid") if self.job else ()
        self.series = list(found)

    def _job(self) -> Job | None:
        """The node asked for; else that which the policy speaks of, else the first."""
        speaks = self.standing.node if self.standing and self.standing.low_since else 0
        node = self.asked.node if self.asked.node is not None else speaks
        return next((job for job in self.jobs if job.node == node), self.jobs[0] if self.jobs else None)

    @property
    def version(self) -> str:
        """Read before the data."""
        told = self.standing
        parts: list[Any] = [self.run.version, self.asked, [(one.uuid, one.last_ms) for one in self.series]]
        if told:
            parts += [told.policy, told.verdict, told.badge, told.noticed, told.paused_until, told.keeps_left]
            parts += [told.observe_only]
        parts += [self._fresh(one) for one in self.series]
        return f"{self.run.pk}.{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"

    def _fresh(self, series: GpuSeries) -> bool:
        return is_fresh(series, to_ms(self.now))

    @property
    def over(self) -> bool:
        """Whether nothing of it changes any more."""
        return self.run.status in ENDED

    @property
    def back(self) -> str:
        """How far back it looks: what was asked for, else an hour, or as much more as the policy's window needs."""
        if self.asked.back in RANGES:
            return self.asked.back
        policy = self.standing.policy if self.standing else None
        least = dt.timedelta(seconds=policy.time_window_s * 1.2 if policy else 0)
        return next((key for key, span in RANGES.items() if span >= least), "30d")

    @property
    def span(self) -> tuple[dt.datetime, dt.datetime]:
        """From when to when; an ended run is shown as it was at its end."""
        assert self.job is not None
        until = self.job.ended_at or self.now
        since = max(until - RANGES[self.back], self.job.started_at or self.job.placed_at)
        return min(since, until - dt.timedelta(minutes=1)), until

    @property
    def minimum(self) -> int | None:
        """What the policy asks for, percent; of an ended run, what it asked for."""
        policy = policy_of(self.run)
        return policy.min_gpu_utilization if policy else None

    def _low(self) -> tuple[int, int] | None:
        """The stretch that is shaded: what the node's GPUs are low for now, or what the run was stopped for."""
        told, job = self.standing, self.job
        if told and told.low_since and job and job.node == told.node:
            return to_ms(told.low_since), to_ms(self.now)
        if job is None or not self.over:
            return None
        stop = PolicyStop.objects.filter(run=self.run, attempt=job.attempt, node=job.node, observed=False).first()
        return (to_ms(stop.low_since), to_ms(stop.at)) if stop else None

    def _columns(self, points: int) -> list[Columns]:
        """What was seen in the span."""
        since, until = self.span
        return selectors.columns(self.series, to_ms(since), to_ms(until) + 1, points)

    def chart(self) -> dict[str, Any]:
        """What gpu-charts.js draws."""
        return gpu_chart.drawn(self._columns(gpu_chart.POINTS), *self.span, self.minimum, self._low())

    def rows(self) -> list[gpu_chart.Row]:
        """The same as a table."""
        return gpu_chart.rows(self._columns(gpu_chart.ROWS))

    def context(self, may_change: bool) -> dict[str, Any]:
        """What its template shows."""
        told = self.standing
        lines = [RunGpu(one, place, self._fresh(one)) for place, one in enumerate(self.series)]
        return {
            "panel": self,
            "gpus_version": self.version,
            "gpus_url": reverse("web:run-gpus", args=[self.run.project.name, self.run.uid]) + self.asked.query(),
            "gpus_poll_s": POLL_S[self.back],
            "gpu_lines": lines,
            "gpu_trouble": self._trouble(),
            "ranges": [(key, self.asked.query(range=key), key == self.back) for key in RANGES],
            "nodes": [(job.node, self.asked.query(node=job.node), job is self.job) for job in self.jobs],
            "as_chart": self.asked.query(**{"as": ""}),
            "as_table": self.asked.query(**{"as": "table"}),
            "policy": self._policy(may_change) if told else None,
        }

    def _trouble(self) -> HostSampling | None:
        """Why GPUs of the node are not seen, as far as its host knows: another run's lost GPU is not its matter."""
        if self.over or self.job is None or self.job.host_id is None:
            return None
        found = HostSampling.objects.filter(host=self.job.host_id).first()
        if found is None or not found.library:
            return found
        missed = len(self.series) < len(self.job.gpus) or not all(self._fresh(one) for one in self.series)
        return found if found.error and missed else None

    def _policy(self, may_change: bool) -> dict[str, Any]:
        told = self.standing
        assert told is not None
        rules = policies_of(self.run.project)
        counts = alerts.stops(told)
        return {
            "standing": told,
            "mark": alerts.Mark.of(self.run, told),
            "rule": policy_words.rule(told.policy),
            "source": source(told.source, self.run),
            "low_s": self._low_s(),
            "window_s": told.policy.time_window_s,
            "unknown": told.verdict.kind == Kind.UNKNOWN,
            "starting": self.run.status == RunStatus.PROVISIONING,
            "ending": self.run.status == RunStatus.TERMINATING,
            "stops": counts,
            "may_keep": may_change
            and counts
            and self.run.status != RunStatus.TERMINATING
            and told.keeps_left > 0
            and not told.paused_until,
            "keep_minutes": rules.keep_minutes,
            "keeps_allowed": rules.keeps,
            "keeps": list(Keep.objects.filter(run=self.run).select_related("by").order_by("-id")[:KEEPS_SHOWN]),
        }

    def _low_s(self) -> float:
        """How much of the window has passed."""
        told = self.standing
        if told is None or told.verdict.stops_ms is None:
            return 0
        left_s = told.verdict.stops_ms / 1000 - self.now.timestamp()
        return round(min(max(0.0, told.policy.time_window_s - left_s), told.policy.time_window_s), 1)


def source(provenance: dict[str, Any], run: Run) -> Source:
    """Where a policy comes from."""
    text = details.origin(provenance)
    named = provenance.get("profile") if provenance.get("source") == "profile" else None
    profile = profiles.named(run.project, named) if named else None
    if profile is None:
        return Source(text, "#run-settings")
    return Source(text, reverse("web:profiles", args=[run.project.name]) + f"#profile-{profile.pk}")
