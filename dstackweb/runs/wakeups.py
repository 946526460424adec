"""Hints that work is due, sent after commit and heard by the scheduler, which imports this app and not the reverse.

A hint may be lost: the next periodic pass finds everything from rows alone. So a broker that is away is logged, and
fails nothing that has just been committed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial

from django.db import transaction
from django.dispatch import Signal

from dstackweb.runs.models import Job

pass_requested = Signal()
"""A run entered a queue, an order changed, or capacity came free."""
cloud_checks_requested = Signal()
"""Jobs `job_ids` on machines of clouds should be looked at: their machine started, or given back."""
job_checks_requested = Signal()
"""The host whose cluster is `cluster` should look at its jobs `job_ids`: start them, or tell their runners to ask."""

task_settling_requested = Signal()
"""Attempts have ended whose tasks are counted: those that were still to come are to be settled."""


def request_pass() -> None:
    """Ask for a placement pass once the current transaction commits."""
    transaction.on_commit(lambda: pass_requested.send(sender=None), robust=True)


def request_task_settling() -> None:
    """Ask that the tasks of ended attempts be settled, once the current transaction commits."""
    transaction.on_commit(lambda: task_settling_requested.send(sender=None), robust=True)


def request_job_checks(jobs: Iterable[Job]) -> None:
    """Ask the hosts of these jobs, or who works for clouds, to look at them once the current transaction commits."""
    by_cluster: dict[str, list[str]] = defaultdict(list)
    of_clouds: list[str] = []
    for job in jobs:
        if job.host is not None:
            by_cluster[job.host.cluster].append(str(job.pk))
        else:
            of_clouds.append(str(job.pk))
    for cluster, job_ids in by_cluster.items():
        transaction.on_commit(
            partial(job_checks_requested.send, sender=None, job_ids=job_ids, cluster=cluster), robust=True
        )
    if of_clouds:
        transaction.on_commit(partial(cloud_checks_requested.send, sender=None, job_ids=of_clouds), robust=True)
