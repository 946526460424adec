"""Watches hosts: records when they go offline and come back, and removes those that have left."""

from __future__ import annotations

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from dstackweb.backends.models import Host, HostEvent, HostEventKind
from dstackweb.runs.models import Allocation, Job
from dstackweb.runs.states import JOB_ACTIVE
from dstackweb.scheduler.models import PeriodicJob


def record_presence() -> None:
    """Record once that a host went offline, and once that it is back. Placement reads the silence itself."""
    joined = Host.joined.exclude(seen_at=None)
    limit = settings.DSTACKWEB_HOST_SILENT_S
    for host in joined.filter(offline_since=None, silent_s__gte=limit):
        now = timezone.now()
        with transaction.atomic():
            if Host.objects.filter(pk=host.pk, offline_since=None, silent_s__gte=limit).update(offline_since=now):
                HostEvent.objects.create(host=host, kind=HostEventKind.OFFLINE, at=now)
    for host in joined.exclude(offline_since=None).filter(silent_s__lt=limit):
        with transaction.atomic():
            if Host.objects.filter(pk=host.pk, offline_since=host.offline_since).update(offline_since=None):
                HostEvent.objects.create(host=host, kind=HostEventKind.ONLINE)


def remove_left_hosts() -> None:
    """Mark leaving hosts without jobs as left: they disappear from lists and have no periodic work."""
    for host in Host.joined.filter(leaving=True):
        # No new job can claim it: a leaving host is drained, and undraining it cancels its leaving.
        if Job.objects.filter(host=host, status__in=JOB_ACTIVE).exists():
            continue
        if Allocation.objects.filter(host=host).exists():
            continue
        now = timezone.now()
        with transaction.atomic():
            going = Host.objects.filter(pk=host.pk, leaving=True, left_at=None)
            if going.update(left_at=now, offline_since=None):
                HostEvent.objects.create(host=host, kind=HostEventKind.LEFT, at=now)
                PeriodicJob.objects.filter(name__in=PeriodicJob.host_names(host.name)).delete()
