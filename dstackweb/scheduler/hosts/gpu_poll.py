"""The look at a host's GPUs, on it: what they do is kept, and runs that don't use them are dealt with."""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import logging
from collections.abc import Iterable, Iterator
from uuid import UUID

from django.conf import settings
from django.utils import timezone

from dstackweb.backends.hosts import nvml
from dstackweb.backends.models import Host
from dstackweb.gpus.clock import to_ms
from dstackweb.gpus.samples import intake
from dstackweb.scheduler.monitoring import utilization

log = logging.getLogger(__name__)


def sample_host(name: str) -> None:
    """One sample of each GPU of this machine, and what its jobs' policies want then."""
    host = Host.joined.filter(name=name).first()
    if host is None:
        return
    with _alone(host) as mine:
        if not mine:
            return
        # What it sees may be as old as the look: a GPU that a job got meanwhile was not yet the job's.
        began = timezone.now()
        look = nvml.read()
        act_on(intake.of_host(host, look, to_ms(began)), timezone.now())


def act_on(job_ids: Iterable[UUID], now: dt.datetime) -> None:
    """Do what the jobs' policies want after a sample. One that fails holds up neither the others nor the sample."""
    for job_id in job_ids:
        try:
            utilization.act(job_id, now)
        except Exception:
            log.exception("what its policy wants of job %s waits for the next sample", job_id)


@contextlib.contextmanager
def _alone(host: Host) -> Iterator[bool]:
    """Whether no other worker of the machine samples: one that hangs in a broken driver keeps no others with it.

    A worker that dies lets go.
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
