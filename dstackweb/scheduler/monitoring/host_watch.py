"""What the watcher sees of hosts: one falls silent, comes back, or may leave now that it holds nothing."""

from __future__ import annotations

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from dstackweb.backends.models import Host, HostEvent
from dstackweb.runs.models import Allocation, Job
from dstackweb.runs.states import JOB_ACTIVE
from dstackweb.scheduler.models import PeriodicJob


def note_presence() -> None:
    """Tell once when a host went offline, and once when it is back: placement itself looks at the silence alone."""
    joined = Host.joined.exclude(seen_at=None)
    limit = settings.DSTACKWEB_HOST_SILENT_S
    for host in joined.filter(offline_since=None, silent_s__gte=limit):
        now = timezone.now()
        with transaction.atomic():
            if Host.objects.filter(pk=host.pk, offline_since=None, silent_s__gte=limit).update(offline_since=now):
                HostEvent.objects.create(host=host, kind="offline", at=now)
    for host in joined.exclude(offline_since=None).filter(silent_s__lt=limit):
        with transaction.atomic():
            if Host.objects.filter(pk=host.pk, offline_since=host.offline_since).update(offline_since=None):
                HostEvent.objects.create(host=host, kind="online")


def finish_leaving() -> None:
    """Those that are to leave, and that no job holds anything of, have left: no list has them, nor periodic work."""
    for host in Host.joined.filter(leaving=True):
        # Nothing new comes to it: a claim needs a host that isn't drained, and an undrained one no longer leaves.
        if Job.objects.filter(host=host, status__in=JOB_ACTIVE).exists():
            continue
        if Allocation.objects.filter(host=host).exists():
            continue
        now = timezone.now()
        with transaction.atomic():
            going = Host.objects.filter(pk=host.pk, leaving=True, left_at=None)
            if going.update(left_at=now, offline_since=None):
                HostEvent.objects.create(host=host, kind="left", at=now)
                PeriodicJob.objects.filter(name__in=PeriodicJob.host_names(host.name)).delete()
