"""Claiming and giving back what jobs hold of a host (DESIGN 6).

A GPU is an insert of a row that can exist only once; CPUs and memory are sums on the host's own row, raised by a
guarded UPDATE. Both happen in the caller's transaction: any miss raises `Taken`, and everything rolls back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.db import IntegrityError
from django.db.models import F, QuerySet, Sum

from dstackweb.backends.models import Gpu, Host
from dstackweb.runs.models import Allocation, Job, Run
from dstackweb.runs.states import JOB_ENDED


class Taken(Exception):
    """Somebody else holds what was to be claimed; nothing of this claim stays."""


@dataclass(frozen=True)
class Claim:
    """What one job takes of a host."""

    host_id: int
    cpus: int
    memory_mib: int
    gpu_uuids: tuple[str, ...] = ()


def claim_all(claims: Sequence[tuple[Job, Claim]]) -> None:
    """Claim for every job or for none, in host order so that two claimers never wait for each other.

    Raises Taken. Call inside a transaction that the exception leaves.
    """
    for job, claim in sorted(claims, key=lambda pair: (pair[1].host_id, pair[0].node)):
        _claim(job, claim)


def _claim(job: Job, claim: Claim) -> None:
    won = Host.objects.filter(
        pk=claim.host_id,
        draining=False,
        cpus__gte=F("cpus_used") + claim.cpus,
        memory_mib__gte=F("memory_used_mib") + claim.memory_mib,
    ).update(cpus_used=F("cpus_used") + claim.cpus, memory_used_mib=F("memory_used_mib") + claim.memory_mib)
    if not won:
        raise Taken(f"host {claim.host_id} has no room left")
    gpus = list(Gpu.objects.filter(host_id=claim.host_id, uuid__in=claim.gpu_uuids, present=True).order_by("uuid"))
    if len(gpus) != len(claim.gpu_uuids):
        raise Taken("a GPU has gone")
    whole = Allocation(job=job, host_id=claim.host_id, cpus=claim.cpus, memory_mib=claim.memory_mib)
    try:
        Allocation.objects.bulk_create([whole, *(Allocation(job=job, host_id=claim.host_id, gpu=gpu) for gpu in gpus)])
    except IntegrityError as error:
        raise Taken("a GPU was given to another job") from error


def of_ended(run: Run) -> QuerySet[Allocation]:
    """What jobs of a run still hold that have ended, so that their processes are confirmed gone or never began."""
    return Allocation.objects.filter(job__run=run, job__status__in=JOB_ENDED)


def release(rows: QuerySet[Allocation]) -> None:
    """Give back what these rows hold, host by host in the order in which claims take them.

    Call behind `lock_run`, last in the transaction.
    """
    sums = rows.order_by("host").values_list("host").annotate(cpus=Sum("cpus"), memory_mib=Sum("memory_mib"))
    for host_id, cpus, memory_mib in list(sums):
        Host.objects.filter(pk=host_id).update(
            cpus_used=F("cpus_used") - cpus, memory_used_mib=F("memory_used_mib") - memory_mib
        )
    rows.delete()
