"""Claims and releases what jobs hold of a host (docs/design.md#execution).

A GPU is an insert of a row that can exist only once; CPUs and memory are sums on the host's own row, raised by a
guarded UPDATE. Both happen in the caller's transaction: any miss raises `ClaimFailed`, and everything rolls back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from django.db import IntegrityError, connection
from django.db.models import F

from dstackweb.backends.models import Gpu, Host
from dstackweb.lib import sql
from dstackweb.runs.models import Allocation, Job, Run
from dstackweb.runs.states import JOB_ENDED


class ClaimFailed(Exception):
    """Another job holds what was to be claimed; nothing was claimed."""


@dataclass(frozen=True)
class Claim:
    """What one job takes of a host."""

    host_id: int
    cpus: int
    memory_mib: int
    gpu_uuids: tuple[str, ...] = ()


def claim_all(claims: Sequence[tuple[Job, Claim]]) -> None:
    """Claim for every job or for none, in host order so that two claimers never wait for each other.

    Raises ClaimFailed. Call inside a transaction that the exception leaves.
    """
    by_host: dict[int, list[Claim]] = defaultdict(list)
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


_OF_ENDED = f"""
WHERE job_id IN (SELECT id FROM runs_job WHERE run_id = %s AND status IN ({sql.places(JOB_ENDED)}))
"""


def held_by_ended_jobs(run: Run) -> list[tuple[int, int, int]]:
    """What a run's ended jobs hold of each host (id), in the order of claims: CPUs and MiB of memory.

    Their processes are confirmed gone, or never began.
    """
    columns = "host_id, SUM(cpus), SUM(memory_mib)"
    found = sql.rows(f"SELECT {columns} FROM runs_allocation {_OF_ENDED} GROUP BY 1 ORDER BY 1", [run.pk, *JOB_ENDED])
    return [(host_id, int(cpus), int(memory_mib)) for host_id, cpus, memory_mib in found]


def release(run: Run, held: Sequence[tuple[int, int, int]]) -> None:
    """Release what a run's ended jobs hold, which is `held`.

    Call after `lock_run`, last in the transaction.
    """
    for host_id, cpus, memory_mib in held:
        Host.objects.filter(pk=host_id).update(
            cpus_used=F("cpus_used") - cpus, memory_used_mib=F("memory_used_mib") - memory_mib
        )
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM runs_allocation {_OF_ENDED}", [run.pk, *JOB_ENDED])
