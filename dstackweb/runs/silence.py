"""Hosts that a placed run waits for because they are silent: what it does there is unknown until they answer."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import NamedTuple

from dstackweb.backends.hosts.inventory import is_online
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import JOB_ACTIVE, PLACED


class SilentHost(NamedTuple):
    """An offline host with an active job of the run, and when it was last heard."""

    host: str
    seen_at: dt.datetime | None


def silent_hosts(run: Run, jobs: Iterable[Job] | None = None) -> list[SilentHost]:
    """The silent hosts of a placed run, by name; `jobs` of it, with their hosts, if they are loaded already."""
    if run.status not in PLACED:
        return []
    if jobs is None:
        jobs = Job.objects.select_related("host").filter(run=run, status__in=JOB_ACTIVE, host__isnull=False)
    hosts = {job.host.pk: job.host for job in jobs if job.status in JOB_ACTIVE and job.host is not None}
    return sorted(SilentHost(host.name, host.seen_at) for host in hosts.values() if not is_online(host))
