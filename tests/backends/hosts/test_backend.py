"""The hosts backend through the contract that all backends keep."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from django.conf import settings
from django.test import override_settings

from dstackweb.backends import registry
from dstackweb.backends.contract import Availability, Backend, LaunchSpec, Presence, StartFailed
from dstackweb.backends.hosts import local
from dstackweb.backends.hosts.inventory import ensure_embedded_backend
from dstackweb.backends.models import Backend as BackendRow
from dstackweb.spec.effective import Requirements
from tests import factories
from tests.backends.job_api import JobApi
from tests.support import eventually

pytestmark = pytest.mark.django_db


@pytest.fixture
def hosts() -> Backend:
    return registry.driver(ensure_embedded_backend())


@pytest.fixture
def api(open_home: Path) -> Iterator[JobApi]:
    with override_settings(DSTACKWEB_HOME=open_home):
        api = JobApi("echo up; sleep 60")
        yield api
        eventually(lambda: local.kill_job(api.job))
        api.close()


def launch_spec(api: JobApi) -> LaunchSpec:
    return LaunchSpec(api.job, api.run, 0, api.url, "token")


def host_here(open_home: Path, name: str | None = None) -> int:
    return factories.make_host(name or settings.DSTACKWEB_HOST_NAME, runs_dir=str(open_home / "runs")).pk


def test_each_host_is_an_offer_without_a_price(hosts: Backend) -> None:
    factories.make_host("box", cpus=4, gpus=2)
    (offer,) = hosts.offers(Requirements(gpu_count_min=1))
    assert (offer.backend, offer.instance_type, offer.availability) == ("hosts", "box", Availability.IDLE)
    assert (offer.cpus, offer.gpu_count, offer.price, offer.spot) == (4, 2, Decimal(0), False)


def test_a_job_is_started_observed_and_killed(hosts: Backend, api: JobApi, open_home: Path) -> None:
    hosts.start(launch_spec(api), host_here(open_home))
    eventually(lambda: b"up" in api.log)
    assert hosts.observe(api.job) == Presence.ALIVE
    assert (open_home / "runs" / str(api.run) / "node-0").is_dir()
    assert hosts.stop(api.job, None)
    assert hosts.observe(api.job) == Presence.GONE


def test_a_stop_with_grace_makes_the_runner_send_its_heartbeat_at_once(
    hosts: Backend, api: JobApi, open_home: Path
) -> None:
    hosts.start(launch_spec(api), host_here(open_home))
    eventually(lambda: b"up" in api.log)
    api.stop = {"action": "stop", "grace_s": 1, "reason": "terminated_by_user"}
    assert not hosts.stop(api.job, 1)
    eventually(lambda: hosts.observe(api.job) == Presence.GONE)
    assert hosts.stop(api.job, 1)


def test_a_job_of_another_machine_is_not_started_here(hosts: Backend, api: JobApi, open_home: Path) -> None:
    with pytest.raises(StartFailed, match="belongs on elsewhere"):
        hosts.start(launch_spec(api), host_here(open_home, name="elsewhere"))
    assert not local.state_dir(api.job).exists()


def test_a_kind_that_nothing_serves_is_named() -> None:
    with pytest.raises(registry.UnknownKind, match="unheard"):
        registry.driver(BackendRow(name="cluster", kind="unheard"))
