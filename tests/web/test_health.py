"""Health names what is down and what follows from it, once each, the worst first."""

from __future__ import annotations

import datetime as dt
import re

import pytest
from django.conf import settings
from django.test import Client
from django.utils import timezone
from django.utils.translation import override
from django_q.brokers import get_broker
from django_q.conf import Conf
from django_q.signing import SignedPackage
from django_q.status import Stat, Status

from dstackweb.accounts.models import Project, User
from dstackweb.backends import registry
from dstackweb.backends.hosts import inventory
from dstackweb.backends.kinds import HealthLine
from dstackweb.backends.models import Backend, Gpu, Host
from dstackweb.gpus import intake
from dstackweb.gpus.models import HostSampling
from dstackweb.lib.times import to_ms
from dstackweb.runner.nvml import Snapshot
from dstackweb.scheduler import restored
from dstackweb.scheduler.models import PeriodicJob
from dstackweb.scheduler.processes.tasks import control_jobs, ensure_rows, host_jobs
from dstackweb.web import health, health_checks
from dstackweb.web.health_checks import PeriodicWork, by_cause
from tests.factories import make_host, make_run, place_all, placed_job, start
from tests.gpus.snapshots import sample
from tests.web.checks import checks

LATE = 60.0


def causes() -> list[HealthLine]:
    return [*health_checks.periodic_checks(), *health_checks.host_checks()]


def test_each_periodic_job_has_one_cause() -> None:
    work = [
        PeriodicWork("jobs:gone", "gone", LATE), PeriodicWork("gpus:gone", "gone", 0, "boom"),
        PeriodicWork("jobs:box", "box", LATE), PeriodicWork("gpus:box", "box", 0, "boom"),
        PeriodicWork("watch", "", 0), PeriodicWork("pass", "", LATE),
    ]  # fmt: skip
    found = by_cause(work, {"box": True, "gone": False})
    assert {host: len(of) for host, of in found.silent.items()} == {"gone": 2}
    assert [one.name for one in found.host_tickers["box"]] == ["jobs:box"]
    assert [[one.name for one in of] for of in (found.ticker, found.late, found.failed, found.fine)] == [
        [], ["pass"], ["gpus:box"], ["watch"],
    ]  # fmt: skip


def test_without_a_ticker_its_late_work_is_one_line() -> None:
    found = by_cause([PeriodicWork("watch", "", LATE), PeriodicWork("pass", "", LATE)], {})
    assert len(found.ticker) == 2
    assert found.late == []


@pytest.mark.django_db
def test_a_silent_host_is_one_line_with_the_jobs_that_wait_for_it(project: Project, member: User) -> None:
    make_host("gpu-2")
    ensure_rows([*control_jobs(), *host_jobs("gpu-2")])
    run = make_run(project, member)
    place_all()
    start(placed_job(run))
    PeriodicJob.objects.filter(name__contains=":").update(due_at=timezone.now() - dt.timedelta(hours=1))
    Host.objects.update(silent_s=1e6)
    bad = [check for check in causes() if check.tone == "bad"]
    assert [(check.name, check.value) for check in bad] == [("Host gpu-2", "silent")]
    assert bad[0].hint.startswith("Its 4 periodic jobs and 1 job of a run wait for it.")


@pytest.mark.django_db
def test_the_page_links_a_host_that_it_names(project: Project, member: User, client: Client) -> None:
    make_host("gpu-2")
    Host.objects.update(silent_s=1e6)
    client.force_login(member)
    assert '<a href="/p/main/hosts/gpu-2/">Host gpu-2</a>' in client.get("/p/main/health/").content.decode()


@pytest.mark.django_db
def test_a_silent_host_without_jobs_can_be_removed_and_is_no_isolation_problem() -> None:
    make_host("gpu-2")
    Host.objects.update(silent_s=1e6, isolation="none")
    silent = next(check for check in causes() if check.value == "silent")
    assert silent.hint == "No jobs are lost. If the machine is gone for good, remove the host."
    [isolation] = health._isolation()
    assert isolation.value == "jobs are isolated from the server and from each other"


@pytest.mark.django_db
def test_a_host_that_is_held_back_is_named_with_its_error() -> None:
    host = make_host("gpu-2")
    for _ in range(3):
        inventory.count_failed_start(host.pk, "No space left on device", timezone.now())
    held = next(check for check in causes() if check.value == "held back")
    assert "No space left on device" in held.hint


@pytest.mark.django_db
def test_a_host_whose_container_engine_fails_is_named_and_not_one_without_a_daemon() -> None:
    away = {"name": "docker", "version": "", "code": "away", "error": "no daemon", "volumes": []}
    make_host("gpu-1", engine=away)
    make_host("gpu-2", engine={**away, "code": "failed", "error": "no space left on device"})
    (held,) = (check for check in causes() if check.value == "containers held back")
    assert held.name == "Host gpu-2"
    assert held.hint.startswith("Docker: it can't be used (no space left on device).")


@pytest.mark.django_db
def test_gpus_that_are_missing_hot_or_unreadable_are_named_by_host() -> None:
    assert not list(health_checks.gpu_checks())
    hosts = [make_host(name, gpus=3) for name in ("gpu-1", "gpu-2", "gpu-3")]
    now_ms = to_ms(timezone.now())
    for host in hosts:
        hot = f"GPU-{hosts[0].name}-1"
        looks = [sample(gpu.uuid, 90, throttle=0x40 if gpu.uuid == hot else 0) for gpu in host.gpus.all()]
        intake.add_snapshot(host, Snapshot(tuple(looks)), now_ms)
    Gpu.objects.filter(host=hosts[1], index=2).update(present=False)
    HostSampling.objects.filter(host=hosts[1]).update(error="GPU 2: GPU is lost")
    HostSampling.objects.filter(host=hosts[2]).update(error="GPU 0: unknown error")
    found = {check.name: (check.tone, check.value, check.hint) for check in health_checks.gpu_checks()}
    assert found == {
        "GPUs of gpu-1": ("wait", "GPU 1 slowed down by heat", ""),
        "GPUs of gpu-2": ("wait", "GPU 2 missing", "GPU 2: GPU is lost"),
        "GPUs of gpu-3": ("wait", "some cannot be read", "GPU 0: unknown error"),
        "GPUs": ("go", "7 in order", ""),
    }
    Host.objects.filter(name="gpu-2").update(silent_s=1e6)
    assert "GPUs of gpu-2" not in {check.name for check in health_checks.gpu_checks()}


@pytest.mark.django_db
def test_causes_are_sorted_by_severity_with_one_line_each(monkeypatch: pytest.MonkeyPatch, project: Project) -> None:
    def away(*_: object) -> None:
        raise ConnectionError("the cache is away")

    monkeypatch.setattr(health, "get_broker", away)
    monkeypatch.setattr(health.Stat, "get_all", away)
    found = checks(project)
    tones = [health.TONES.index(check.tone) for check in found]
    assert tones == sorted(tones, reverse=True)
    assert [check.name for check in found if "the cache is away" in check.hint] == ["Clusters, Broker"]


@pytest.mark.django_db
@pytest.mark.parametrize("language", ["en", "zh-hans"])
@pytest.mark.parametrize(("status", "tone"), [(Conf.IDLE, "go"), (Conf.WORKING, "go"), (Conf.STOPPING, "wait")])
def test_workers_are_well_or_not_in_every_language(project: Project, language: str, status: str, tone: str) -> None:
    reported = Status(1, "dstackweb")
    reported.status, reported.workers, reported.tob = status, [2], timezone.now()
    get_broker().set_stat(Stat.get_key("dstackweb"), SignedPackage.dumps(reported, True), 3)

    with override(language):
        found = [line for line in checks(project) if line.value.startswith(str(status).lower())]

    assert [line.tone for line in found] == [tone]


def storage_check() -> tuple[str, str, str]:
    (check,) = health._storage()
    return check.tone, check.value, check.hint


@pytest.mark.django_db
def test_servers_that_each_keep_logs_on_their_own_disk_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "joined"):
        make_host(name)
    Host.objects.exclude(name="joined").update(cluster="a server's")
    tone, value, hint = storage_check()
    assert (tone, value) == ("bad", "on the disk of each server")
    assert hint.startswith("Each of one, two has only what reached it. Set DSTACKWEB_STORAGE")
    monkeypatch.setattr(settings, "DSTACKWEB_STORAGE", "database")
    assert storage_check() == ("go", "in the database", "")
    monkeypatch.setattr(settings, "DSTACKWEB_STORAGE", "s3://logs/team")
    assert storage_check()[1] == "in object storage"
    monkeypatch.setattr(settings, "DSTACKWEB_STORAGE", "")
    Host.objects.filter(name="two").update(silent_s=1e6)
    assert storage_check() == ("go", "on the server's disk", "")


@pytest.mark.parametrize("kind", [name for name, kind in registry.KINDS.items() if kind.schema.model_fields])
@pytest.mark.django_db
def test_a_backend_whose_stored_settings_are_invalid_is_named_with_what_is_wrong(project: Project, kind: str) -> None:
    Backend.objects.create(name="odd", kind=kind, config={"no_such_setting": 1})
    (line,) = [one for one in checks(project) if one.name == "Backend odd"]
    assert line.tone == "bad"
    assert re.match("Its settings are invalid: `[a-z_]+` ", line.hint)


@pytest.mark.django_db
def test_hosts_that_all_placement_waits_for_after_a_restore_are_named() -> None:
    make_host("gpu-2")
    restored.begin()
    line = next(check for check in causes() if check.name == "Restore")
    assert (line.tone, line.value) == ("wait", "waiting for gpu-2")
