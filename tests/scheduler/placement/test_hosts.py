"""Placement beside a brute force that tries every way to spread the nodes over the hosts."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, strategies as st

from dstackweb.backends.hosts.fit import GpuView, HostView
from dstackweb.scheduler.placement.hosts import HostPlacement, Wait, place_on_hosts
from dstackweb.spec.effective import EffectiveSpec, Requirements
from tests.support import examples

MODELS = [("NVIDIA A100-SXM4-80GB", 81920), ("NVIDIA GeForce RTX 4090", 24576)]


def often(usual: object, *others: object) -> st.SearchStrategy[object]:
    """Mostly the usual, so that there often is a way."""
    return st.sampled_from([usual] * 4 + list(others))


@st.composite
def host_of(draw: st.DrawFn, number: int) -> HostView:
    cpus, memory = draw(st.integers(2, 6)), draw(st.integers(2, 6)) * 1024
    gpus = tuple(
        GpuView(
            f"{number}-{index}", index, *draw(st.sampled_from(MODELS)),
            held=draw(often(False, True)), stranger=draw(often(None, {"pid": 1, "user": "eve"})),
        )
        for index in range(draw(st.integers(0, 4)))
    )  # fmt: skip
    return HostView(
        number, f"box-{number}", online=draw(often(True, False)), draining=draw(often(False, True)),
        isolation=draw(st.sampled_from(["user", "sandbox", "none"])),
        has_engine=draw(st.booleans()),
        cpus=cpus, cpus_free=draw(often(cpus, 0, 1, 2)), memory_mib=memory,
        memory_free_mib=draw(often(memory, 0, 1024, 2048)), gpus=gpus,
        labels={"region": draw(often("cellar", "attic"))},
    )  # fmt: skip


some_hosts = st.integers(0, 4).flatmap(lambda count: st.tuples(*(host_of(number) for number in range(1, count + 1))))
some_specs = st.builds(
    lambda nodes, needs, image, regions: EffectiveSpec(
        commands=("true",), nodes=nodes, requirements=needs, image=image, regions=regions
    ),
    st.integers(1, 4),
    st.builds(
        Requirements,
        cpu_min=st.integers(1, 3),
        memory_min_mib=st.sampled_from([256, 1024, 2048]),
        gpu_count_min=st.integers(0, 2),
        gpu_names=st.sampled_from([(), ("A100",), ("4090", "A100")]),
    ),
    st.sampled_from([None, "python:3.12"]),
    st.sampled_from([None, ("cellar",)]),
)


def allowed(spec: EffectiveSpec, host: HostView) -> bool:
    in_region = spec.regions is None or host.labels["region"] in spec.regions
    return in_region and (spec.image is None or host.has_engine)


def ready(host: HostView) -> bool:
    return host.online and not host.draining and host.isolation != "none"


def matching(spec: EffectiveSpec, host: HostView) -> list[GpuView]:
    names = spec.requirements.gpu_names
    return [gpu for gpu in host.gpus if not names or any(name in gpu.name for name in names)]


def holds(spec: EffectiveSpec, host: HostView, nodes: int) -> bool:
    """Whether this many nodes fit there together."""
    needs = spec.requirements
    return (
        host.cpus_free >= nodes * needs.cpu_min
        and host.memory_free_mib >= nodes * needs.memory_min_mib
        and sum(gpu.free for gpu in matching(spec, host)) >= nodes * needs.gpu_count_min
    )


def some_way(spec: EffectiveSpec, hosts: list[HostView]) -> bool:
    """Whether any way to spread the nodes over the hosts fits."""
    spreads = itertools.product(range(spec.nodes + 1), repeat=len(hosts))
    return any(
        sum(spread) == spec.nodes and all(holds(spec, host, nodes) for host, nodes in zip(hosts, spread, strict=True))
        for spread in spreads
    )


@examples(300)
@given(some_specs, some_hosts)
def test_a_run_is_placed_whole_whenever_there_is_any_way_and_only_then(
    spec: EffectiveSpec, hosts: tuple[HostView, ...]
) -> None:
    outcome = place_on_hosts(spec, hosts)
    there_is = some_way(spec, [host for host in hosts if allowed(spec, host) and ready(host)])
    assert isinstance(outcome, HostPlacement) == there_is
    if isinstance(outcome, HostPlacement):
        assert len(outcome.fits) == spec.nodes
        check(spec, hosts, outcome)


def check(spec: EffectiveSpec, hosts: tuple[HostView, ...], outcome: HostPlacement) -> None:
    """Nothing is given twice, nobody else's is touched, and what is left is what wasn't taken."""
    needs, by_id = spec.requirements, {host.id: host for host in hosts}
    nodes = Counter(fit.host_id for fit in outcome.fits)
    uuids = [uuid for fit in outcome.fits for uuid in fit.gpu_uuids]
    assert len(set(uuids)) == len(uuids) == spec.nodes * needs.gpu_count_min
    for host in nodes:
        assert allowed(spec, by_id[host])
        assert ready(by_id[host])
    for fit in outcome.fits:
        free = {gpu.uuid for gpu in matching(spec, by_id[fit.host_id]) if gpu.free}
        assert set(fit.gpu_uuids) <= free
    for before, after in zip(hosts, outcome.hosts, strict=True):
        assert after.cpus_free == before.cpus_free - nodes[before.id] * needs.cpu_min >= 0
        assert after.memory_free_mib == before.memory_free_mib - nodes[before.id] * needs.memory_min_mib >= 0
        assert {gpu.uuid for gpu in after.gpus if gpu.held} == {
            gpu.uuid for gpu in before.gpus if gpu.held or gpu.uuid in uuids
        }


@examples(300)
@given(some_specs, some_hosts)
def test_impossible_means_that_empty_hosts_would_not_fit_it_either(
    spec: EffectiveSpec, hosts: tuple[HostView, ...]
) -> None:
    """Offline, drained and busy hosts count as they could be; without any host there is nothing to judge by."""
    outcome = place_on_hosts(spec, hosts)
    at_best = some_way(spec, [host.emptied for host in hosts if allowed(spec, host)])
    says = isinstance(outcome, Wait) and outcome.reason == "impossible"
    assert says == (bool(hosts) and not at_best)


@examples(300)
@given(some_specs, some_hosts)
def test_waiting_for_capacity_means_that_the_present_hosts_would_fit_it_when_empty(
    spec: EffectiveSpec, hosts: tuple[HostView, ...]
) -> None:
    outcome = place_on_hosts(spec, hosts)
    present = [host.emptied for host in hosts if allowed(spec, host) and ready(host)]
    if isinstance(outcome, Wait):
        assert (outcome.reason == "waiting_for_capacity") == some_way(spec, present)
