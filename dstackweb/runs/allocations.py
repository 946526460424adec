"""Claims and releases what jobs hold of a host (docs/design.md#execution).

A GPU is an insert of a row that can exist only once; CPUs and memory are sums on the host's own row, raised by a
guarded UPDATE. Both happen in the caller's transaction: any miss raises `ClaimFailed`, and everything rolls back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import groupby
from operator import itemgetter

from django.db import IntegrityError
from django.db.models import F

from dstackweb.backends.hosts.fit import Fit
from dstackweb.backends.models import Gpu, Host
from dstackweb.lib import bulk, sql
from dstackweb.runs.models import Allocation, Job
from dstackweb.runs.states import JOB_ENDED


class ClaimFailed(Exception):
    """Another job holds what was to be claimed; nothing was claimed."""


def claim_all(claims: Sequence[tuple[Job, Fit]]) -> None:
    """Claim what each job gets of its host, for every job or for none.

    In host order, so that two claimers never wait for each other. Raises ClaimFailed. Call inside a transaction that
    the exception leaves.
    """
    by_host: dict[int, list[Fit]] = defaultdict(list)
    for _, claim in claims:
        by_host[claim.host_id].append(claim)
    for host_id, mine in sorted(by_host.items()):
        _take(host_id, sum(claim.cpus for claim in mine), sum(claim.memory_mib for claim in mine))
    gpus = _gpus([uuid for _, claim in claims for uuid in claim.gpu_uuids])
    rows = []
    for job, claim in claims:
        rows.append(Allocation(job=job, host_id=claim.host_id, cpus=claim.cpus, memory_mib=claim.memory_mib))
        for uuid in claim.gpu_uuids:
            if (claim.host_id, uuid) not in gpus:
                raise ClaimFailed("a GPU is no longer present")
            rows.append(Allocation(job=job, host_id=claim.host_id, gpu_id=gpus[claim.host_id, uuid]))
    try:
        Allocation.objects.bulk_create(rows)
    except IntegrityError as error:
        raise ClaimFailed("another job has a GPU") from error


def _take(host_id: int, cpus: int, memory_mib: int) -> None:
    won = Host.objects.filter(
        pk=host_id,
        draining=False,
        held_back_at=None,
        cpus__gte=F("cpus_used") + cpus,
        memory_mib__gte=F("memory_used_mib") + memory_mib,
    ).update(cpus_used=F("cpus_used") + cpus, memory_used_mib=F("memory_used_mib") + memory_mib)
    if not won:
        raise ClaimFailed(f"host {host_id} has not enough free")


def _gpus(uuids: Sequence[str]) -> dict[tuple[int, str], int]:
    """Row ids of these GPUs by host and UUID, for those present."""
    if not uuids:
        return {}
    rows = Gpu.objects.filter(uuid__in=uuids, present=True).values_list("host_id", "uuid", "pk")
    return {(host_id, uuid): pk for host_id, uuid, pk in rows}


def release(run_ids: Collection[int]) -> set[int]:
    """Release what ended jobs of these runs hold, in the order of claims. Returns the runs that held something.

    Their processes are confirmed gone, or never began. Call with the runs locked, last in the transaction.
    """
    if not run_ids:
        return set()
    ended = f"job.run_id IN ({sql.places(run_ids)}) AND job.status IN ({sql.places(JOB_ENDED)})"
    held = sql.rows(_HELD + f"WHERE {ended} ORDER BY held.host_id", [*run_ids, *JOB_ENDED])
    for host_id, rows in groupby(held, itemgetter(2)):
        cpus, memory_mib = (sum(column) for column in zip(*(row[3:] for row in rows), strict=True))
        Host.objects.filter(pk=host_id).update(
            cpus_used=F("cpus_used") - cpus, memory_used_mib=F("memory_used_mib") - memory_mib
        )
    bulk.delete("runs_allocation", [row[0] for row in held])
    return {row[1] for row in held}


_HELD = """
SELECT held.id, job.run_id, held.host_id, held.cpus, held.memory_mib
FROM runs_allocation held JOIN runs_job job ON job.id = held.job_id
"""
