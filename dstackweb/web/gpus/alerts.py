"""Marks of runs whose GPUs are not used enough: in lists, and for their owner on every page."""

from __future__ import annotations

import datetime as dt
import hashlib
import time
from collections.abc import Collection
from dataclasses import dataclass

from django.db.models import F
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.gpus.clock import to_ms
from dstackweb.gpus.models import GpuSeries
from dstackweb.gpus.policy.policy_status import Standing, standings
from dstackweb.gpus.policy.window import Kind
from dstackweb.runs import selectors
from dstackweb.runs.models import Run
from dstackweb.runs.states import PLACED, JobStatus, RunStatus
from dstackweb.wording import policy as policy_words

STAMP_S = 3
BANNERS = 5


@dataclass(frozen=True)
class Mark:
    """How one run stands with its policy, with which of its GPUs that is about in words."""

    run: Run
    standing: Standing
    subject: str

    @classmethod
    def of(cls, run: Run, standing: Standing) -> Mark:
        """The mark of a run that has a policy."""
        return cls(run, standing, subject(standing, run.spec.get("nodes", 1)))

    @property
    def stops(self) -> bool:
        """Whether the end of the window ends the run; otherwise it is only told."""
        return stops(self.standing)

    @property
    def ahead(self) -> bool:
        """Whether the window is not over yet."""
        return self.standing.verdict.kind == Kind.KEEP


def stops(standing: Standing) -> bool:
    """Whether the policy is one that stops."""
    return standing.policy.action == "terminate" and not standing.observe_only


def subject(standing: Standing, nodes: int) -> str:
    """Which GPUs are low, to begin a sentence with."""
    text = policy_words.subject(standing.gpu_index, standing.node, nodes)
    return text[:1].upper() + text[1:]


def marks(runs: Collection[Run], now: dt.datetime) -> dict[int, Mark]:
    """Those of these runs that have been below their minimum for at least half of its window, by id."""
    placed = [run for run in runs if run.status in PLACED]
    found = standings(placed, now)
    return {run.pk: Mark.of(run, found[run.pk]) for run in placed if run.pk in found and found[run.pk].badge}


def list_version(project: Project) -> str:
    """As `selectors.list_version`; it changes with the marks, too, which come and go with time and not by events."""
    return f"{selectors.list_version(project)}.{_stamp(project)}"


def _stamp(project: Project) -> str:
    """Which stretches are long enough for a mark. Each process looks every few seconds, however often it is asked."""
    until, stamp = _stamps.get(project.pk, (0.0, ""))
    if time.monotonic() >= until:
        stamp = _marked(project)
        _stamps[project.pk] = time.monotonic() + STAMP_S, stamp
    return stamp


_stamps: dict[int, tuple[float, str]] = {}
"""By project: until when (monotonic) its stamp is good, and the stamp."""


def _marked(project: Project) -> str:
    now_ms = to_ms(timezone.now())
    low = GpuSeries.objects.filter(
        job__status=JobStatus.RUNNING,
        job__run__project=project,
        job__policy__min_gpu_utilization__isnull=False,
        low_since_ms__lte=now_ms - 500 * F("job__policy__time_window_s"),
    )
    marked = sorted(low.values_list("pk", "low_since_ms"))
    return hashlib.sha256(repr(marked).encode()).hexdigest()[:8] if marked else "0"


def banners(user: User, project: Project, now: dt.datetime) -> list[Mark]:
    """The user's own runs that are about to be stopped, or told of: those that they were told about already."""
    told = Run.objects.filter(
        user=user, project=project, status=RunStatus.RUNNING, jobs__policy__noticed_ms__isnull=False
    )
    runs = list(told.distinct().order_by("pk")[:BANNERS])
    found = marks(runs, now) if runs else {}
    return [mark for mark in found.values() if mark.standing.noticed]
