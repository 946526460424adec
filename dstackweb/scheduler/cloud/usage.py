"""Asks engines' accounting what ended instances have used, for those kinds that can say (`contract.Accounting`).

Accounting lags, and may be away: it is asked again until it knows, for `USAGE_ASKED_FOR`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import asdict

from django.utils import timezone

from dstackweb.backends import registry
from dstackweb.backends.models import Backend, Instance
from dstackweb.lib.models import Lease
from dstackweb.scheduler.cloud.instances import without_usage

ASK_EVERY_S = 30.0
AT_ONCE = 200
"""Most instances in one question: they are arguments of a command, or part of a URL."""


def due() -> Iterator[tuple[Backend, str]]:
    """Backends and regions that this process may ask now, by a lease that just expires."""
    now = timezone.now()
    rows = without_usage(now).select_related("backend").only("backend", "region").order_by("ended_at")
    for backend, region in dict.fromkeys((row.backend, row.region) for row in rows):
        if Lease.take(f"usage:{backend.pk}:{region}", uuid.uuid4().hex, ASK_EVERY_S, now):
            yield backend, region


def ask(backend: Backend, region: str) -> None:
    """Store what is known of a region's ended instances. Raises SourceFailed, having changed nothing."""
    rows = without_usage(timezone.now()).filter(backend=backend, region=region).order_by("ended_at")
    cloud_ids = dict(rows.values_list("cloud_id", "pk")[:AT_ONCE])
    if not cloud_ids:
        return
    found = registry.accounting(backend).accounting(region, list(cloud_ids))
    mine = Instance.objects.filter(usage__isnull=True)
    if found is None:
        mine.filter(pk__in=cloud_ids.values()).update(usage={})
        return
    for cloud_id, used in found.items():
        if cloud_id in cloud_ids:
            known = {name: value for name, value in asdict(used).items() if value is not None}
            mine.filter(pk=cloud_ids[cloud_id]).update(usage=known)
