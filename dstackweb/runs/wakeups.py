"""Signals that work is due, sent after commit, to which the scheduler connects.

They may be lost: periodic work finds all from rows. A broker that is away is logged, and fails nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from django.db import transaction
from django.dispatch import Signal

from dstackweb.runs.models import Job

pass_requested = Signal()
"""A placement pass is due: a run entered a queue, or, if `urgent`, an order changed or capacity became free."""
cloud_checks_requested = Signal()
"""Cloud jobs `job_ids` are due: their instance must be started or released."""
job_checks_requested = Signal()
"""The server's own machine with the cluster `cluster` must check its jobs `job_ids`."""

task_settling_requested = Signal()
"""Attempts with tasks have ended: their tasks must be settled."""


def _send(signal: Signal, **data: Any) -> None:
    # No `partial`: Django logs the name of a callback that fails, and a partial has none.
    transaction.on_commit(lambda: signal.send(sender=None, **data), robust=True)


def request_pass(*, urgent: bool = True) -> None:
    """Request a placement pass on commit. It isn't urgent where runs were only added: one pass serves many of them."""
    _send(pass_requested, urgent=urgent)


def request_task_settling() -> None:
    """Request that tasks of ended attempts are settled when the current transaction commits."""
    _send(task_settling_requested)


def request_job_checks(jobs: Iterable[Job]) -> None:
    """Request a check of these jobs, by their hosts or the cloud workers, when the current transaction commits."""
    by_cluster: dict[str | None, list[str]] = defaultdict(list)
    for job in jobs:
        if job.host is None or job.host.cluster:  # an agent asks by itself
            by_cluster[job.host.cluster if job.host else None].append(str(job.pk))
    for cluster, job_ids in by_cluster.items():
        if cluster is None:
            _send(cloud_checks_requested, job_ids=job_ids)
        else:
            _send(job_checks_requested, job_ids=job_ids, cluster=cluster)
