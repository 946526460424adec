"""A queue's row: its lock, which every change of the order takes first, and its settings."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection, transaction
from django.db.models import BigIntegerField, F, QuerySet, Value
from django.db.models.functions import Cast
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_noop

from dstackweb.accounts.access import allows
from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Conflict, Forbidden, Invalid
from dstackweb.runs import usage, wakeups
from dstackweb.runs.codes import Reclaim
from dstackweb.runs.models import Queue, QueueCount, QueueEvent, Run
from dstackweb.runs.queue import member_shares, ordering
from dstackweb.runs.shared_rows import touch
from dstackweb.runs.states import ACTIVE

LIMITS = ("max_running", "max_gpus", "max_running_per_user", "max_gpus_per_user")
NAME = gettext_noop("letters, digits, dashes and underscores, at most 60")
FAIR_SHARE = ("fair_share_minutes", "fair_share_half_life_days")
COHORT = ("cohort", "borrow_gpus", "lend_gpus", "reclaim")
SETTINGS = (
    "paused",
    "draining",
    "ageing_minutes",
    *FAIR_SHARE,
    *LIMITS,
    *COHORT,
    "preempt_points",
    "preempt_gpu_hours",
)


def now_us() -> int:
    return time.time_ns() // 1000


def take_seniority(queue_id: int, name: str = "") -> Queue:
    """Lock a queue and take its next seniority; `has_sweep_named` says whether an active sweep of its project has this
    name. Call first in a transaction.
    """
    values = {"gap": ordering.MIN_GAP_US, "now": now_us(), "queue": queue_id, "name": name}
    for queue in Queue.objects.raw(_TAKE, values):
        return queue
    raise Queue.DoesNotExist


_TAKE = """
UPDATE runs_queue SET last_seniority_us = CASE
    WHEN last_seniority_us + %(gap)s > %(now)s THEN last_seniority_us + %(gap)s ELSE %(now)s END
WHERE id = %(queue)s RETURNING *, EXISTS (
    SELECT 1 FROM runs_sweep sweep
    WHERE sweep.project_id = runs_queue.project_id AND sweep.name = %(name)s AND sweep.ended_at IS NULL
) AS has_sweep_named
"""


def lock_queue(queue_id: int) -> Queue:
    """Lock a queue's row, first in a transaction: changes of its order happen one after the other."""
    return Queue.objects.select_related("project").select_for_update(of=("self",), no_key=True).get(pk=queue_id)


def refuse_draining(queue: Queue) -> None:
    """Raises Conflict when a queue accepts no new runs."""
    if queue.draining:
        raise Conflict(
            _("queue %(queue)s is draining: waiting runs still start, but it accepts no new runs")
            % {"queue": queue.name}
        )


def change_queue(queue: Queue, user: User, role: str, **settings: Any) -> Queue:
    """Change any of SETTINGS and record who did it. Managers only.

    A new ageing step re-ranks every active run of the queue in one statement under its lock; a new fair share does in
    one for each member, but for runs that were moved by hand. Raises Forbidden, Invalid.
    """
    if not allows(role, "manager"):
        raise Forbidden(_("only managers can change a queue's settings"))
    _check_names(settings)
    with transaction.atomic():
        held = lock_queue(queue.pk)
        data = {name: [getattr(held, name), value] for name, value in settings.items() if getattr(held, name) != value}
        for name, (_old, value) in data.items():
            setattr(held, name, value)
        _check(held)
        if data:
            held.save(update_fields=list(data))
            if "ageing_minutes" in data:
                _rank_anew(held)
            if not data.keys().isdisjoint(FAIR_SHARE):
                _lock_active(held)
                member_shares.apply(held, timezone.now())
            QueueEvent.objects.create(queue=held, actor=user, data=data)
            touch(held.pk)
            wakeups.request_pass()
    return held


def count_shares(now: dt.datetime) -> int:
    """Count the members' shares in all queues with fair share; returns how many queues. No rank changes by it."""
    queues = list(Queue.objects.exclude(fair_share_minutes=None).order_by("pk").values_list("pk", flat=True))
    active = usage.active(now) if queues else {}
    for queue_id in queues:
        with transaction.atomic():
            queue = lock_queue(queue_id)
            if queue.fair_share_minutes:
                shown = member_shares.shares(queue)
                member_shares.count(queue, active, now)
                if [one.shown for one in shown] != [one.shown for one in member_shares.shares(queue)]:
                    touch(queue.pk)
    return len(queues)


def may_be_displaced(queue: Queue) -> bool:
    """Whether preemptible runs of this queue may have to stop for others: of the queue, or of its cohort."""
    if queue.preempt_points is not None:
        return True
    others = Queue.objects.filter(project=queue.project_id, cohort=queue.cohort).exclude(pk=queue.pk)
    return bool(queue.cohort) and others.exclude(reclaim=Reclaim.NEVER).exists()


def has_fair_queues() -> bool:
    return Queue.objects.exclude(fair_share_minutes=None).exists()


def create_queue(project: Project, user: User, role: str, name: str, **settings: Any) -> Queue:
    """Create a queue; managers only. Raises Forbidden, Invalid for an invalid name, Conflict when it is taken."""
    if not allows(role, "manager"):
        raise Forbidden(_("only managers can create queues"))
    _check_names(settings)
    queue = Queue(project=project, name=name, **settings)
    _check(queue)
    try:
        with transaction.atomic():
            queue.save(force_insert=True)
            QueueCount.objects.create(queue=queue)
            QueueEvent.objects.create(
                queue=queue, actor=user, data={key: [None, value] for key, value in {"name": name, **settings}.items()}
            )
    except IntegrityError:
        raise Conflict(_("queue %(name)s exists already") % {"name": repr(name)}) from None
    return queue


def _check_names(settings: Mapping[str, Any]) -> None:
    if unknown := settings.keys() - set(SETTINGS):
        raise Invalid.at(min(unknown), msg=_("unknown queue setting %(unknown)s") % {"unknown": repr(min(unknown))})


def _check(queue: Queue) -> None:
    """Raises Invalid for a value that its field rejects."""
    try:
        queue.clean_fields()
    except ValidationError as error:
        name, messages = next(iter(error.message_dict.items()))
        message = f"{name}: {messages[0]}"
        if name == "name":
            message = _("invalid queue name %(name)s: use %(allowed)s") % {
                "name": repr(queue.name[:60]),
                "allowed": _(NAME),
            }
        raise Invalid.at(name, msg=message) from None


def _rank_anew(queue: Queue) -> None:
    """Recompute the rank of every run that is in the queue or may return to it."""
    runs = _lock_active(queue)
    # 64 bits: the step times the priority is beyond the 32 that PostgreSQL multiplies a small integer in.
    points = Cast(F("priority"), BigIntegerField())
    step = Value(queue.step_us, output_field=BigIntegerField())
    late = F("seniority_us") + F("penalty_s") * ordering.SECOND_US
    runs.update(rank=late - points * step, version=F("version") + 1)


def _lock_active(queue: Queue) -> QuerySet[Run]:
    """The runs that are in the queue or may return to it, locked."""
    runs = Run.objects.filter(queue=queue, status__in=ACTIVE)
    if connection.features.has_select_for_update:
        # One statement locks rows as it meets them; others lock them by id.
        for _pk in runs.select_for_update().order_by("pk").values_list("pk").iterator(chunk_size=10_000):
            pass
    return runs
