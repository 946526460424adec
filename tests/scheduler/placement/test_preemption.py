"""Who is displaced, beside brute force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import combinations

from hypothesis import given, strategies as st

from dstackweb.backends.hosts.fit import HostView
from dstackweb.scheduler.placement.displacing import DAY, HOUR_MS, WorkBudget, choose_victims, displaceable
from dstackweb.scheduler.placement.hosts import HostPlacement, PlacedRun, place_on_hosts
from dstackweb.scheduler.placement.reservation import JobUsage
from dstackweb.spec.effective import EffectiveSpec
from tests.scheduler.placement.test_reservation import after, host, spec, waiting, with_held
from tests.support import examples


def placed(number: int, priority: int = 10, since: float = 0, rank: int = 100) -> PlacedRun:
    return PlacedRun(number, f"victim-{number}", 1, "ann", 1, rank, priority, after(since), 20, 1)


def holding(run: int, box: int, gpus: Sequence[str] = (), cpus: int = 1, *, stopping: bool = False) -> JobUsage:
    return JobUsage((run, box), box, cpus, 256, frozenset(gpus), after(0), None, stopping)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[HostView], list[JobUsage], list[PlacedRun]]:
    """Hosts, and runs on one or several of them, of which some are already stopping."""
    hosts = [host(n, cpus=draw(st.integers(1, 4)), gpus=draw(st.integers(0, 3))) for n in (1, 2, 3)]
    left = {box.id: (box.cpus, [gpu.uuid for gpu in box.gpus]) for box in hosts}
    holders, runs = [], []
    for number in range(100, 100 + draw(st.integers(0, 6))):
        stopping = draw(st.integers(0, 4)) == 0
        for box in draw(st.sets(st.integers(1, 3), min_size=1)):
            cpus, gpus = left[box]
            if cpus:
                takes = draw(st.integers(0, len(gpus)))
                holders.append(holding(number, box, gpus[:takes], stopping=stopping))
                left[box] = cpus - 1, gpus[takes:]
        runs.append(placed(number, draw(st.integers(0, 3)), draw(st.integers(0, 2))))
    return hosts, holders, runs


@examples(300)
@given(st.builds(spec, st.integers(1, 3), st.integers(0, 2), st.integers(1, 3)), worlds())
def test_the_most_protected_runs_are_spared_and_what_is_stopped_is_enough(
    asked: EffectiveSpec, world: tuple[list[HostView], list[JobUsage], list[PlacedRun]]
) -> None:
    hosts, holders, runs = world
    there = {holder.job[0] for holder in holders if not holder.stopping}
    runs = [run for run in runs if run.id in there]

    def fits(stopped: Sequence[PlacedRun]) -> bool:
        ids = {run.id for run in stopped}
        left = [holder for holder in holders if not holder.stopping and holder.job[0] not in ids]
        return isinstance(place_on_hosts(asked, with_held(hosts, left)), HostPlacement)

    chosen = choose_victims(waiting(asked), runs, with_held(hosts, holders), holders)
    enough = [list(some) for n in range(len(runs) + 1) for some in combinations(runs, n) if fits(some)]
    protected = sorted(runs, key=lambda run: run.protection, reverse=True)
    best = min(enough, key=lambda some: [run in some for run in protected], default=[])
    assert {run.id for run in chosen} == {run.id for run in best}
    assert not any(fits([run for run in chosen if run != spared]) for spared in chosen)


def test_only_runs_behind_it_with_so_many_points_less_may_be_displaced() -> None:
    run = waiting(spec(), rank=50)
    runs = [
        placed(1, priority=30, rank=51),
        placed(2, priority=31, rank=51),
        placed(3, priority=30, rank=49),
    ]
    assert [one.id for one in displaceable(run, 50, 20, runs)] == [1]


def test_of_equal_priority_the_latest_start_is_displaced() -> None:
    hosts = [host(1, gpus=2)]
    holders = [holding(1, 1, ["1-0"]), holding(2, 1, ["1-1"])]
    runs = [placed(1, since=60), placed(2, since=0)]
    chosen = choose_victims(waiting(spec(gpus=1)), runs, with_held(hosts, holders), holders)
    assert [one.id for one in chosen] == [1]


def test_a_run_on_two_hosts_is_displaced_whole_for_one_of_them_only_if_need_be() -> None:
    hosts = [host(1, gpus=1), host(2, gpus=1), host(3, gpus=1)]
    gang = [holding(1, 1, ["1-0"]), holding(1, 2, ["2-0"])]
    alone = holding(2, 3, ["3-0"])
    runs = [placed(1, priority=5), placed(2, priority=1)]
    held = with_held(hosts, [*gang, alone])
    assert [one.id for one in choose_victims(waiting(spec(gpus=1)), runs, held, [*gang, alone])] == [2]
    assert [one.id for one in choose_victims(waiting(spec(nodes=2, gpus=1)), runs, held, [*gang, alone])] == [1]


def test_nobody_is_displaced_where_that_does_not_help_or_a_run_is_ending_already() -> None:
    hosts = [host(1, gpus=2)]
    stuck, ending = holding(7, 1, ["1-0"]), holding(8, 1, ["1-1"], stopping=True)
    held = with_held(hosts, [stuck, ending])
    assert choose_victims(waiting(spec(gpus=2)), [], held, [stuck, ending]) == []
    assert choose_victims(waiting(spec(gpus=1)), [placed(7)], held, [stuck, ending]) == []


@examples(200)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 5)), max_size=6),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), min_size=1, max_size=3),
)
def test_a_budget_of_work_allows_a_preemption_from_the_first_minute_that_a_search_finds(
    hours: int, displaced: list[tuple[int, int]], victims: list[tuple[int, int]]
) -> None:
    """Displaced runs as (minutes ago, GPU-hours), victims as (minutes since their start, GPUs)."""
    now = after(1_000_000)
    past = [(now - timedelta(minutes=ago), gpu_hours * HOUR_MS) for ago, gpu_hours in displaced]
    runs = [
        replace(placed(number), since=now - timedelta(minutes=minutes), gpus=gpus)
        for number, (minutes, gpus) in enumerate(victims)
    ]

    def is_within(minutes: int) -> bool:
        at = now + timedelta(minutes=minutes)
        recent = sum(hours for ago, hours in displaced if ago + minutes < 24 * 60)
        held = sum(max(gpus, 1) * (since + minutes) / 60 for since, gpus in victims)
        return at >= now and recent + held <= hours + 1e-9

    found = WorkBudget.of(hours, past, runs, now)
    first = next((minutes for minutes in range(24 * 60 + 1) if is_within(minutes)), None)
    assert found.allowed_at == (None if first is None else now + timedelta(minutes=first))
    assert found.displaced_ms == sum(gpu_ms for at, gpu_ms in past if at > now - DAY)
