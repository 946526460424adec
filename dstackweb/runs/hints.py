"""Hints that work is due, sent after commit and heard by the scheduler, which imports this app and not the reverse.

A hint may be lost: the next periodic pass finds everything from rows alone. So a broker that is away is logged, and
fails nothing that has just been committed.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.db import transaction
from django.dispatch import Signal

from dstackweb.runs.models import Job

pass_due = Signal()
"""A run entered a queue, an order changed, or capacity came free."""
job_due = Signal()
"""The host of job `job_id` (its cluster is `cluster`) should look at it: start it, or tell its runner to ask."""


def want_pass() -> None:
    """Ask for a placement pass once the current transaction commits."""
    transaction.on_commit(lambda: pass_due.send(sender=None), robust=True)


def want_look(jobs: Iterable[Job]) -> None:
    """Ask the hosts of these jobs to look at them once the current transaction commits."""
    for job in jobs:
        if job.host is not None:
            _want_look(str(job.pk), job.host.cluster)


def _want_look(job_id: str, cluster: str) -> None:
    transaction.on_commit(lambda: job_due.send(sender=None, job_id=job_id, cluster=cluster), robust=True)
