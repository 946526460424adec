"""Reading what decisions look at from rows, in a few queries however many runs wait."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence

from django.conf import settings
from django.db.models import Count

from dstackweb.accounts.models import Project
from dstackweb.backends.hosts.views import host_views
from dstackweb.runs.models import Allocation, Job, Queue, Run
from dstackweb.runs.queues import LIMITS
from dstackweb.runs.spend import spent
from dstackweb.runs.states import JOB_ACTIVE, PLACED
from dstackweb.scheduler.capacity import Budget, Capacity, Rules
from dstackweb.scheduler.limits import Limits, Tally
from dstackweb.scheduler.market import Market
from dstackweb.scheduler.placement import Waiting
from dstackweb.scheduler.reservation import Holder, Reserved, latest_end
from dstackweb.spec.effective import EffectiveSpec


def capacity(queues: Iterable[Queue], market: Market, now: dt.datetime, reserved: Reserved | None = None) -> Capacity:
    """All there is to give to runs of these queues, with what is reserved of it."""
    # Holders before hosts: what ends between the two questions is then free, rather than held by nobody.
    known = holders(now) if reserved else None
    limits = {queue.pk: limits_of(queue) for queue in queues}
    return Capacity(
        now=now,
        rules=Rules(settings.DSTACKWEB_RESERVE_AFTER_S, settings.DSTACKWEB_RESERVE_FOR_S),
        hosts=tuple(host_views()),
        limits=limits,
        tally=tally_of([queue_id for queue_id, each in limits.items() if each != Limits()]),
        ask=market.ask,
        budget=lambda project_id: budget(project_id, now),
        read_holders=lambda: holders(now) if known is None else known,
        reserved=reserved,
    )


def waiting(run: Run, queue: Queue, spec: EffectiveSpec) -> Waiting:
    """A run of a queue (read with its project) as decisions see it."""
    return Waiting(
        id=run.pk,
        name=run.name,
        project_id=queue.project_id,
        project=queue.project.name,
        queue_id=queue.pk,
        user_id=run.user_id,
        rank=run.rank,
        queued_at=run.queued_at,
        spec=spec,
    )


def limits_of(queue: Queue) -> Limits:
    """The limits of a queue as it was read."""
    return Limits(**{name: getattr(queue, name) for name in LIMITS})


def budget(project_id: int, now: dt.datetime) -> Budget | None:
    """What a project may spend this month, and what it has; None without a budget."""
    limit = Project.objects.values_list("monthly_budget", flat=True).get(pk=project_id)
    return None if limit is None else Budget(limit, spent(project_id, now))


def holders(now: dt.datetime) -> list[Holder]:
    """What each active job holds of its host, and by when it is gone at the latest."""
    columns = ("run_id", "node", "host_id", "cpus", "memory_mib", "gpus", "placed_at", "started_at")
    rows = list(Job.objects.filter(status__in=JOB_ACTIVE, host__isnull=False).values_list(*columns))
    # Not joined: see `tally_of`.
    runs = Run.objects.filter(pk__in={run_id for run_id, *_rest in rows})
    times = ("extended_s", "spec__max_duration_s", "spec__stop_duration_s")
    limits = {run_id: limit for run_id, *limit in runs.values_list("pk", *times)}
    return [
        Holder(
            job=(run_id, node),
            host_id=host_id,
            cpus=cpus,
            memory_mib=memory_mib,
            gpus=frozenset(gpus),
            since=placed_at,
            ends_at=latest_end(started_at or now, None if limit_s is None else limit_s + extended_s, stop_s or 0, now),
        )
        for run_id, node, host_id, cpus, memory_mib, gpus, placed_at, started_at in rows
        for extended_s, limit_s, stop_s in [limits[run_id]]
    ]


def tally_of(queue_ids: Sequence[int]) -> Tally:
    """The placed runs of these queues, and the GPUs that they hold.

    Of all queues what is placed is little: SQLite would look for these queues' among all that wait in them.
    """
    if not queue_ids:
        return Tally()
    columns = ("pk", "queue_id", "user_id")
    placed = {pk: (queue, user) for pk, queue, user in Run.objects.filter(status__in=PLACED).values_list(*columns)}
    held = Allocation.objects.filter(gpu__isnull=False).values_list("job__run_id").annotate(n=Count("pk"))
    gpus = {run: number for run, number in held if run is not None}
    # Not joined: with old statistics PostgreSQL would walk all runs there ever were for it. Hardly any is not placed.
    rest = Run.objects.filter(pk__in=gpus.keys() - placed.keys()).values_list(*columns)
    holders = placed | {pk: (queue, user) for pk, queue, user in rest}
    return Tally.of(
        (queue, user, gpus.get(pk, 0), int(pk in placed)) for pk, (queue, user) in holders.items() if queue in queue_ids
    )
