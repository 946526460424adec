"""Alerts for runs with underutilized GPUs: in lists, and for their owner on every page."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Collection
from dataclasses import dataclass

from django.db.models import F
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.gpus.models import GpuSeries
from dstackweb.gpus.policy_status import PolicyStatus, policy_statuses
from dstackweb.gpus.window import VerdictKind
from dstackweb.lib.times import to_ms
from dstackweb.runs import selectors
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import PLACED, JobStatus, RunStatus
from dstackweb.spec.codes import UtilizationAction
from dstackweb.web.common.pages import fingerprint
from dstackweb.wording import policy as policy_words
from dstackweb.wording.sentence import capitalized

STAMP_S = 3
BANNERS = 5


@dataclass(frozen=True)
class Alert:
    """The policy status of a run."""

    run: Run
    status: PolicyStatus

    @property
    def subject(self) -> str:
        """The low GPUs, as the start of a sentence."""
        text = policy_words.subject(self.status.gpu_index, self.status.node, self.run.spec.get("nodes", 1))
        return capitalized(text)

    @property
    def stops(self) -> bool:
        """Whether the run is stopped at the end of the window; otherwise it is only reported."""
        return self.status.policy.action == UtilizationAction.TERMINATE and not self.status.observe_only

    @property
    def ahead(self) -> bool:
        """Whether the window is still running."""
        return self.status.verdict.kind == VerdictKind.KEEP


def alerts(runs: Collection[Run], now: dt.datetime) -> dict[int, Alert]:
    """Alerts by run ID, for runs that have been below their minimum for at least half of their window."""
    placed = [run for run in runs if run.status in PLACED]
    found = policy_statuses(placed, now)
    return {run.pk: Alert(run, found[run.pk]) for run in placed if run.pk in found and found[run.pk].badge}


def list_version(project: Project) -> str:
    """As `selectors.list_version`, and it also changes with the alerts, which appear with time and not by events."""
    return f"{selectors.list_version(project)}.{_stamp(project)}"


def _stamp(project: Project) -> str:
    """A hash of the low stretches that are long enough for an alert, computed at most every STAMP_S per process."""
    until, stamp = _stamps.get(project.pk, (0.0, ""))
    if time.monotonic() >= until:
        stamp = _hash_of_low_stretches(project)
        _stamps[project.pk] = time.monotonic() + STAMP_S, stamp
    return stamp


_stamps: dict[int, tuple[float, str]] = {}
"""By project: when its stamp expires (monotonic), and the stamp."""


def forget() -> None:
    _stamps.clear()


def _hash_of_low_stretches(project: Project) -> str:
    now_ms = to_ms(timezone.now())
    low = GpuSeries.objects.filter(
        job__status=JobStatus.RUNNING,
        job__run__project=project,
        job__policy__min_gpu_utilization__isnull=False,
        low_since_ms__lte=now_ms - 500 * F("job__policy__time_window_s"),
    )
    stretches = sorted(low.values_list("pk", "low_since_ms"))
    return fingerprint(stretches) if stretches else "0"


def banners(user: User, project: Project, now: dt.datetime) -> list[Alert]:
    """The user's own runs for which a notice was sent."""
    noticed = Job.objects.filter(status=JobStatus.RUNNING, policy__noticed_ms__isnull=False)
    own = noticed.filter(run__user=user, run__project=project, run__status=RunStatus.RUNNING)
    pks = list(own.values_list("run", flat=True).order_by("run").distinct()[:BANNERS])
    found = alerts(Run.objects.filter(pk__in=pks).order_by("pk"), now) if pks else {}
    return [alert for alert in found.values() if alert.status.noticed]
