"""Many processes and threads at once: one call for all, also when the one that makes it dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from django.db import connections
from django.db.models import Sum
from django.utils import timezone

from dstackweb.accounts.models import Project
from dstackweb.backends import services
from dstackweb.backends.contract import SourceState
from dstackweb.backends.models import Backend, Instance
from dstackweb.lib.models import Lease
from dstackweb.offers import catalog, counts, single_flight, sources
from dstackweb.offers.models import CacheCount, Result
from dstackweb.spec.effective import Requirements
from tests.offers.cloud_stub import ANY, SPOT, TYPES, TYPES_US, Cloud, all_ended, at_once, fork, read
from tests.support import eventually

pytestmark = pytest.mark.django_db(transaction=True)
PROCESSES, THREADS = 4, 20


def in_processes(act: object) -> None:
    """Twenty threads in each of four processes, all at the same time."""
    begin = time.time() + 0.3

    def run() -> None:
        time.sleep(max(0.0, begin - time.time()))
        found = at_once(THREADS, act)  # type: ignore[arg-type]
        assert found == [True] * THREADS, found

    assert all_ended([fork(run) for _ in range(PROCESSES)])


def test_one_call_for_a_source_of_twenty_threads_in_each_of_four_processes(backend: Backend, cloud: Cloud) -> None:
    cloud.takes_s = 0.3
    in_processes(lambda: sources.refresh(backend, TYPES, wait_s=20).state is SourceState.FRESH)
    assert cloud.asked == ["types eu"]
    assert not Lease.objects.exists()


def test_one_call_for_offers_of_twenty_threads_in_each_of_four_processes(plain: Backend, cloud: Cloud) -> None:
    cloud.takes_s = 0.3
    in_processes(lambda: len(catalog.CachedDriver(plain, wait_s=20).offers(ANY)) == 1)
    assert cloud.asked == ["offers 1"]


@pytest.mark.slow
def test_the_bound_of_results_holds_for_four_processes(plain: Backend, cloud: Cloud) -> None:
    def ask() -> bool:
        cpus = 1 + int.from_bytes(os.urandom(1)) % 40
        return len(catalog.CachedDriver(plain, wait_s=20).offers(Requirements(cpu_min=cpus))) == 1

    in_processes(ask)
    assert Result.objects.count() == 10


def test_no_count_of_four_processes_is_lost(backend: Backend) -> None:
    def count() -> None:
        for _ in range(5):
            at_once(THREADS, lambda: counts.add(backend.pk, hits=1, uncached=3))
            counts.flush()

    assert all_ended([fork(count) for _ in range(PROCESSES)])
    sums = CacheCount.objects.aggregate(hits=Sum("hits"), uncached=Sum("uncached"))
    assert sums == {"hits": PROCESSES * 5 * THREADS, "uncached": 3 * PROCESSES * 5 * THREADS}


def test_a_killed_leader_blocks_others_only_until_its_lease_expires(
    backend: Backend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_flight, "LEASE_S", 3.0)
    cloud.takes_s = 60.0
    pid = fork(lambda: sources.refresh(backend, TYPES))
    eventually(lambda: cloud.asked, every=0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    cloud.takes_s = 0.0
    assert sources.refresh(backend, TYPES, wait_s=0.2).state is SourceState.FAILED
    assert eventually(lambda: sources.refresh(backend, TYPES, wait_s=0.2).state is SourceState.FRESH)
    assert len(cloud.asked) == 2


def test_a_deleted_backend_is_gone_from_the_caches_of_other_processes(
    backend: Backend, cloud: Cloud, project: Project, tmp_path: Path
) -> None:
    for key in (TYPES, SPOT, TYPES_US):
        sources.refresh(backend, key)
    Instance.objects.create(backend=backend, project=project, region="eu", instance_type="g5", status="gone")
    warm, deleted = tmp_path / "warm", tmp_path / "deleted"

    def keep() -> None:
        looking = catalog.CachedDriver(backend)
        assert len(looking.offers(ANY)) == 3
        warm.touch()
        eventually(deleted.exists)
        with pytest.raises(catalog.NothingKnown):
            looking.offers(ANY)
        assert read(backend, TYPES).state is SourceState.FAILED

    pid = fork(keep)
    eventually(warm.exists)
    services.delete("cloud")
    deleted.touch()
    assert all_ended([pid])
    assert len(cloud.asked) == 3


def test_a_lease_is_renewed_for_as_long_as_the_call_lasts(
    backend: Backend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_flight, "LEASE_S", 0.5)
    cloud.takes_s = 3.0
    pid = fork(lambda: sources.refresh(backend, TYPES))
    eventually(lambda: cloud.asked, every=0.01)
    ends = time.monotonic() + 1.2
    while time.monotonic() < ends:
        assert sources.refresh(backend, TYPES, wait_s=0.0).state is SourceState.FAILED
        time.sleep(0.05)
    assert all_ended([pid])
    assert read(backend, TYPES).state is SourceState.FRESH
    assert cloud.asked == ["types eu"]


def test_a_paused_process_that_lost_its_lease_does_not_store_its_result(
    backend: Backend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_flight, "LEASE_S", 0.5)
    cloud.takes_s = 2.0
    cloud.says[TYPES] = ["of the one that stood still"]
    pid = fork(lambda: sources.refresh(backend, TYPES))
    eventually(lambda: cloud.asked, every=0.01)
    os.kill(pid, signal.SIGSTOP)
    cloud.says[TYPES], cloud.takes_s = ["new"], 0.0
    assert eventually(lambda: sources.refresh(backend, TYPES, wait_s=0.2).value == ["new"])
    os.kill(pid, signal.SIGCONT)
    assert all_ended([pid])
    sources.forget()
    assert read(backend, TYPES).value == ["new"]


def test_waiting_for_the_lease_of_another_process_times_out(backend: Backend, cloud: Cloud) -> None:
    Lease.take(f"source:{backend.pk}:{TYPES.source}:{TYPES.region}", "somebody", single_flight.LEASE_S, timezone.now())
    began = time.monotonic()
    assert sources.refresh(backend, TYPES, wait_s=0.3).state is SourceState.FAILED
    assert 0.3 <= time.monotonic() - began < single_flight.LEASE_S
    assert cloud.asked == []
    connections.close_all()
