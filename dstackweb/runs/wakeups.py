"""Signals that work is due, sent after commit. The scheduler connects to them: this app does not import it.

A signal may be lost: periodic work finds everything from rows. An unreachable broker is logged, and fails nothing that
was just committed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial

from django.db import transaction
from django.dispatch import Signal

from dstackweb.runs.models import Job

pass_requested = Signal()
"""A placement pass is due: a run entered a queue, an order changed, or capacity became free."""
cloud_checks_requested = Signal()
"""Cloud jobs `job_ids` are due: their instance must be started or released."""
job_checks_requested = Signal()
"""The host with the cluster `cluster` must check its jobs `job_ids`."""

task_settling_requested = Signal()
"""Attempts with tasks have ended: their tasks must be settled."""


def request_pass() -> None:
    """Request a placement pass when the current transaction commits."""
    transaction.on_commit(lambda: pass_requested.send(sender=None), robust=True)


def request_task_settling() -> None:
    """Request that tasks of ended attempts are settled when the current transaction commits."""
    transaction.on_commit(lambda: task_settling_requested.send(sender=None), robust=True)


def request_job_checks(jobs: Iterable[Job]) -> None:
    """Request a check of these jobs, by their hosts or the cloud workers, when the current transaction commits."""
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
