"""Runs that ask for labels go to hosts that have them, and say so in words where none has (R25, R26)."""

from __future__ import annotations

import pytest

from dstackweb.backends.hosts.fit import HostView
from dstackweb.scheduler.placement.hosts import HostPlacement, Wait, place_on_hosts
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.wording.waiting import reason


def host(name: str, **labels: str) -> HostView:
    return HostView(
        id=sum(map(ord, name)),
        name=name,
        online=True,
        draining=False,
        isolation="user",
        cpus=8,
        cpus_free=8,
        memory_mib=8192,
        memory_free_mib=8192,
        labels=labels,
    )


def outcome(hosts: list[HostView], nodes: int = 1, **labels: tuple[str, ...]) -> HostPlacement | Wait:
    return place_on_hosts(EffectiveSpec(commands=("true",), nodes=nodes, labels=labels), hosts)


def why(hosts: list[HostView], **labels: tuple[str, ...]) -> str:
    made = outcome(hosts, **labels)
    assert isinstance(made, Wait)
    assert made.reason == "impossible"
    return reason(made.reason, made.data).text


def test_a_run_is_placed_on_a_host_with_all_its_labels() -> None:
    hosts = [host("a", disk="nvme"), host("b", disk="nvme", region="eu"), host("c", region="eu")]
    made = outcome(hosts, disk=("nvme", "ssd"), region=("eu",))
    assert isinstance(made, HostPlacement)
    assert [fit.host_name for fit in made.fits] == ["b"]


def test_every_node_needs_them() -> None:
    made = outcome([host("a", disk="nvme"), host("b")], nodes=12, disk=("nvme",))
    assert isinstance(made, Wait)
    assert made.data["nodes_placed"] == 8


@pytest.mark.parametrize(
    ("names", "labels", "text"),
    [
        ("abc", {"disk": ("nvme",)}, "none of 3 hosts has the label disk=nvme"),
        ("abc", {"disk": ("nvme", "ssd")}, "none of 3 hosts has the label disk=nvme|ssd"),
        ("abc", {"disk": ("nvme",), "x": ("y",)}, "none of 3 hosts has any of the labels disk=nvme, x=y"),
        ("a", {"disk": ("nvme",)}, "the only host lacks the label disk=nvme"),
    ],
)
def test_a_label_that_no_host_has_is_named(names: str, labels: dict[str, tuple[str, ...]], text: str) -> None:
    assert why([host(name, region="eu") for name in names], **labels) == text


def test_labels_that_no_single_host_has_together_are_named() -> None:
    hosts = [host("a", disk="nvme"), host("b", region="eu")]
    assert why(hosts, disk=("nvme",), region=("eu",)) == "no host matches all of disk=nvme, region=eu"
