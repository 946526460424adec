"""What is free of a cluster, beside brute force and beside a cluster that is simulated order by order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dstackweb.backends.contract import Availability, Offer, SourceReading, SourceState
from dstackweb.backends.dask.fit import CPU, MEMORY
from dstackweb.backends.dask.kind import DaskBackend
from dstackweb.backends.models import Backend
from dstackweb.backends.ray.dashboard import Cluster, Node as RayNode
from dstackweb.backends.ray.kind import RayBackend
from dstackweb.backends.slurm.commands import Node as SlurmNode, Partition
from dstackweb.backends.slurm.kind import SlurmBackend
from dstackweb.scheduler.placement.offers import BackendOffers, OfferPlacement, choose_offers
from dstackweb.scheduler.placement.room import PlacedOrder, Room
from dstackweb.spec.effective import EffectiveSpec, Requirements

Size = tuple[int, int, int]
"""CPUs, MiB and GPUs: of a node what it has free, or what an order takes."""
MIB = 1 << 20


def slurm(nodes: Sequence[Size]) -> tuple[Any, Any]:
    there = {
        f"n{at}": SlurmNode(cpus, 0, memory, 0, {"a100": gpus} if gpus else {})
        for at, (cpus, memory, gpus) in enumerate(nodes)
    }
    driver = SlurmBackend(Backend(name="it", config={"partitions": ["main"]}))
    return driver, {"main": Partition("main", up=True, exclusive=False, nodes=there)}


def dask(nodes: Sequence[Size]) -> tuple[Any, Any]:
    workers = [
        {"name": f"w{at}", "threads": 99, "tasks": 0, "cpus_used": 0, "memory_mib": 0, "memory_used_mib": 0,
         "resources": {CPU: float(cpus), MEMORY: float(memory * MIB), "a100": float(gpus)}, "resources_used": {},
         "running": True}
        for at, (cpus, memory, gpus) in enumerate(nodes)
    ]  # fmt: skip
    return DaskBackend(Backend(name="it", config={"scheduler": "tcp://192.0.2.1:1", "gpus": ["a100"]})), workers


def ray(nodes: Sequence[Size]) -> tuple[Any, Any]:
    found = {}
    for at, (cpus, memory, gpus) in enumerate(nodes):
        total = {"CPU": float(cpus), "memory": float(memory * MIB)}
        total |= {"GPU": float(gpus), "accelerator_type:a100": 1.0} if gpus else {}
        found[f"r{at}"] = RayNode(total, dict(total), "a100" if gpus else "")
    return RayBackend(Backend(name="it", config={"address": "http://192.0.2.1:1"})), Cluster(found)


KINDS = (slurm, dask, ray)
Kind = Callable[[Sequence[Size]], tuple[Any, Any]]


def order(size: Size, region: str = "main") -> Offer:
    cpus, memory, gpus = size
    instance_type = "gpu:a100" if gpus else "cpu"
    return Offer("it", instance_type, cpus, memory, Availability.AVAILABLE, region, gpu_count=gpus)


def room_of(kind: Kind, nodes: Sequence[Size], orders: Sequence[PlacedOrder] = (), number: int = 1) -> Room:
    driver, value = kind(nodes)
    return Room.after(driver, SourceReading(SourceState.FRESH, value, number=number), orders)


def less(free: Size, size: Size) -> Size:
    return free[0] - size[0], free[1] - size[1], free[2] - size[2]


def can_pack(nodes: Sequence[Size], orders: Sequence[Size]) -> bool:
    """Brute force: whether all orders fit at once, each on one node, in any way."""
    if not orders:
        return True
    first, rest = orders[0], orders[1:]
    for at, node in enumerate(nodes):
        remaining = less(node, first)
        if min(remaining) >= 0 and can_pack([*nodes[:at], remaining, *nodes[at + 1 :]], rest):
            return True
    return False


nodes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=3)
sizes = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(0, 2)), max_size=6)


@pytest.mark.parametrize("kind", KINDS)
@given(nodes=nodes, wanted=sizes)
def test_what_was_given_fits_at_once_however_shapes_are_mixed(
    kind: Kind, nodes: list[Size], wanted: list[Size]
) -> None:
    room, given_sizes = room_of(kind, nodes), list[Size]()
    for size in wanted:
        if (rest := room.take(order(size))) is not None:
            room, given_sizes = rest, [*given_sizes, size]
    assert can_pack(nodes, given_sizes)


@pytest.mark.parametrize("kind", KINDS)
@given(nodes=nodes, size=st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(0, 2)))
def test_of_equal_orders_all_are_given_that_brute_force_can_pack(kind: Kind, nodes: list[Size], size: Size) -> None:
    count, _rest = room_of(kind, nodes).fill(order(size), 9)
    most = max(number for number in range(10) if can_pack(nodes, [size] * number))
    assert count == most


@pytest.mark.parametrize("kind", KINDS)
@given(nodes=nodes, before=sizes, size=st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(0, 2)))
def test_an_offer_says_how_many_of_its_orders_fit(
    kind: Kind, nodes: list[Size], before: list[Size], size: Size
) -> None:
    room = room_of(kind, nodes, [PlacedOrder(order(one)) for one in before])
    cpus, memory, gpus = size
    needs = Requirements(cpu_min=cpus, memory_min_mib=memory, gpu_count_min=gpus)
    fits = sum(offer.detail["fits"] for offer in room.offers(needs))
    assert room.fill(order(size), 99)[0] == fits


@pytest.mark.parametrize("kind", KINDS)
@given(nodes=nodes, wanted=sizes)
def test_orders_that_a_reading_does_not_count_are_taken_from_it_alone(
    kind: Kind, nodes: list[Size], wanted: list[Size]
) -> None:
    """As if they had been given one after the other; those that it counts are in its numbers already."""
    room = room_of(kind, nodes)
    for size in wanted:
        room = room.take(order(size)) or room
    late = [PlacedOrder(order(size), [None, 5, 6][at % 3]) for at, size in enumerate(wanted)]
    assert room_of(kind, nodes, late, number=5).reading.value == room.reading.value
    early = [PlacedOrder(order(size), 4) for size in wanted]
    assert room_of(kind, nodes, early, number=5).reading.value == room_of(kind, nodes).reading.value


@dataclass
class Cluster1:
    """A cluster of one node, with the rows of the server: each order has an engine side and a row."""

    free: Size
    reading: tuple[int, Size] | None = None
    under_way: tuple[int, Size | None] | None = None
    begun: int = 0
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    numbers: Any = field(default_factory=itertools.count)

    def step(self, what: str, size: Size, which: int) -> None:
        match what:
            case "begin":
                self.begun += 1
                self.under_way = (self.begun, None)
            case "look" if self.under_way:  # the engine answers at any moment of the call
                self.under_way = (self.under_way[0], self.free)
            case "store" if self.under_way and self.under_way[1] is not None:
                self.reading, self.under_way = (self.under_way[0], self.under_way[1]), None
            case "pass" if self.reading:
                room = room_of(slurm, [self.reading[1]], self.placed(), self.reading[0])
                count, _rest = room.fill(order(size), 3)
                for _ in range(count):
                    self.rows[next(self.numbers)] = {"size": size, "there": False, "answered": None, "over": False}
            case "send":
                self.send(which)
            case "answer":
                self.answer(which)
            case "end":
                self.end(which)

    def placed(self) -> list[PlacedOrder]:
        return [PlacedOrder(order(row["size"]), row["answered"]) for row in self.rows.values() if not row["over"]]

    def send(self, which: int) -> None:
        """The engine takes the order; its answer may be lost, and the order is sent again."""
        row = self._row(which, lambda row: row["answered"] is None)
        if row is None or row["there"]:
            return
        row["there"] = True
        self.free = less(self.free, row["size"])
        assert min(self.free) >= 0, "room was given twice"

    def answer(self, which: int) -> None:
        row = self._row(which, lambda row: row["there"] and row["answered"] is None)
        if row is not None:
            row["answered"] = self.begun

    def end(self, which: int) -> None:
        """The job ends at the engine, and its row a moment later: both at once would be kinder."""
        row = self._row(which, lambda row: row["answered"] is not None and row["there"])
        if row is not None and row["there"] != "ended":
            row["there"] = "ended"
            cpus, memory, gpus = row["size"]
            self.free = less(self.free, (-cpus, -memory, -gpus))
        elif row is not None:
            row["over"] = True

    def _row(self, which: int, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        rows = [row for row in self.rows.values() if not row["over"] and fits(row)]
        return rows[which % len(rows)] if rows else None


STEPS = ("begin", "look", "store", "pass", "pass", "send", "send", "answer", "answer", "end", "end")


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(STEPS),
            st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 1)),
            st.integers(0, 9),
        ),
        max_size=80,
    )
)
def test_whatever_happens_when_no_room_is_given_twice(steps: list[tuple[str, Size, int]]) -> None:
    """Passes in a row, calls that take long, answers that come late or never, and ends at any moment."""
    cluster = Cluster1((6, 5, 2))
    for what in ("begin", "look", "store"):
        cluster.step(what, (1, 0, 0), 0)
    for step in steps:
        cluster.step(*step)
    # Once all is answered and read anew, all that is free is given.
    for _ in range(200):
        cluster.send(0)
        cluster.answer(0)
    for what in ("begin", "look", "store"):
        cluster.step(what, (1, 0, 0), 0)
    assert cluster.reading is not None
    free = cluster.reading[1]
    room = room_of(slurm, [free], cluster.placed(), cluster.reading[0])
    assert room.fill(order((1, 0, 0)), 9)[0] == free[0]


def test_two_types_of_gpu_on_one_node_share_its_cpus() -> None:
    """Each offer counts the CPUs as its own: three nodes of a run don't fit."""
    node = SlurmNode(4, 0, 9000, 0, {"a100": 2, "v100": 2})
    driver, _value = slurm([])
    value = {"main": Partition("main", up=True, exclusive=False, nodes={"n1": node})}
    room = Room(driver, SourceReading(SourceState.FRESH, value, number=1))
    spec = EffectiveSpec(commands=("true",), backends=("it",), nodes=3)
    needs = Requirements(cpu_min=2, memory_min_mib=100, gpu_count_min=1)
    spec = spec.model_copy(update={"requirements": needs})
    assert [offer.detail["fits"] for offer in room.offers(needs)] == [2, 2]

    def choose(nodes: int) -> object:
        asked = BackendOffers(tuple(room.offers(needs)), {}, {"it": room})
        return choose_offers(spec.model_copy(update={"nodes": nodes}), asked, {})

    assert not isinstance(choose(3), OfferPlacement)
    pair = choose(2)
    assert isinstance(pair, OfferPlacement)
    assert len(pair) == 2


def test_a_partition_takes_what_its_orders_get_from_others_with_the_same_nodes() -> None:
    driver, value = slurm([(4, 100, 0), (2, 100, 0)])
    value |= {"short": Partition("short", up=True, exclusive=True, nodes={"n1": value["main"].nodes["n1"]})}
    room = Room(driver, SourceReading(SourceState.FRESH, value, number=1))
    whole = room.take(order((1, 1, 0), "short"))
    assert whole is not None, "n1 is empty"
    assert whole.fill(order((1, 1, 0), "main"), 9)[0] == 4, "an exclusive job has all of n1"
    assert whole.take(order((1, 1, 0), "short")) is None


def test_a_refuted_reading_has_no_room() -> None:
    driver, value = slurm([(4, 100, 0)])
    reading = SourceReading(SourceState.FRESH, value, number=3, is_refuted=True)
    [offer] = Room(driver, reading).offers(Requirements(cpu_min=1, memory_min_mib=1))
    assert (offer.availability, offer.detail["fits"]) == (Availability.BUSY, 0)
