"""Passes beside brute force, which decides on every run one by one: no shape is skipped, nothing written in batches."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import User
from dstackweb.runs import attempts, services
from dstackweb.runs.codes import Reclaim
from dstackweb.runs.models import Job, Queue, Run
from dstackweb.runs.queue.queues import LIMITS
from dstackweb.runs.states import JOB_ACTIVE, Reason, RunStatus
from dstackweb.scheduler.cloud.backend_offers import OfferReader
from dstackweb.scheduler.models import Reservation
from dstackweb.scheduler.passes import loading, placement_pass, queue_scan
from dstackweb.scheduler.passes.loading import load_reservations
from dstackweb.scheduler.placement.displacing import Displacer
from dstackweb.scheduler.placement.hosts import HostPlacement
from dstackweb.scheduler.placement.limits import fair_share_key
from dstackweb.spec.effective import EffectiveSpec
from tests.factories import join, make_host, make_project, make_run, make_user
from tests.scheduler.placement.test_limits import feasible

Places = dict[int, list[tuple[int | None, tuple[str, ...]]]]
"""By run, where its nodes are: host and GPUs."""


def one_by_one() -> tuple[Places, set[int], set[int]]:
    """What a pass has to place now, for which runs capacity is reserved afterwards, and which runs it displaces.

    Turns are given per shape: the first run of one that waits is considered.
    """
    queues = {queue.pk: queue for queue in Queue.objects.select_related("project").order_by("pk")}
    capacity = loading.load_capacity(queues.values(), OfferReader(), timezone.now(), load_reservations())
    displacer, displaced = Displacer(capacity), set[int]()
    capacity.review_reservations()
    considered: set[tuple[int, str]] = set()
    held, placed = placement_pass._usage_by_project(), Places()
    waiting = {pk: list(Run.objects.filter(queue=pk, status="submitted").order_by("-rank", "-id")) for pk in queues}
    specs = {run.pk: EffectiveSpec.model_validate(run.spec) for runs in waiting.values() for run in runs}

    def whose_turn(queue_id: int) -> tuple[float, bool, int]:
        head, queue = waiting[queue_id][-1], queues[queue_id]
        gpus, project = specs[head.pk].requirements.gpu_count_min * specs[head.pk].nodes, queue.project
        mine = capacity.queue_usage.gpus[queue_id, None]
        borrows = bool(queue.cohort and queue.max_gpus is not None and gpus) and mine + gpus > queue.max_gpus
        return fair_share_key(held[project.pk], project.weight, gpus > 0, head.seniority_us, borrows=borrows)

    while open_ := [pk for pk, runs in waiting.items() if runs]:
        queue = queues[min(open_, key=whose_turn)]
        run = waiting[queue.pk].pop()
        view = loading.waiting_run(run, queue, specs[run.pk])
        outcome = capacity.decide(view)
        if isinstance(outcome, HostPlacement):
            placed[run.pk] = [(fit.host_id, fit.gpu_uuids) for fit in outcome.fits]
            capacity.take(view, outcome)
            held[queue.project_id] = held[queue.project_id].plus(
                gpus=sum(len(fit.gpu_uuids) for fit in outcome.fits), cpus=sum(fit.cpus for fit in outcome.fits)
            )
        elif (queue.pk, run.shape) not in considered:
            considered.add((queue.pk, run.shape))
            if victims := displacer.displace_for(view, run.priority, outcome):
                displaced |= {one.id for one in victims}
            else:
                capacity.reserve_for(view, outcome)
    return placed, set(capacity.turns.kept), displaced


def deployment(rnd: random.Random, *, lends: bool) -> None:
    """Two projects with three queues each, of different steps and limits, two members of both, and some hosts.

    With `lends`, the queues of a project are a cohort, in which they lend and take back, and hosts have GPUs for that.
    """
    for number in range(rnd.randint(1, 3)):
        gpus = rnd.randint(2, 4) if lends else rnd.randint(0, 4)
        make_host(f"box-{number}", cpus=rnd.randint(2, 8) + gpus, gpus=gpus)
    users = [make_user(name) for name in ("ada", "bob")]
    for project in (make_project("main"), make_project("lab", weight=rnd.randint(2, 3))):
        for user in users:
            join(project, user)
        for name in ("default", "night", "day"):
            settings: dict[str, Any] = {name: rnd.choice([None, None, None, rnd.randint(0, 5)]) for name in LIMITS}
            settings |= {"preempt_points": rnd.choice([None, None, 1])}
            if lends:
                settings |= dict.fromkeys(LIMITS) | {"cohort": "team", "max_gpus": rnd.randint(0, 3)}
                settings |= {"lend_gpus": rnd.choice([None, None, 1]), "borrow_gpus": rnd.choice([None, None, 1])}
                settings |= {"reclaim": rnd.choice(list(Reclaim))}
            queue = services.ensure_queue(project, name)
            Queue.objects.filter(pk=queue.pk).update(ageing_minutes=rnd.choice([None, 1, 30]), **settings)


def submit(rnd: random.Random, *, lends: bool) -> None:
    """A run of one of few shapes, which may have waited long; with `lends` small, and often of the first queue."""
    found = list(Queue.objects.select_related("project").order_by("pk"))
    queue = found[0] if lends and rnd.random() < 0.4 else rnd.choice(found)
    user = rnd.choice(list(User.objects.order_by("pk")))
    run = make_run(
        queue.project, user, queue=queue.name, priority=rnd.choice([0, 50, 80]), nodes=rnd.choice([1, 1, 2]),
        resources={"cpu": 1 if lends else rnd.randint(1, 4), "gpu": rnd.choice([1, 1, 2] if lends else [0, 1, 2, 4])},
        max_duration=rnd.choice(["1m", "1h", "off"]), preemptible=rnd.random() < 0.7,
    )  # fmt: skip
    since = timezone.now() - dt.timedelta(minutes=rnd.choice([0, 0, 0, 20] if lends else [0, 20]))
    Run.objects.filter(pk=run.pk).update(queued_at=since)


def end_some(rnd: random.Random) -> None:
    """All that is placed runs by then: what is displaced stops, and makes no room within the pass."""
    for job in Job.objects.filter(status__in=JOB_ACTIVE):
        attempts.claim_job(job.pk, "runner", "here")
        attempts.start_job(job.pk)
        if rnd.random() < 0.4:
            attempts.end_job(job.pk, Reason.DONE_BY_RUNNER, exit_code=0)


def nothing_is_lent_twice() -> None:
    """The queues of a cohort hold no more together than their limits, and each no more than it may borrow."""
    for project in Queue.objects.exclude(cohort="").values_list("project", flat=True).distinct():
        team = list(Queue.objects.filter(project=project).exclude(cohort=""))
        held = {queue.pk: loading.usage_of(queue).gpus[queue.pk, None] for queue in team}
        assert feasible({queue.pk: loading.limits_of(queue) for queue in team}, held)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("seed", "lends"),
    [
        *((seed, False) for seed in range(3)),
        *((seed, True) for seed in (21, 26)),  # queues that lend, and one that takes back
        *(pytest.param(seed, False, marks=pytest.mark.nightly) for seed in range(3, 10)),
        *(pytest.param(seed, True, marks=pytest.mark.nightly) for seed in (0, 27)),
    ],
)
def test_a_pass_places_reserves_and_displaces_the_same_as_deciding_run_by_run(
    seed: int, lends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rnd = random.Random(seed)
    monkeypatch.setattr(queue_scan, "BATCH", rnd.choice([1, 2, 50]))
    monkeypatch.setattr(placement_pass, "MAX_WRITTEN", rnd.choice([1, 2, 50]))
    deployment(rnd, lends=lends)
    for _ in range(4):
        for _ in range(rnd.randint(2, 10)):
            submit(rnd, lends=lends)
        expected, reserved_for, displaced = one_by_one()
        stopped = set(Run.objects.filter(status=RunStatus.TERMINATING).values_list("pk", flat=True))
        waited = set(Run.objects.filter(status=RunStatus.SUBMITTED).values_list("pk", flat=True))
        placement_pass.run_passes()
        placed = Places()
        for job in Job.objects.filter(run__in=waited).order_by("node"):
            placed.setdefault(job.run_id, []).append((job.host_id, tuple(job.gpus)))
        assert placed == expected
        assert set(Reservation.kept().values_list("run", flat=True)) == reserved_for
        stopping = set(Run.objects.filter(status=RunStatus.TERMINATING).values_list("pk", flat=True))
        assert stopping - stopped == displaced
        nothing_is_lent_twice()
        end_some(rnd)
