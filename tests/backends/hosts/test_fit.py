"""Whether a job fits on a host, beside a reading of the rules by brute force."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from itertools import combinations
from typing import Any

from hypothesis import given, strategies as st

from dstackweb.backends.contract import Availability
from dstackweb.backends.hosts.fit import (
    Fit,
    GpuView,
    HostView,
    Miss,
    could_ever_fit,
    fit,
    host_offers,
    shortfall,
    taken,
)
from dstackweb.spec.effective import Requirements

A100 = "NVIDIA A100-SXM4-40GB"
L4 = "NVIDIA L4"
H100 = "NVIDIA H100 80GB HBM3"
SIZES = {A100: 40960, L4: 23034, H100: 81559}
STRANGER = {"pid": 4711, "user": "ana"}


def needs(cpus: int = 1, memory_mib: int = 256, gpus: int = 0, **more: object) -> Requirements:
    return Requirements(cpu_min=cpus, memory_min_mib=memory_mib, gpu_count_min=gpus, **more)


def gpu(index: int, name: str = A100, *, held: bool = False, stranger: bool = False) -> GpuView:
    return GpuView(f"GPU-{index}", index, name, SIZES[name], held=held, stranger=STRANGER if stranger else None)


def host(*gpus: GpuView, cpus: int = 8, cpus_free: int | None = None, memory_free_mib: int = 16000) -> HostView:
    return HostView(
        id=1,
        name="box",
        online=True,
        draining=False,
        isolation="user",
        cpus=cpus,
        cpus_free=cpus if cpus_free is None else cpus_free,
        memory_mib=16000,
        memory_free_mib=memory_free_mib,
        gpus=gpus,
    )


gpu_views = st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.booleans(), st.booleans()), max_size=6).map(
    lambda drawn: tuple(gpu(n, name, held=held, stranger=strange) for n, (name, held, strange) in enumerate(drawn))
)
hosts = st.builds(
    lambda gpus, cpus, used, free, online, draining, isolation: replace(
        host(*gpus, cpus=cpus, cpus_free=max(0, cpus - used), memory_free_mib=free),
        online=online,
        draining=draining,
        isolation=isolation,
    ),
    gpu_views,
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(0, 16000),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["user", "shared", "none"]),
)
requirements = st.builds(
    lambda cpus, memory, gpus, names, least, most: needs(
        cpus, memory, gpus, gpu_names=tuple(names), gpu_memory_min_mib=least, gpu_memory_max_mib=most
    ),
    st.integers(1, 9),
    st.integers(1, 17000),
    st.integers(0, 4),
    st.lists(st.sampled_from(["A100", "l4", "H100", "V100"]), max_size=2, unique=True),
    st.sampled_from([None, 24 * 1024, 40 * 1024]),
    st.sampled_from([None, 40 * 1024, 80 * 1024]),
)
BRAND = {A100: "a100", L4: "l4", H100: "h100"}
NOMINAL = {A100: 40 * 1024, L4: 24 * 1024, H100: 80 * 1024}


def choices(box: HostView, wanted: Requirements) -> list[tuple[GpuView, ...]]:
    """Every set of GPUs that would do, by trying all of them."""
    return [
        some
        for some in combinations(box.gpus, wanted.gpu_count_min)
        if all(
            not gpu.held
            and gpu.stranger is None
            and (not wanted.gpu_names or BRAND[gpu.name] in [name.lower() for name in wanted.gpu_names])
            and (wanted.gpu_memory_min_mib or 0) <= NOMINAL[gpu.name] <= (wanted.gpu_memory_max_mib or 10**9)
            for gpu in some
        )
    ]


def open_for_jobs(box: HostView) -> bool:
    return box.online and not box.draining and box.isolation != "none"


@given(hosts, requirements)
def test_a_job_fits_exactly_when_some_choice_of_gpus_does(box: HostView, wanted: Requirements) -> None:
    possible = choices(box, wanted)
    room = box.cpus_free >= wanted.cpu_min and box.memory_free_mib >= wanted.memory_min_mib
    made = fit(box, wanted)
    assert isinstance(made, Fit) == (open_for_jobs(box) and room and bool(possible))
    if isinstance(made, Fit):
        assert set(made.gpu_uuids) in [{gpu.uuid for gpu in some} for some in possible]
        assert (made.cpus, made.memory_mib) == (wanted.cpu_min, wanted.memory_min_mib)


@given(hosts, requirements)
def test_the_gpus_chosen_are_alike_where_possible_and_then_the_smallest(box: HostView, wanted: Requirements) -> None:
    made = fit(box, wanted)
    if not isinstance(made, Fit) or not made.gpu_uuids:
        return
    by_uuid = {gpu.uuid: gpu for gpu in box.gpus}

    def cost(some: tuple[GpuView, ...]) -> tuple[int, int]:
        return len({gpu.name for gpu in some}) > 1, sum(gpu.memory_mib for gpu in some)

    assert cost(tuple(by_uuid[uuid] for uuid in made.gpu_uuids)) == min(map(cost, choices(box, wanted)))


@given(hosts, requirements)
def test_an_empty_host_fits_exactly_what_could_ever_fit(box: HostView, wanted: Requirements) -> None:
    assert isinstance(fit(box.emptied, wanted), Fit) == could_ever_fit(box, wanted)


@given(hosts, requirements)
def test_resources_taken_by_a_job_are_unavailable_to_the_next(box: HostView, wanted: Requirements) -> None:
    made = fit(box, wanted)
    if isinstance(made, Miss):
        return
    left = taken(box, made)
    assert left.cpus_free == box.cpus_free - wanted.cpu_min == made.cpus_left
    assert left.memory_free_mib == box.memory_free_mib - wanted.memory_min_mib
    assert sum(gpu.free for gpu in left.gpus) == made.gpus_left
    assert not {gpu.uuid for gpu in left.gpus if gpu.free} & set(made.gpu_uuids)


def test_a_miss_names_the_missing_resources_with_numbers() -> None:
    box = host(gpu(0), gpu(1, held=True), gpu(2, stranger=True), gpu(3, L4), cpus_free=2)
    assert fit(box, needs(cpus=4, gpus=3, gpu_names=("A100",))) == Miss(
        "busy",
        {
            "short": ["gpus", "cpus"],
            "gpus": 3,
            "gpus_free": 1,
            "gpus_held": 1,
            "gpus_outside": 1,
            "gpus_total": 3,
            "cpus": 4,
            "cpus_free": 2,
            "cpus_total": 8,
        },
    )


def test_a_host_that_is_too_small_names_only_resources_it_can_never_have() -> None:
    box = host(gpu(0, held=True), cpus_free=0)
    assert fit(box, needs(cpus=2, memory_mib=16001, gpus=1)) == Miss(
        "too_small",
        {"short": ["memory_mib"], "memory_mib": 16001, "memory_mib_free": 16000, "memory_mib_total": 16000},
    )


def test_the_most_permanent_reason_is_returned() -> None:
    box = replace(host(cpus_free=0), online=False, draining=True, isolation="none")
    steps: list[tuple[Requirements, dict[str, Any]]] = [
        (needs(cpus=64), {}),
        (needs(), {}),
        (needs(), {"isolation": "user"}),
        (needs(), {"online": True}),
        (needs(), {"draining": False}),
    ]
    codes = []
    for wanted, cured in steps:
        box = replace(box, **cured)
        made = fit(box, wanted)
        assert isinstance(made, Miss)
        codes.append(made.code)
    assert codes == ["too_small", "no_isolation", "offline", "draining", "busy"]


def test_the_shown_shortfall_is_that_of_the_closest_host() -> None:
    small = replace(host(gpu(0), gpu(1)), name="small")
    near = replace(host(*(gpu(n, held=n > 2) for n in range(8))), name="near")
    far = replace(host(*(gpu(n, held=True) for n in range(8))), name="far")
    found = shortfall([small, far, near], needs(gpus=4))
    assert found == {
        "host": "near", "short": ["gpus"], "gpus": 4, "gpus_free": 3, "gpus_held": 5, "gpus_outside": 0, "gpus_total": 8
    }  # fmt: skip
    assert shortfall([], needs()) == {}


def test_offers_are_sorted_idle_first_and_then_by_tightest_fit() -> None:
    boxes = [
        replace(host(gpu(0), gpu(1)), id=1, name="roomy"),
        replace(host(gpu(0), gpu(1, held=True)), id=2, name="tight"),
        replace(host(gpu(0, held=True)), id=3, name="busy"),
        replace(host(gpu(0)), id=4, name="closed", draining=True),
        replace(host(), id=5, name="small"),
    ]
    offers = host_offers(boxes, needs(gpus=1))
    assert [(offer.instance_type, offer.availability, offer.detail["code"]) for offer in offers] == [
        ("tight", Availability.IDLE, "idle"),
        ("roomy", Availability.IDLE, "idle"),
        ("busy", Availability.BUSY, "busy"),
        ("closed", Availability.NOT_AVAILABLE, "draining"),
        ("small", Availability.NOT_AVAILABLE, "too_small"),
    ]


def test_an_offer_shows_total_and_free_resources() -> None:
    box = replace(host(gpu(0), gpu(1, held=True), gpu(2, L4), cpus_free=5), labels={"region": "cellar"})
    (offer,) = host_offers([box], needs(gpus=1, gpu_names=("A100",)), backend="own")
    assert (offer.backend, offer.region, offer.instance_type) == ("own", "cellar", "box")
    assert (offer.gpu_name, offer.gpu_count, offer.gpu_memory_mib) == (A100, 2, 40960)
    assert (offer.cpus, offer.memory_mib, offer.price) == (8, 16000, Decimal(0))
    assert offer.detail == {
        "code": "idle", "gpus_free": 1, "gpus_total": 2, "cpus_free": 5, "memory_mib_free": 16000
    }  # fmt: skip


def test_a_container_image_is_refused_where_there_are_no_containers() -> None:
    (offer,) = host_offers([host()], needs(), image="pytorch/pytorch")
    assert offer.availability == Availability.NOT_AVAILABLE
    assert offer.detail == {"code": "image_not_supported", "image": "pytorch/pytorch"}


def test_parts_of_a_card_are_for_jobs_that_want_one_gpu() -> None:
    parts = [replace(gpu(n, A100), uuid=f"MIG-{n}", name=f"{A100} MIG 1g.5gb", memory_mib=4864) for n in range(2)]
    one = fit(host(*parts), needs(gpus=1))
    assert isinstance(one, Fit)
    assert one.gpu_uuids == ("MIG-0",)
    assert isinstance(fit(host(*parts), needs(gpus=2)), Miss)
    two = fit(host(*parts, gpu(2), gpu(3)), needs(gpus=2))
    assert isinstance(two, Fit)
    assert set(two.gpu_uuids) == {"GPU-2", "GPU-3"}
