"""What a machine writes of itself, and how decisions read it back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from django.conf import settings
from django.db import IntegrityError, transaction

from dstackweb.backends.hosts.inventory import ensure_embedded_backend, heartbeat, host_views, is_online, register
from dstackweb.backends.models import Backend, Gpu, Host, Isolation
from dstackweb.runner.isolation import Arrangement
from dstackweb.runner.machine import GpuProbe, Probe
from tests import factories

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]

GPUS = (GpuProbe("GPU-a", 0, "NVIDIA L4", 23034), GpuProbe("GPU-b", 1, "NVIDIA L4", 23034))
PROBE = Probe(cpus=8, memory_mib=16000, gpus=GPUS, boot_id="boot-1")
ARRANGEMENT = Arrangement(Isolation.USER, "nobody", Path("/srv/runs"))


def come(probe: Probe = PROBE, arrangement: Arrangement = ARRANGEMENT, name: str = "box") -> Host:
    return register(name, address="10.0.0.7", cluster="host-box", probe=probe, arrangement=arrangement)


def test_a_new_machine_registers_its_capacity_and_gpus() -> None:
    host = come()
    assert (host.backend.name, host.cpus, host.memory_mib) == ("hosts", 8, 16000)
    assert (host.isolation, host.job_user, host.runs_dir) == ("user", "nobody", "/srv/runs")
    assert list(host.gpus.values_list("uuid", "index", "name", "memory_mib", "present")) == [
        ("GPU-a", 0, "NVIDIA L4", 23034, True),
        ("GPU-b", 1, "NVIDIA L4", 23034, True),
    ]


def test_a_returning_machine_keeps_its_rows_and_the_settings_of_users_and_jobs() -> None:
    before = come()
    rows = set(Gpu.objects.values_list("pk", "uuid"))
    Host.objects.update(cpus_used=3, memory_used_mib=700, draining=True, setup="module load cuda", labels={"a": "b"})
    after = come(replace(PROBE, boot_id="boot-2"))
    assert after.pk == before.pk
    assert set(Gpu.objects.values_list("pk", "uuid")) == rows
    after.refresh_from_db()
    assert (after.cpus_used, after.memory_used_mib, after.draining) == (3, 700, True)
    assert (after.setup, after.labels, after.boot_id) == ("module load cuda", {"a": "b"}, "boot-2")


def test_a_vanished_gpu_is_marked_absent_until_it_returns() -> None:
    come()
    come(replace(PROBE, gpus=GPUS[:1]))
    assert [gpu.uuid for gpu in host_views()[0].gpus] == ["GPU-a"]
    assert Gpu.objects.filter(uuid="GPU-b", present=False).exists()
    come()
    assert [gpu.uuid for gpu in host_views()[0].gpus] == ["GPU-a", "GPU-b"]


def test_a_gpu_moved_to_another_machine_belongs_there() -> None:
    come()
    other = come(replace(PROBE, gpus=GPUS[1:]), name="other")
    assert Gpu.objects.get(uuid="GPU-b").host == other


def test_a_foreign_process_on_a_gpu_is_stored_while_the_machine_reports_it() -> None:
    stranger = {"pid": 4711, "user": "ana"}
    come(replace(PROBE, gpus=(replace(GPUS[0], stranger=stranger), GPUS[1])))
    first, second = host_views()[0].gpus
    assert (first.free, first.stranger) == (False, stranger)
    assert second.free
    come()
    assert all(gpu.free for gpu in host_views()[0].gpus)


def test_all_problems_of_a_machine_are_joined_in_one_text() -> None:
    host = come(replace(PROBE, error="GPU 3: lost"), replace(ARRANGEMENT, error="no user"))
    assert host.error == "no user; GPU 3: lost"


def test_heartbeats_are_stored_and_a_removed_host_must_register_again() -> None:
    host = come()
    assert heartbeat(host)
    assert heartbeat(host)
    host.refresh_from_db()
    assert host.heartbeats == 2
    host.delete()
    assert not heartbeat(host)


def test_a_machine_that_comes_back_is_online_at_once() -> None:
    host = come()
    Host.objects.update(silent_s=settings.DSTACKWEB_HOST_SILENT_S + 1)
    host.refresh_from_db()
    assert not is_online(host)
    assert is_online(come())


def test_a_machine_that_shrank_below_its_claims_has_nothing_free() -> None:
    come()
    Host.objects.update(cpus_used=6, memory_used_mib=12000)
    come(replace(PROBE, cpus=4, memory_mib=8000))
    (view,) = host_views()
    assert (view.cpus, view.cpus_free, view.memory_free_mib) == (4, 0, 0)


def test_claimed_amounts_never_fall_below_zero() -> None:
    come()
    with pytest.raises(IntegrityError), transaction.atomic():
        Host.objects.update(cpus_used=-1)
    with pytest.raises(IntegrityError), transaction.atomic():
        Host.objects.update(memory_used_mib=-1)


def test_the_embedded_backend_is_made_once() -> None:
    assert ensure_embedded_backend() == ensure_embedded_backend()
    assert Backend.objects.get().kind == "hosts"


def test_hosts_of_a_disabled_backend_are_ignored() -> None:
    come()
    Backend.objects.update(enabled=False)
    assert host_views() == []


def test_a_gpu_that_a_job_holds_is_not_free() -> None:
    factories.make_host(gpus=2)
    project = factories.make_project()
    factories.make_run(project, factories.make_user(), resources={"gpu": 1, "cpu": 2, "memory": "1GB"})
    assert factories.place_all() == 1
    (view,) = host_views()
    assert [gpu.held for gpu in view.gpus] == [True, False]
    assert (view.cpus_free, view.memory_free_mib) == (6, 31 * 1024)


def test_reading_all_hosts_takes_two_queries(django_assert_num_queries) -> None:  # type: ignore[no-untyped-def]
    for number in range(3):
        factories.make_host(f"box-{number}", gpus=2)
    with django_assert_num_queries(2):
        assert len(host_views()) == 3
