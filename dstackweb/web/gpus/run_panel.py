"""The GPUs of one run: their current values, their history, and the run's policy status."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Max
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.gpus import exemptions, selectors
from dstackweb.gpus.binding import policy_of
from dstackweb.gpus.models import GpuSeries, HostSampling, PolicyExemption, PolicyStop
from dstackweb.gpus.policy_status import PolicyStatus, policy_status
from dstackweb.gpus.selectors import Columns, is_fresh, throttle_reasons
from dstackweb.gpus.window import VerdictKind
from dstackweb.lib.forms import whole_number
from dstackweb.lib.times import to_moment, to_ms
from dstackweb.profiles import services as profiles
from dstackweb.runs import selectors as runs
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import ENDED, RunStatus
from dstackweb.web.common.pages import PageRequest, done_here, fingerprint, polled, project_action, project_page
from dstackweb.web.gpus import alerts, chart as gpu_chart
from dstackweb.web.runs import details, rows as lists
from dstackweb.wording import policy as policy_words, units

EXEMPTIONS_SHOWN = 5
COLOURS, DASHES = 8, 4
"""As in static/run-gpus.css and static/js/gpu-charts.js."""
RANGES = {
    "1h": dt.timedelta(hours=1),
    "6h": dt.timedelta(hours=6),
    "24h": dt.timedelta(hours=24),
    "30d": dt.timedelta(days=30),
}
POLL_S = {"1h": 15, "6h": 15, "24h": 30, "30d": 30}
"""Seconds between polls: a longer chart costs more and changes less with each sample. That of an hour is also renewed
with each sample, by what the run's own polls say."""


def has_gpu_charts(run: Run) -> bool:
    """Whether a run's page shows GPU charts: it requests GPUs."""
    return bool(run.spec["requirements"]["gpu_count_min"])


def newest_sample(run: Run) -> str:
    """What changes with each sample of the GPUs of its newest attempt."""
    series = GpuSeries.objects.filter(job__run=run, job__attempt=run.attempt)
    return str(series.aggregate(newest=Max("last_ms"))["newest"])


@dataclass(frozen=True)
class PanelFilters:
    """What the query string selects: the time range, the node, and charts or a table."""

    back: str
    node: int | None
    as_table: bool

    @classmethod
    def of(cls, request: HttpRequest) -> PanelFilters:
        node = whole_number(request.GET["node"]) if "node" in request.GET else None
        return cls(request.GET.get("range", ""), node, request.GET.get("as") == "table")

    def query(self, **changed: Any) -> str:
        values = {"range": self.back, "node": self.node, "as": "table" if self.as_table else ""} | changed
        return "?" + "&".join(f"{key}={value}" for key, value in values.items() if value not in ("", None))


@dataclass(frozen=True)
class RunGpu:
    """One GPU's newest sample, with its line in the charts."""

    series: GpuSeries
    place: int
    fresh: bool

    @property
    def at(self) -> dt.datetime | None:
        return None if self.series.last_ms is None else to_moment(self.series.last_ms)

    @property
    def throttle_reasons(self) -> list[str]:
        reasons = throttle_reasons(self.series.throttle) if self.fresh else ()
        return [policy_words.throttled(reason) for reason in reasons]

    @property
    def colour(self) -> int:
        return self.place % COLOURS

    @property
    def dash(self) -> int:
        return self.place // 2 % DASHES

    @property
    def memory_percent(self) -> float | None:
        used, size = self.series.memory_used_mib, self.series.memory_mib
        return None if used is None or not size else min(100.0, 100 * used / size)


class Panel:
    """The GPU panel of one run; `version` changes with everything it shows."""

    def __init__(self, run: Run, jobs: Sequence[Job], filters: PanelFilters, now: dt.datetime) -> None:
        self.run, self.filters, self.now = run, filters, now
        self.jobs = [job for job in jobs if job.attempt == run.attempt and job.gpus]
        self.status: PolicyStatus | None = policy_status(run, now)
        # The selected node; by default the one that the policy status is about, else the first.
        low_node = self.status.node if self.status and self.status.low_since else 0
        node = filters.node if filters.node is not None else low_node
        self.job = next((job for job in self.jobs if job.node == node), self.jobs[0] if self.jobs else None)
        self.series = list(GpuSeries.objects.filter(job=self.job).order_by("index", "uuid")) if self.job else []

    @property
    def version(self) -> str:
        status = self.status
        series = [(one.uuid, one.last_ms, self._fresh(one)) for one in self.series]
        judged = (
            status.policy, status.verdict, status.badge, status.noticed, status.paused_until, status.exemptions_left,
            status.observe_only,
        ) if status else None  # fmt: skip
        return f"{self.run.pk}.{fingerprint(self.run.version, self.filters, series, judged)}"

    def _fresh(self, series: GpuSeries) -> bool:
        return is_fresh(series, to_ms(self.now))

    @property
    def over(self) -> bool:
        return self.run.status in ENDED

    @property
    def back(self) -> str:
        """The time range: the selected one, else an hour, or longer where the policy's window needs it."""
        if self.filters.back in RANGES:
            return self.filters.back
        policy = self.status.policy if self.status else None
        least = dt.timedelta(seconds=policy.time_window_s * 1.2 if policy else 0)
        return next((key for key, span in RANGES.items() if span >= least), "30d")

    @property
    def span(self) -> tuple[dt.datetime, dt.datetime]:
        """Start and end of the charts; for an ended run, up to its end."""
        assert self.job is not None
        until = self.job.ended_at or self.now
        since = max(until - RANGES[self.back], self.job.started_at or self.job.placed_at)
        return min(since, until - dt.timedelta(minutes=1)), until

    @property
    def minimum(self) -> int | None:
        """The policy's minimum utilization in percent, also for an ended run."""
        policy = policy_of(self.run)
        return policy.min_gpu_utilization if policy else None

    def _low(self) -> tuple[int, int] | None:
        """The shaded stretch: the node's current low stretch, or the one that the run was stopped for."""
        status, job = self.status, self.job
        if status and status.low_since and job and job.node == status.node:
            return to_ms(status.low_since), to_ms(self.now)
        if job is None or not self.over:
            return None
        stop = PolicyStop.objects.filter(run=self.run, attempt=job.attempt, node=job.node, observed=False).first()
        return (to_ms(stop.low_since), to_ms(stop.at)) if stop else None

    def _columns(self, points: int) -> list[Columns]:
        since, until = self.span
        return selectors.columns(self.series, to_ms(since), to_ms(until) + 1, points)

    def chart(self) -> dict[str, Any]:
        return gpu_chart.chart_data(self._columns(gpu_chart.POINTS), *self.span, self.minimum, self._low())

    def rows(self) -> list[gpu_chart.SampleRow]:
        return gpu_chart.table_rows(self._columns(gpu_chart.ROWS))

    def context(self, may_change: bool) -> dict[str, Any]:
        status = self.status
        lines = [RunGpu(one, place, self._fresh(one)) for place, one in enumerate(self.series)]
        return {
            "panel": self,
            "gpus_version": self.version,
            "gpus_url": reverse("web:run-gpus", args=[self.run.project.name, self.run.uid]) + self.filters.query(),
            "gpus_poll_s": POLL_S[self.back],
            "gpu_lines": lines,
            "gpu_trouble": self._trouble(),
            "ranges": [
                (units.chart_range(long), self.filters.query(range=key), key == self.back)
                for key, long in RANGES.items()
            ],
            "nodes": [(job.node, self.filters.query(node=job.node), job is self.job) for job in self.jobs],
            "as_chart": self.filters.query(**{"as": ""}),
            "as_table": self.filters.query(**{"as": "table"}),
            "policy": self._policy(may_change) if status else None,
        }

    def _trouble(self) -> HostSampling | None:
        """The host's sampling error, where it explains missing samples of this run's GPUs."""
        if self.over or self.job is None or self.job.host_id is None:
            return None
        found = HostSampling.objects.filter(host=self.job.host_id).first()
        if found is None or not found.library:
            return found
        missing = len(self.series) < len(self.job.gpus) or not all(self._fresh(one) for one in self.series)
        return found if found.error and missing else None

    def _policy(self, may_change: bool) -> dict[str, Any]:
        status = self.status
        assert status is not None
        rules = exemptions.policies_of(self.run.project)
        alert = alerts.Alert(self.run, status)
        return {
            "status": status,
            "alert": alert,
            "rule": policy_words.rule(status.policy),
            "source": _source(status.source, self.run),
            "low_s": self._low_s(),
            "window_s": status.policy.time_window_s,
            "unknown": status.verdict.kind == VerdictKind.UNKNOWN,
            "starting": self.run.status == RunStatus.PROVISIONING,
            "ending": self.run.status == RunStatus.TERMINATING,
            "stops": alert.stops,
            "may_keep": may_change
            and alert.stops
            and self.run.status != RunStatus.TERMINATING
            and status.exemptions_left > 0
            and not status.paused_until,
            "exemption_minutes": rules.exemption_minutes,
            "max_exemptions": rules.max_exemptions,
            "exemptions": list(
                PolicyExemption.objects.filter(run=self.run).select_related("by").order_by("-id")[:EXEMPTIONS_SHOWN]
            ),
        }

    def _low_s(self) -> float:
        """Seconds of the window that have passed."""
        status = self.status
        if status is None or status.verdict.stops_ms is None:
            return 0
        left_s = status.verdict.stops_ms / 1000 - self.now.timestamp()
        return round(min(max(0.0, status.policy.time_window_s - left_s), status.policy.time_window_s), 1)


def _source(provenance: dict[str, Any], run: Run) -> tuple[str, str]:
    named = provenance.get("profile") if provenance.get("source") == "profile" else None
    profile = profiles.named(run.project, named) if named else None
    url = reverse("web:profiles", args=[run.project.name]) + f"#profile-{profile.pk}" if profile else "#run-settings"
    return details.origin(provenance), url


@project_page()
def run_gpus(request: PageRequest, run: str) -> HttpResponse:
    """The polled panel; opened directly, it redirects to the run's page."""
    found, filters = runs.find_run(request.project, run), PanelFilters.of(request)
    if not request.htmx:
        return redirect(reverse("web:run", args=[request.project.name, run]) + filters.query() + "#run-gpus")
    panel = Panel(found, runs.jobs_of(found), filters, timezone.now())

    def context() -> dict[str, Any]:
        return {"run": found, **panel.context(lists.may_change(found, request.user, request.role))}

    return polled(request, "gpus/run_gpus.html", "gpus/run_gpus.html", panel.version, context)


@project_action("member")
def keep(request: PageRequest, run: str) -> HttpResponse:
    """Keep a run from being stopped by its policy, for the project's usual time."""
    found = runs.find_run(request.project, run)
    exemption = exemptions.exempt(found, request.user, request.role, request.POST.get("reason", ""))
    text = _("%(run)s will not be stopped for %(duration)s") % {
        "run": found.name,
        "duration": units.duration((exemption.until - exemption.at).total_seconds()),
    }
    return done_here(request, text, "web:run", request.project.name, run)
