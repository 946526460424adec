"""What everybody does at once: submit, change, stop, place, watch, and play the runners."""

from __future__ import annotations

import datetime as dt
import os
import random
from dataclasses import dataclass
from typing import Any

from django.utils import timezone

from dstackweb.accounts.models import Membership, Project, User
from dstackweb.backends.hosts import inventory
from dstackweb.backends.models import Host
from dstackweb.lib.errors import Conflict, Stale
from dstackweb.runs import attempts, holds, services
from dstackweb.runs.models import Job, Run, RunEvent
from dstackweb.runs.states import ACTIVE, JOB_ACTIVE, PLACED, JobStatus, Reason, RunStatus
from dstackweb.scheduler import watch
from dstackweb.scheduler.models import PassState
from dstackweb.scheduler.passes import placement_pass
from dstackweb.scheduler.processes import retention
from tests.scheduler.stress.referee import one_of

MEMBERS, MANAGER = ("ada", "bob"), "boss"
QUEUES = ("default", "default", "night")


@dataclass(frozen=True)
class Actor:
    """Somebody with the role they have in a project."""

    project: Project
    user: User
    role: str


def member(rnd: random.Random) -> Actor:
    return _actor(rnd, rnd.choice(MEMBERS))


def manager(rnd: random.Random) -> Actor:
    return _actor(rnd, MANAGER)


def anybody(rnd: random.Random) -> Actor:
    return _actor(rnd, rnd.choice([*MEMBERS, MANAGER]))


def _actor(rnd: random.Random, name: str) -> Actor:
    seat = rnd.choice(list(Membership.objects.select_related("project", "user").filter(user__username=name)))
    return Actor(seat.project, seat.user, seat.role)


def loaded(pk: int) -> Run:
    """A run as people have it before them."""
    return Run.objects.select_related("queue", "project", "user").get(pk=pk)


def run_of(rnd: random.Random, who: Actor, *statuses: str) -> Run:
    """A run that they may change; Run.DoesNotExist when there is none."""
    runs = Run.objects.filter(project=who.project, status__in=statuses or ACTIVE)
    if who.role == "member":
        runs = runs.filter(user=who.user)
    if (pk := one_of(rnd, runs.values_list("pk", flat=True))) is None:
        raise Run.DoesNotExist
    return loaded(pk)


def submit(rnd: random.Random) -> None:
    """Few names and few keys, so that they collide."""
    who = member(rnd)
    config: dict[str, Any] = {
        "type": "task", "commands": ["true"], "priority": rnd.randint(0, 85), "nodes": rnd.choice([1, 1, 1, 2, 3]),
        "resources": {"cpu": rnd.randint(1, 3), "gpu": rnd.choice([0, 1, 1, 2, 4])}, "retry": rnd.random() < 0.4,
        "queue": rnd.choice(QUEUES), "max_duration": rnd.choice(["1m", "1h", "24h"]),
        "preemptible": rnd.random() < 0.6,
    }  # fmt: skip
    if rnd.random() < 0.3:
        config["schedule"] = {"cron": "* * * * *"}
    if rnd.random() < 0.3:
        config["name"] = f"name-{rnd.randint(1, 20)}"
    if rnd.random() < 0.3:
        key = rnd.randint(1, 60)
        config |= {"name": f"keyed-{key}", "priority": 50, "nodes": 1, "retry": False, "queue": "default"}
        config |= {"resources": {"gpu": 1}, "max_duration": "1h", "schedule": None, "preemptible": True}
        for _ in range(2):
            services.submit(who.project, who.user, who.role, services.Submission(config), f"key-{key}")
        return
    services.submit(who.project, who.user, who.role, services.Submission(config))


def hold(rnd: random.Random) -> None:
    who = member(rnd)
    holds.submit_hold(
        who.project, who.user, who.role, holds.HoldRequest("2h", gpu=str(rnd.randint(1, 2)), queue=rnd.choice(QUEUES))
    )


def extend(rnd: random.Random) -> None:
    who = anybody(rnd)
    holds.extend(run_of(rnd, who, *PLACED), who.user, who.role, rnd.choice(["1h", "1d"]))


def prioritise(rnd: random.Random) -> None:
    who = anybody(rnd)
    services.set_priority(run_of(rnd, who), who.user, who.role, rnd.randint(0, 100))


def prioritise_stale(rnd: random.Random) -> None:
    """A second write with what was read before the first is refused."""
    who = anybody(rnd)
    run = run_of(rnd, who, RunStatus.SUBMITTED)
    changes = RunEvent.objects.filter(run=run, kind__in=("priority", "moved", "move_undone", "queue"))
    before = changes.count()
    read = services.etag(run)
    services.set_priority(run, who.user, who.role, (run.priority + 1) % who.project.member_max_priority)
    try:
        services.set_priority(run, who.user, who.role, 0, if_match=read)
    except (Stale, Conflict):
        return
    # An ETag names values: it holds again once somebody else has set back what was read.
    if changes.count() <= before + 2:
        raise AssertionError(f"{run}: a stale write of priority was taken")


def change_queue(rnd: random.Random) -> None:
    who = anybody(rnd)
    services.set_queue(run_of(rnd, who), who.user, who.role, rnd.choice(["default", "night"]))


def stop(rnd: random.Random) -> None:
    who = anybody(rnd)
    services.stop(run_of(rnd, who), who.user, who.role, abort=rnd.random() < 0.5)


def stop_several(rnd: random.Random) -> None:
    """A selection, in the order of the page it was made on."""
    who = anybody(rnd)
    runs = list({run.pk: run for run in (run_of(rnd, who) for _ in range(4))}.values())
    services.stop_all(runs, who.user, who.role)


def place(rnd: random.Random) -> None:
    """Passes; now and then one whose claim is over before it has begun, so that two are at work."""
    PassState.EXPIRES_S = rnd.choice([30.0, 30.0, 30.0, 0.01])
    placement_pass.run_passes()


def look(rnd: random.Random) -> None:
    """Everything that is periodic, with every back-off over."""
    watch.watch()
    attempts.requeue_due(timezone.now() + dt.timedelta(hours=1))
    Host.objects.filter(name=rnd.choice(["box-1", "box-2", "box-3"])).update(draining=rnd.random() < 0.2)
    for host in Host.objects.filter(held_back_at__isnull=False):
        inventory.clear_failed_starts(host.pk, timezone.now(), after_probe=True)
    Project.objects.filter(name=rnd.choice(["main", "lab"])).update(weight=rnd.choice([1, 2, 5]))
    if rnd.random() < 0.1:
        retention.keep_house()
        retention.prune()


class Runners:
    """Plays runners: some job's next step, some of them twice, and remembers what it claimed."""

    def __init__(self) -> None:
        self.claimed: list[tuple[str, str]] = []

    def __call__(self, rnd: random.Random) -> None:
        pk = one_of(rnd, Job.objects.filter(status__in=JOB_ACTIVE).values_list("pk", flat=True))
        job = Job.objects.filter(pk=pk).first()
        if job is None:
            raise Job.DoesNotExist
        if job.status == JobStatus.TERMINATING:
            attempts.end_job(job.pk, Reason.TERMINATED_BY_SERVER, exit_code=143)
        elif job.status == JobStatus.RUNNING:
            reasons = [Reason.DONE_BY_RUNNER] * 5 + [
                Reason.CONTAINER_EXITED_WITH_ERROR, Reason.INSTANCE_UNREACHABLE, Reason.MAX_DURATION_EXCEEDED
            ]  # fmt: skip
            attempts.end_job(job.pk, rnd.choice(reasons), exit_code=0)
        elif job.claim_nonce:
            attempts.start_job(job.pk)
        else:
            nonce = f"{os.getpid()}-{rnd.random()}"
            attempts.claim_job(job.pk, nonce, "here")
            self.claimed.append((str(job.pk), nonce))
