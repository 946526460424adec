"""What a job may hold of a host: all that it claims, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction

from dstackweb.accounts.models import Project, User
from dstackweb.backends.hosts.fit import Fit
from dstackweb.backends.models import Gpu, Host
from dstackweb.runs.models import Allocation, Job
from dstackweb.runs.shared_rows import ClaimFailed, claim_all, release
from tests.factories import cloud_job, make_host, make_run

pytestmark = pytest.mark.django_db
GIB = 1024


@pytest.fixture
def host() -> Host:
    return make_host(cpus=8, memory_gib=32, gpus=2)


@pytest.fixture
def jobs(project: Project, member: User) -> list[Job]:
    return [cloud_job(make_run(project, member)) for _ in range(2)]


def part(host: Host, cpus: int, memory_mib: int, gpus: tuple[str, ...] = ()) -> Fit:
    return Fit(host.pk, host.name, cpus, memory_mib, gpus, gpus_left=0, cpus_left=0)


def claim(*claims: tuple[Job, Fit]) -> None:
    with transaction.atomic():
        claim_all(claims)


def held() -> list[tuple[int, int]]:
    return list(Host.objects.values_list("cpus_used", "memory_used_mib"))


@pytest.mark.parametrize(
    ("cpus", "memory_mib", "gpus"),
    [(6, GIB, ()), (1, 30 * GIB, ()), (1, GIB, ("GPU-box-1-0",)), (1, GIB, ("GPU-box-1-1",)), (1, GIB, ("GPU-x",))],
    ids=["CPUs", "memory", "a GPU that another job has", "an absent GPU", "an unknown GPU"],
)
def test_a_claim_that_exceeds_free_resources_claims_nothing(
    host: Host, jobs: list[Job], cpus: int, memory_mib: int, gpus: tuple[str, ...]
) -> None:
    first, second = jobs
    Gpu.objects.filter(index=1).update(present=False)
    claim((first, part(host, 4, 4 * GIB, ("GPU-box-1-0",))))
    with pytest.raises(ClaimFailed):
        claim((second, part(host, cpus, memory_mib, gpus)))
    assert held() == [(4, 4 * GIB)]
    assert set(Allocation.objects.values_list("job", flat=True)) == {first.pk}


@pytest.mark.parametrize("changed", [{"draining": True}, {"cpus": 3}])
def test_a_host_that_changed_since_the_decision_is_not_claimed(
    host: Host, jobs: list[Job], changed: dict[str, Any]
) -> None:
    Host.objects.update(**changed)
    with pytest.raises(ClaimFailed, match="has not enough free"):
        claim((jobs[0], part(host, 4, GIB)))
    assert held() == [(0, 0)]


def test_the_jobs_of_a_run_claim_all_or_none(host: Host, jobs: list[Job]) -> None:
    other = make_host("box-2", cpus=2)
    with pytest.raises(ClaimFailed):
        claim((jobs[0], part(host, 4, GIB)), (jobs[1], part(other, 4, GIB)))
    assert held() == [(0, 0), (0, 0)]


def test_released_resources_can_be_claimed_to_the_last_unit(host: Host, jobs: list[Job]) -> None:
    first, second = jobs
    everything = part(host, 8, 32 * GIB, ("GPU-box-1-0", "GPU-box-1-1"))
    claim((first, everything))
    with transaction.atomic():
        Job.objects.filter(pk=first.pk).update(status="done")
        release([first.run_id])
    assert held() == [(0, 0)]
    claim((second, everything))
    assert held() == [(8, 32 * GIB)]
