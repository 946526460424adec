"""What a project has spent on paid backends this month (UTC): summed from its jobs, whose price is kept with them."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

from django.db.models import Q

from dstackweb.runs.models import Job

HOUR_S = Decimal(3600)


def spent(project_id: int, now: dt.datetime) -> Decimal:
    """USD for the part of each job that lies in `now`'s month; active ones count up to `now`."""
    since = now.astimezone(dt.UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    # The condition on the price is the partial index's.
    jobs = Job.objects.filter(Q(ended_at=None) | Q(ended_at__gt=since), price__gt=0, run__project=project_id)
    rows = jobs.filter(placed_at__lt=now).values_list("price", "placed_at", "ended_at")
    return sum((price * _hours(max(since, began), ended or now) for price, began, ended in rows), Decimal(0))


def _hours(since: dt.datetime, until: dt.datetime) -> Decimal:
    """Never negative, also where the clock was put back."""
    return max(Decimal(0), Decimal(str((until - since).total_seconds())) / HOUR_S)
