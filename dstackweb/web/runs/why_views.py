"""Why a run waits: its position, what it comes from, and what a placement pass would decide now, per host and offer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.http import HttpResponse
from django.utils import timezone

from dstackweb.backends.hosts.fit import HOSTS, HostView
from dstackweb.backends.hosts.inventory import host_views
from dstackweb.runs import selectors, services
from dstackweb.runs.models import QueueCount, Run
from dstackweb.runs.queue.positions import RankFactors, rank_factors
from dstackweb.runs.row_fields import Starts
from dstackweb.runs.rows import starts_of
from dstackweb.runs.run_places import placement_summary
from dstackweb.runs.states import ENDED, WAITING, RunStatus
from dstackweb.scheduler.models import Reservation
from dstackweb.scheduler.passes.decision import Candidate, decide_now
from dstackweb.web.common.pages import PageRequest, polled, project_page
from dstackweb.web.queue import past_views
from dstackweb.web.runs import rows as lists
from dstackweb.wording import fair_share, places, queue as queue_words, starts, statuses, units, waiting
from dstackweb.wording.sentence import Label
from dstackweb.wording.units import duration

NEIGHBOURS = 3
"""Shown on each side."""
CELLS = 60
"""Up to this many waiting runs each have a cell of the strip; a longer queue is one bar."""
STRIP = 1200
GAP = 3
LEAST = 8
"""Minimum width of the run's own cell, in units of STRIP."""
FRESH_S = 10
"""How often the page is evaluated again though the queue is unchanged: hosts may have changed."""


class StripCell(NamedTuple):
    """A piece of the strip: `ahead`, `me` or `behind`; units of STRIP."""

    kind: str
    x: int
    width: int


@dataclass(frozen=True)
class PlaceInQueue:
    """Position of a waiting run among `total`, and its factors."""

    factors: RankFactors
    total: int
    reserved: Reservation | None
    starts: Starts
    basis: Label
    """What the estimate of its start rests on, or why there is none."""

    @property
    def position(self) -> int:
        return self.factors.position or 1

    @property
    def aged(self) -> float:
        """Points of priority gained by waiting, rounded."""
        return round(self.factors.aged_points, 1)

    @property
    def behind(self) -> str:
        """How far its member's share puts it behind."""
        return duration(self.factors.penalty_s)

    @property
    def share(self) -> str:
        """The numbers of that when it was queued."""
        return fair_share.penalty(self.factors.penalty_s, self.factors.penalty_basis)

    @property
    def cells(self) -> list[StripCell]:
        """The queue as a strip, its front at the left."""
        total = max(self.total, self.position)
        width = max(STRIP // total, LEAST)
        x = min((self.position - 1) * STRIP // total, STRIP - width)
        if total > CELLS:
            return [StripCell("ahead", 0, x), StripCell("behind", x, STRIP - x), StripCell("me", x, width)]
        kinds = ["ahead"] * (self.position - 1) + ["me"] + ["behind"] * (total - self.position)
        return [StripCell(kind, n * STRIP // total, width - GAP) for n, kind in enumerate(kinds)]


def place_in_queue(run: Run) -> PlaceInQueue | None:
    """A run's place in its queue; None unless it waits."""
    estimate, data = starts_of(run)
    if run.status != RunStatus.SUBMITTED or estimate is None:
        return None
    total = QueueCount.objects.values_list("submitted", flat=True).get(queue=run.queue_id)
    return PlaceInQueue(
        factors=rank_factors(run, timezone.now()),
        total=total,
        reserved=Reservation.kept().filter(run=run).first(),
        starts=estimate,
        basis=starts.basis(estimate.basis, data),
    )


class TriedLine(NamedTuple):
    """One tried host or offer in words; for a host, with its free resources."""

    tried: Candidate
    label: Label
    host: HostView | None
    gpus_free: int


@project_page()
def why_page(request: PageRequest, run: str) -> HttpResponse:
    """The decision on a run, evaluated now; polls get the fragment."""
    found = selectors.find_run(request.project, run)
    version = f"{found.pk}.{found.version}.{selectors.list_version(request.project)}.{time.time() // FRESH_S:.0f}"
    return polled(request, "runs/why.html", "runs/why_body.html", version, lambda: _why(request, found))


def _why(request: PageRequest, run: Run) -> dict[str, Any]:
    decision = decide_now(run)
    hosts = {host.name: host for host in host_views()}
    stands = place_in_queue(run)
    jobs = [] if run.status in WAITING else list(run.jobs.filter(attempt=run.attempt))
    return {
        "run": run,
        "past_url": past_views.address_of(run, jobs, decision.at),
        "needs": units.needs(run.spec),
        "stands": stands,
        "neighbours": _neighbours(run, stands.position) if stands else [],
        "decision": decision,
        "why": waiting.reason(decision.outcome, decision.data),
        "may_change": lists.may_change(run, request.user, request.role),
        "over": run.status in ENDED,
        "waits": run.status in WAITING,
        "etag": services.etag(run),
        "max_priority": lists.max_priority(request),
        "also": [waiting.reason(waits.reason, waits.data) for waits in decision.blockers[1:]],
        "starting": _starting(run),
        "displaces": queue_words.would_displace(decision),
        "work_budget": queue_words.budget_of_work(decision.work_budget, decision.at),
        "tried": [_tried(one, hosts) for one in decision.candidates],
    }


def _starting(run: Run) -> str:
    """Why a placed run has not started yet, where that is known."""
    if run.status != RunStatus.PROVISIONING:
        return ""
    place = placement_summary(run.jobs.filter(attempt=run.attempt).select_related("host", "backend").order_by("node"))
    return statuses.message(place.detail, place.message) if place else ""


def _tried(one: Candidate, hosts: Mapping[str, HostView]) -> TriedLine:
    host = hosts.get(one.where) if one.backend == HOSTS else None
    free = sum(gpu.free for gpu in host.gpus) if host else 0
    return TriedLine(one, places.tried(one.code, one.data), host, free)


def _neighbours(run: Run, position: int) -> list[tuple[int, Run]]:
    waiting = selectors.without_texts(selectors.in_order(run.queue)).select_related("user")
    ahead = waiting.filter(rank__lte=run.rank).exclude(rank=run.rank, pk__gte=run.pk).order_by("-rank", "-id")
    behind = waiting.filter(rank__gte=run.rank).exclude(rank=run.rank, pk__lte=run.pk)
    line = [*reversed(ahead[:NEIGHBOURS]), run, *behind[:NEIGHBOURS]]
    first = position - line.index(run)
    return list(enumerate(line, start=first))
