"""Forecasts beside a deployment in which the real decisions are made at each end, one run after the other."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

from hypothesis import given, strategies as st

from dstackweb.backends.hosts.fit import GpuView, HostView
from dstackweb.scheduler.placement.capacity import Capacity
from dstackweb.scheduler.placement.forecast import NEVER, SimulatedStarts, simulate
from dstackweb.scheduler.placement.hosts import HostPlacement, WaitingRun
from dstackweb.scheduler.placement.limits import (
    ProjectUsage,
    QueueLimits,
    QueueUsage,
    fair_share_key,
    gpus_requested,
)
from dstackweb.scheduler.placement.reservation import JobUsage
from dstackweb.scheduler.placement.scenario import HoldingRun, QueuedRun, QueueView, Scenario, Site
from dstackweb.spec.effective import EffectiveSpec, Requirements
from tests.scheduler.placement.test_reservation import T0, with_held
from tests.support import examples

MODELS = (("NVIDIA A100-SXM4-40GB", 40960), ("NVIDIA A100-SXM4-80GB", 81920), ("NVIDIA L4", 24576))


def box(number: int, cpus: int, *gpus: int, **fields: object) -> HostView:
    """A host; `gpus` are indexes into MODELS."""
    views = tuple(GpuView(f"{number}-{i}", i, *MODELS[model]) for i, model in enumerate(gpus))
    values: dict[str, object] = {"online": True, "draining": False, "isolation": "user", "memory_free_mib": 8192}
    return HostView(number, f"box-{number}", cpus=cpus, cpus_free=cpus, memory_mib=8192, gpus=views, **values | fields)


def needs(cpus: int = 1, gpus: int = 0, nodes: int = 1, name: str = "") -> EffectiveSpec:
    wanted = Requirements(cpu_min=cpus, gpu_count_min=gpus, gpu_names=(name,) if name else ())
    return EffectiveSpec(commands=("true",), nodes=nodes, requirements=wanted)


@dataclass
class World:
    """What is placed and what waits. `took` has the seconds that each run lasts, by id; placed ones from now."""

    hosts: list[HostView]
    limits: dict[int, QueueLimits] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    """By project. Queue n is of project (n + 1) // 2."""
    placed: list[tuple[WaitingRun, list[JobUsage]]] = field(default_factory=list)
    waiting: list[WaitingRun] = field(default_factory=list)
    took: dict[int, float] = field(default_factory=dict)

    def add(self, spec: EffectiveSpec, took: float, queue: int = 1, user: int = 1, rank: int | None = None) -> None:
        number = len(self.waiting) + 1
        project = (queue + 1) // 2
        place = number if rank is None else rank
        self.waiting.append(WaitingRun(number, f"run-{number}", project, f"p{project}", queue, user, place, T0, spec))
        self.took[number] = took

    def hold(self, spec: EffectiveSpec, took: float, queue: int = 1, user: int = 1) -> None:
        """Place a run where it fits, if it does."""
        number, project = 1000 + len(self.placed), (queue + 1) // 2
        run = WaitingRun(number, f"run-{number}", project, f"p{project}", queue, user, number, T0, spec)
        made = Capacity(T0, NEVER, 0, self._now()).decide(run)
        if isinstance(made, HostPlacement):
            self.placed.append((run, _usage(run, made)))
            self.took[number] = took

    def _now(self) -> list[HostView]:
        return with_held(self.hosts, [used for _run, each in self.placed for used in each])

    def forecast(self) -> dict[int, float]:
        """The start of each waiting run in seconds, as the simulation has it."""
        scenario, starts = self.simulated()
        return {run.id: at for run, at in zip(scenario.runs, starts.at, strict=True)}

    def simulated(self, first: int | None = None) -> tuple[Scenario, SimulatedStarts]:
        usage = [used for _run, each in self.placed for used in each]
        site = Site(self._now(), usage)
        specs = list({run.spec.model_dump_json(): run.spec for run in self.waiting}.values())
        number_of = {spec.model_dump_json(): number for number, spec in enumerate(specs)}
        placed = [
            HoldingRun(
                run.id, run.queue_id, run.user_id, run.project_id, gpus_requested(run.spec),
                tuple(held for used in each if (held := site.holding(used)) is not None),
            )
            for run, each in self.placed
        ]  # fmt: skip
        queues = [
            QueueView(
                queue, (queue + 1) // 2, self.weights.get((queue + 1) // 2, 1), self.limits.get(queue, QueueLimits()),
                [
                    QueuedRun(run.id, run.rank, run.rank, run.user_id, number_of[run.spec.model_dump_json()])
                    for run in sorted(self.waiting, key=lambda run: run.place)
                    if run.queue_id == queue
                ],
            )
            for queue in sorted({run.queue_id for run in self.waiting})
        ]  # fmt: skip
        scenario = Scenario(site, [site.demand(spec) for spec in specs], placed, queues)
        lengths = [self.took[run.id] for run in scenario.runs]
        return scenario, simulate(scenario, lengths, [self.took[run.id] for run, _each in self.placed], first)

    def truth(self) -> dict[int, float]:
        """The same by real decisions at each end: on every waiting run but those of a shape that waits already."""
        now, found = 0.0, {run.id: NEVER for run in self.waiting}
        active = [(self.took[run.id], run, each) for run, each in self.placed]
        queues: dict[int, list[WaitingRun]] = defaultdict(list)
        for run in sorted(self.waiting, key=lambda run: run.place):
            queues[run.queue_id].append(run)
        while True:
            self._do_pass(now, queues, active, found)
            if not (ends := [end for end, _run, _each in active if end < NEVER]):
                return found
            now = min(ends)
            active[:] = [one for one in active if one[0] > now]

    def _do_pass(
        self,
        now: float,
        queues: dict[int, list[WaitingRun]],
        active: list[tuple[float, WaitingRun, list[JobUsage]]],
        found: dict[int, float],
    ) -> None:
        usage = [used for _end, _run, each in active for used in each]
        capacity = Capacity(
            T0, NEVER, 0, with_held(self.hosts, usage), limits=self.limits,
            queue_usage=QueueUsage.of((run.queue_id, run.user_id, gpus_requested(run.spec)) for _e, run, _u in active),
        )  # fmt: skip
        held: dict[int, ProjectUsage] = defaultdict(ProjectUsage)
        for _end, run, each in active:
            held[run.project_id] = _more(held[run.project_id], each)
        todo = {queue: list(runs) for queue, runs in queues.items() if runs}
        while todo := {queue: runs for queue, runs in todo.items() if runs}:
            queue = min(todo, key=lambda queue: self._turn(todo[queue][0], held))
            run = todo[queue].pop(0)
            made = capacity.decide(run)
            if isinstance(made, HostPlacement):
                capacity.take(run, made)
                used = _usage(run, made)
                held[run.project_id] = _more(held[run.project_id], used)
                active.append((now + self.took[run.id], run, used))
                queues[queue].remove(run)
                found[run.id] = now
            else:
                alike = self._shape(run)
                todo[queue] = [one for one in todo[queue] if self._shape(one) != alike]

    def _shape(self, run: WaitingRun) -> str:
        """Whose runs a pass skips once one of them waits: limits are why it keeps members apart."""
        is_limited = self.limits.get(run.queue_id, QueueLimits()) != QueueLimits()
        return run.spec.shape_key(run.user_id if is_limited else 0)

    def _turn(self, run: WaitingRun, held: dict[int, ProjectUsage]) -> tuple[float, int]:
        weight = self.weights.get(run.project_id, 1)
        return fair_share_key(held[run.project_id], weight, run.spec.requirements.gpu_count_min > 0, run.rank)


def _usage(run: WaitingRun, made: HostPlacement) -> list[JobUsage]:
    return [
        JobUsage((run.id, node), fit.host_id, fit.cpus, fit.memory_mib, frozenset(fit.gpu_uuids), T0, None)
        for node, fit in enumerate(made.fits)
    ]


def _more(held: ProjectUsage, each: list[JobUsage]) -> ProjectUsage:
    return held.plus(gpus=sum(len(used.gpus) for used in each), cpus=sum(used.cpus for used in each))


def world(rnd: random.Random) -> World:
    """Few hosts of several GPU models, two projects with two queues each, limits, and runs of up to three nodes."""
    hosts = [
        box(
            number, rnd.randint(1, 6), *sorted(rnd.randrange(3) for _ in range(rnd.randint(0, 4))),
            online=rnd.random() < 0.9, draining=rnd.random() < 0.1,
        )
        for number in range(1, rnd.randint(2, 5))
    ]  # fmt: skip
    hosts = [replace(one, gpus=tuple(_maybe_used(gpu, rnd) for gpu in one.gpus)) for one in hosts]
    limits = {
        queue: QueueLimits(*(rnd.choice([None, None, None, None, rnd.randint(0, 5)]) for _ in range(4)))
        for queue in range(1, 5)
    }
    made = World(hosts, limits, {1: 1, 2: rnd.randint(1, 3)})
    asked = [
        needs(
            rnd.randint(1, 3), rnd.choice([0, 1, 1, 2, 3]), rnd.choice([1, 1, 1, 2, 3]), rnd.choice(["", "A100", "L4"])
        )
        for _ in range(rnd.randint(1, 5))
    ]  # fmt: skip
    queues = rnd.sample(range(1, 5), rnd.randint(1, 4))
    if len(queues) > 1:
        # Where several queues wait, GPUs and CPUs are compared apart, and in a pass a run that goes on waiting decides
        # when its queue has its turn: see the decision record.
        asked = [needs(one.requirements.cpu_min, 1, one.nodes) for one in asked]
    for _ in range(rnd.randint(0, 6)):
        made.hold(rnd.choice(asked), _length(rnd), rnd.randint(1, 4), rnd.randint(1, 2))
    ranks = rnd.sample(range(100), 14)
    for rank in ranks[: rnd.randint(1, 14)]:
        made.add(rnd.choice(asked), _length(rnd), rnd.choice(queues), rnd.randint(1, 2), rank)
    return made


def _maybe_used(gpu: GpuView, rnd: random.Random) -> GpuView:
    return replace(gpu, stranger={"pid": 1, "user": "eve"}) if rnd.random() < 0.05 else gpu


def _length(rnd: random.Random) -> float:
    return NEVER if rnd.random() < 0.05 else float(rnd.randint(1, 20))


@given(st.randoms(use_true_random=False))
@examples(1000, quick=100)
def test_runs_start_when_real_passes_would_start_them(rnd: random.Random) -> None:
    made = world(rnd)
    assert made.forecast() == made.truth()


@given(st.randoms(use_true_random=False), st.integers(1, 4))
@examples(300)
def test_the_first_of_each_queue_are_the_same_without_the_rest(rnd: random.Random, first: int) -> None:
    made = world(rnd)
    scenario, part = made.simulated(first)
    _scenario, whole = made.simulated()
    for queue, begin in zip(scenario.queues, scenario.first_of, strict=True):
        end = begin + min(first, len(queue.runs))
        assert part.at[begin:end] == whole.at[begin:end]


@given(st.randoms(use_true_random=False))
@examples(300)
def test_without_a_run_ahead_no_run_of_the_same_size_starts_later(rnd: random.Random) -> None:
    """Of one size only: with several, a run may wait longer because another one took its place earlier."""
    made = World([box(1, 8, *[1] * rnd.randint(1, 4)), box(2, 8, *[1] * rnd.randint(0, 3))])
    for _ in range(rnd.randint(0, 5)):
        made.hold(needs(1, 1), _length(rnd))
    for _ in range(rnd.randint(2, 12)):
        made.add(needs(1, 1), _length(rnd))
    before = made.forecast()
    gone = made.waiting.pop(rnd.randrange(len(made.waiting)))
    assert all(at <= before[run_id] for run_id, at in made.forecast().items() if run_id != gone.id)


def test_a_chain_of_known_durations_starts_to_the_second() -> None:
    made = World([box(1, 4, 1, 1)])
    made.hold(needs(1, 2), 100)
    for took in (30, 50, 7):
        made.add(needs(1, 1), took)
    assert made.forecast() == {1: 100, 2: 100, 3: 130}


def test_the_cause_is_the_run_whose_end_made_room() -> None:
    made = World([box(1, 4, 1)])
    made.hold(needs(1, 1), 100)
    made.add(needs(1, 1), 30)
    made.add(needs(1, 1), 30)
    made.add(needs(1, 0), 30)
    _scenario, starts = made.simulated()
    assert starts.cause == [-1, 0, None]


def test_behind_a_run_without_an_end_nothing_starts() -> None:
    made = World([box(1, 4, 1)])
    made.hold(needs(1, 1), NEVER)
    made.add(needs(1, 1), 30)
    assert made.forecast() == {1: NEVER}
