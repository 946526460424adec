"""Samples this host's GPUs, and applies utilization policies to the jobs on them."""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import logging
from collections.abc import Iterable, Iterator
from uuid import UUID

from django.conf import settings
from django.utils import timezone

from dstackweb.backends.models import Host
from dstackweb.gpus.clock import to_ms
from dstackweb.gpus.samples import intake
from dstackweb.runner import nvml
from dstackweb.scheduler.monitoring import utilization

log = logging.getLogger(__name__)


def sample_host(name: str) -> None:
    """Store a sample of each GPU of this machine, and apply its jobs' policies."""
    host = Host.joined.filter(name=name).first()
    if host is None:
        return
    with _sampling_lock(host) as mine:
        if not mine:
            return
        # Dated before reading: a GPU that a job gets meanwhile was not the job's yet.
        began = timezone.now()
        apply_policies(intake.add_snapshot(host, nvml.read(), to_ms(began)), timezone.now())


def apply_policies(job_ids: Iterable[UUID], now: dt.datetime) -> None:
    """Apply the jobs' policies after a sample. One that fails stops neither the others nor the sample."""
    for job_id in job_ids:
        try:
            utilization.apply_policy(job_id, now)
        except Exception:
            log.exception("job %s: policy not applied, will retry with the next sample", job_id)


@contextlib.contextmanager
def _sampling_lock(host: Host) -> Iterator[bool]:
    """Whether this worker may sample. Only one does at a time: a broken driver can hang only that one.

    The kernel releases a dead worker's lock.
    """
    folder = settings.DSTACKWEB_HOME / "locks"
    folder.mkdir(exist_ok=True)
    with open(folder / f"gpus-{host.pk}", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
