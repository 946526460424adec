"""Whose turn it is to have a reservation: several at a time, none twice in a row without a start, no run left out."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hypothesis import given, strategies as st

from dstackweb.backends.hosts.fit import HostView
from dstackweb.scheduler.placement.capacity import Capacity
from dstackweb.scheduler.placement.hosts import HostPlacement, Wait, WaitingRun
from dstackweb.scheduler.placement.reservation import (
    MOST_RESERVATIONS,
    HostReservation,
    JobUsage,
    Turns,
    latest_end,
    usable_hosts,
)
from dstackweb.spec.effective import EffectiveSpec
from tests.scheduler.placement.test_reservation import T0, after, host, spec, waiting, with_held
from tests.support import examples

HOUR = 3600.0


def model_host(number: int, model: str, gpus: int = 8) -> HostView:
    box = host(number, cpus=16, gpus=gpus)
    return replace(box, gpus=tuple(replace(gpu, name=f"NVIDIA {model}") for gpu in box.gpus))


def of_model(asked: EffectiveSpec, *models: str) -> EffectiveSpec:
    needs = asked.requirements.model_copy(update={"gpu_names": models or None})
    return asked.model_copy(update={"requirements": needs})


@dataclass
class Cluster:
    """Passes over waiting runs; each placed run holds its hosts until its `max_duration`, or for ever."""

    hosts: list[HostView]
    waiting: list[WaitingRun] = field(default_factory=list)
    held: list[tuple[JobUsage, float | None]] = field(default_factory=list)
    turns: dict[int, HostReservation] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)
    shown_ends: dict[int, set[object]] = field(default_factory=dict)
    now: float = 0

    def submit(self, number: int, asked: EffectiveSpec, queue: int = 1) -> int:
        self.waiting.append(waiting(asked, number, queue, rank=int(self.now), since=self.now))
        return number

    def do_pass(self, at: float) -> None:
        self.now, now = at, after(at)
        self.held = [(usage, end) for usage, end in self.held if end is None or end > at]
        usage = [each for each, _end in self.held]
        capacity = Capacity(
            now=now,
            reserve_after_s=900,
            reserve_for_s=HOUR,
            hosts=with_held(self.hosts, usage),
            read_job_usage=lambda: usage,
            turns=Turns.of(self.turns.values()),
        )
        capacity.review_reservations()
        for run in sorted(self.waiting, key=lambda run: (run.queue_id, run.place)):
            outcome = capacity.decide(run)
            if isinstance(outcome, Wait):
                capacity.reserve_for(run, outcome)
                continue
            assert isinstance(outcome, HostPlacement)
            limit = run.spec.max_duration_s
            ends = latest_end(now, limit, run.spec.stop_duration_s, now)
            for node, fit in enumerate(outcome.fits):
                gpus = frozenset(fit.gpu_uuids)
                job = JobUsage((run.id, node), fit.host_id, fit.cpus, fit.memory_mib, gpus, now, ends)
                self.held.append((job, None if limit is None else at + limit))
            self.started[run.id] = at
            self.waiting.remove(run)
            capacity.take(run, outcome)
        self.turns = capacity.turns.rows
        self._judge(capacity)

    def _judge(self, capacity: Capacity) -> None:
        kept = list(capacity.turns.kept.values())
        ids = [host_id for reserved in kept for host_id in reserved.host_ids]
        assert len(ids) == len(set(ids)), "reservations share no host"
        assert len(kept) <= MOST_RESERVATIONS
        for reserved in kept:
            if reserved.starts_at is None:
                self.shown_ends.setdefault(reserved.run.id, set()).add((reserved.made_at, reserved.expires_at))


def test_seven_gpus_next_to_a_run_without_an_end_are_idle_for_at_most_an_hour() -> None:
    """Six hours: the hold is not repeated, and a run of two minutes starts at once even during it."""
    cluster = Cluster([host(1, cpus=16, gpus=8)])
    cluster.submit(1, spec(gpus=1, limit=None))
    cluster.do_pass(0)
    big = cluster.submit(2, spec(gpus=8, limit=3600))
    for minute in range(20):
        cluster.do_pass(60.0 * minute)
    assert list(cluster.turns) == [big]
    short = cluster.submit(3, spec(gpus=1, limit=120))
    endless = cluster.submit(4, spec(gpus=7, limit=None))
    for minute in range(20, 6 * 60):
        cluster.do_pass(60.0 * minute)
    assert cluster.started[short] == 20 * 60, "it ends before the hold does"
    assert cluster.started[endless] <= 900 + 60 + HOUR + 60, "the hold is over after an hour"
    assert len(cluster.shown_ends[big]) == 1, "the shown end never moves"
    assert big not in cluster.started
    assert cluster.turns[big].lapsed_at is not None, "no other run has had a turn since"


def test_a_run_whose_reservation_lapsed_gets_one_again_once_its_start_is_known() -> None:
    """Short runs that start at once never have a turn of their own: they must not keep it out for ever."""
    cluster = Cluster([host(1, cpus=16, gpus=8)])
    cluster.submit(1, spec(gpus=1, limit=None))
    cluster.do_pass(0)
    big = cluster.submit(2, spec(gpus=8))
    for minute in range(10, 120, 5):
        cluster.do_pass(60.0 * minute)
    assert cluster.turns[big].lapsed_at is not None
    cluster.held = []  # its holder has ended
    for number, minute in enumerate(range(120, 160), start=10):
        cluster.submit(number, spec(gpus=5, limit=300), queue=0)
        cluster.do_pass(60.0 * minute)
    assert cluster.started[big] < 120 * 60 + 2 * 300 + 300


def test_an_h100_run_gets_its_own_while_an_a100_run_holds_one() -> None:
    cluster = Cluster([model_host(1, "A100"), model_host(2, "H100")])
    for number, model in enumerate(("A100", "H100"), start=1):
        cluster.submit(number, of_model(spec(gpus=1, limit=None), model))
    cluster.do_pass(0)
    first = cluster.submit(3, of_model(spec(gpus=8), "A100"))
    second = cluster.submit(4, of_model(spec(gpus=8), "H100"), queue=2)
    cluster.do_pass(36_000)
    assert {run_id: set(row.host_ids) for run_id, row in cluster.turns.items()} == {first: {1}, second: {2}}


def test_a_run_that_needs_hosts_of_two_reservations_gets_its_turn_after_them() -> None:
    """Streams of A100 and of H100 runs, each with its reservation, do not keep out a run that needs both."""
    cluster = Cluster([model_host(1, "A100"), model_host(2, "H100")])
    wide = None
    for step in range(40):
        for queue, model in ((2, "A100"), (3, "H100")):
            cluster.submit(1000 * queue + step, of_model(spec(gpus=8, limit=600), model), queue)
        if step == 4:
            wide = cluster.submit(1, spec(nodes=2, gpus=8, limit=600), queue=1)
        cluster.do_pass(300.0 * step)
    assert wide in cluster.started


def test_a_host_that_is_held_back_is_nothing_to_wait_in_turn_for() -> None:
    """Of two runs that could both use it, neither keeps the other from a turn on the hosts that take jobs."""
    boxes = [replace(model_host(1, "A100"), held_back=True), model_host(2, "H100"), model_host(3, "L40S")]
    cluster = Cluster(boxes)
    for number, model in enumerate(("H100", "L40S"), start=1):
        cluster.submit(number, of_model(spec(gpus=1, limit=None), model))
    cluster.do_pass(0)
    first = cluster.submit(3, of_model(spec(gpus=8), "H100"), queue=1)
    cluster.submit(4, of_model(spec(gpus=8), "A100", "H100"), queue=2)
    third = cluster.submit(5, of_model(spec(gpus=8), "A100", "L40S"), queue=3)
    cluster.do_pass(1000)
    assert {run_id: set(row.host_ids) for run_id, row in cluster.turns.items()} == {first: {2}, third: {3}}


def test_the_number_is_bounded() -> None:
    models = [f"M{number}" for number in range(MOST_RESERVATIONS + 3)]
    cluster = Cluster([model_host(number, model, 2) for number, model in enumerate(models)])
    for number, model in enumerate(models):
        cluster.submit(number, of_model(spec(gpus=1, limit=None), model))
    cluster.do_pass(0)
    for number, model in enumerate(models):
        cluster.submit(100 + number, of_model(spec(gpus=2), model), queue=number)
    cluster.do_pass(1000)
    assert sorted(cluster.turns) == [100 + number for number in range(MOST_RESERVATIONS)]


def random_cluster(seed: int) -> Cluster:
    """Some hours of runs with honest ends in three queues, on hosts of two models."""
    rnd = random.Random(seed)
    hosts = [model_host(n, rnd.choice(["A100", "H100"]), rnd.choice([2, 4])) for n in range(1, rnd.randint(3, 5))]
    cluster = Cluster(hosts)
    for step in range(60):
        for _ in range(rnd.choice([0, 1, 2])):
            models = rnd.choice([("A100",), ("H100",), ()])
            asked = of_model(spec(rnd.choice([1, 1, 2]), rnd.randint(1, 4), 1, rnd.choice([300, 900, 3000])), *models)
            empty = Capacity(now=T0, reserve_after_s=0, reserve_for_s=0, hosts=hosts)
            run = waiting(asked, 0)
            if isinstance(empty.decide(run), HostPlacement):
                cluster.submit(len(cluster.started) + len(cluster.waiting) + 1, asked, rnd.choice([1, 2, 3]))
        cluster.do_pass(300.0 * step)
    return cluster


@examples(20, quick=3)
@given(st.integers(0, 10**9))
def test_no_run_starves_and_reservations_stay_few_and_disjoint(seed: int) -> None:
    """Once no more runs are submitted, all that ever fit have started after a bounded time."""
    cluster = random_cluster(seed)
    step = 60
    while cluster.waiting:
        step += 1
        cluster.do_pass(300.0 * step)
        assert step < 60 + 12 * 120, f"still waiting: {cluster.waiting}"


@examples(100, quick=20)
@given(st.integers(0, 10**9))
def test_a_run_gets_a_reservation_exactly_if_none_of_its_hosts_is_reserved(seed: int) -> None:
    """Beside brute force: the first runs in order, of whose hosts none is reserved or wanted by one before."""
    rnd = random.Random(seed)
    models = ["A100", "H100", "L40S", "V100", "T4", "B200"]
    hosts = [model_host(n, rnd.choice(models), 2) for n in range(1, rnd.randint(2, 8))]
    holders = [
        JobUsage((100 + box.id, 0), box.id, 1, 256, frozenset({box.gpus[0].uuid}), T0, rnd.choice([None, after(5000)]))
        for box in hosts
    ]
    runs = [
        waiting(of_model(spec(gpus=2), *rnd.sample(models, rnd.randint(1, 3))), n, queue=n, since=-5000)
        for n in range(1, 9)
    ]
    capacity = Capacity(
        now=T0, reserve_after_s=900, reserve_for_s=HOUR, hosts=with_held(hosts, holders), read_job_usage=lambda: holders
    )
    expected: dict[int, set[int]] = {}
    taken: set[int] = set()
    for run in runs:
        mine = {box.id for box in hosts if any(name in box.gpus[0].name for name in run.spec.requirements.gpu_names)}
        assert mine == usable_hosts(run, hosts)
        outcome = capacity.decide(run)
        assert isinstance(outcome, Wait)
        made = capacity.reserve_for(run, outcome)
        if mine and not mine & taken and len(expected) < MOST_RESERVATIONS:
            expected[run.id] = mine
            assert made is not None
        else:
            assert made is None
        taken |= made.host_ids if made else mine
    assert set(capacity.turns.kept) == set(expected)
    for run_id, reserved in capacity.turns.kept.items():
        assert reserved.host_ids <= expected[run_id]
