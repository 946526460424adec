"""A project's runs go to hosts that isolate jobs as it requires, and say so where none does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dstackweb.backends.contract import PlaceCode
from dstackweb.backends.hosts.fit import HostView
from dstackweb.scheduler.placement.hosts import HostPlacement, Wait, host_refusal, place_on_hosts
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.wording.waiting import reason

HOSTS = ("shared", "user", "project", "sandbox")


def host(number: int, isolation: str) -> HostView:
    return HostView(
        id=number,
        name=isolation,
        online=True,
        draining=False,
        isolation=isolation,
        cpus=8,
        cpus_free=8,
        memory_mib=8192,
        memory_free_mib=8192,
    )


def outcome(least: str, *isolations: str) -> HostPlacement | Wait:
    spec = EffectiveSpec(commands=("true",), least_isolation=least)
    return place_on_hosts(spec, [host(number, one) for number, one in enumerate(isolations)])


@pytest.mark.parametrize("least", ["", *HOSTS])
@pytest.mark.parametrize("isolation", HOSTS)
def test_a_host_gets_a_projects_runs_if_it_isolates_them_enough(least: str, isolation: str) -> None:
    enough = not least or HOSTS.index(isolation) >= HOSTS.index(least)
    assert isinstance(outcome(least, isolation), HostPlacement) == enough


def test_the_run_goes_to_the_host_that_is_strong_enough() -> None:
    made = outcome("project", "user", "sandbox", "shared")
    assert isinstance(made, HostPlacement)
    assert [fit.host_name for fit in made.fits] == ["sandbox"]


def test_a_run_that_no_host_isolates_enough_says_what_its_project_requires() -> None:
    made = outcome("sandbox", "user", "project")
    assert isinstance(made, Wait)
    text = reason(made.reason, made.data).text
    assert text == (
        "its project requires hosts with this isolation or a stronger one: "
        "a sandbox for each job, and a user for each project"
    )


def test_a_run_with_volumes_gets_a_host_that_lists_them() -> None:
    spec = EffectiveSpec(image="python:3.12", volumes=("/data/sets:/sets", "/scratch:/s:rw"))
    none, some, both = (
        replace(host(number, "project"), name=f"box-{number}", has_engine=True, volumes=volumes)
        for number, volumes in enumerate([(), ("/data",), ("/data", "/scratch:rw")], 1)
    )
    placed = place_on_hosts(spec, [none, some, both])
    assert isinstance(placed, HostPlacement)
    assert placed.fits[0].host_name == "box-3"
    wait = place_on_hosts(spec, [none, some])
    assert isinstance(wait, Wait)
    assert wait.data["volumes"] == ["/scratch"]
    assert "no host lets jobs mount /scratch" in reason(wait.reason, wait.data).text


def test_a_project_that_requires_containers_needs_an_image() -> None:
    docker = replace(host(1, "project"), has_engine=True)
    plain = EffectiveSpec(commands=("true",), least_isolation="container")
    assert host_refusal(plain, docker) is PlaceCode.TOO_LITTLE_ISOLATION
    assert host_refusal(plain.model_copy(update={"image": "python:3.12"}), docker) is None
