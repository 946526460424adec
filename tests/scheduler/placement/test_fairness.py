"""Weighted shares between projects, in a simulation where every project always wants more."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, strategies as st

from dstackweb.scheduler.placement.limits import ProjectUsage, fair_share_key
from tests.support import examples


def simulate(weights: list[int], total: int, seed: int, steps: int) -> Counter[int]:
    """GPU time per project: runs of one to three GPUs end at random, and whoever's turn it is takes what is free."""
    rnd = random.Random(seed)
    active: list[tuple[int, int]] = []
    used: Counter[int] = Counter()
    wants = [rnd.randint(1, 3) for _ in weights]
    seniority = list(range(len(weights)))
    for step in range(steps):
        active = [job for job in active if rnd.random() > 0.2]
        free, blocked = total - sum(gpus for _, gpus in active), set()
        while len(blocked) < len(weights):
            held = [
                ProjectUsage(gpus=sum(gpus for who, gpus in active if who == project))
                for project in range(len(weights))
            ]
            open_ = [project for project in range(len(weights)) if project not in blocked]
            first = min(
                open_, key=lambda project: fair_share_key(held[project], weights[project], True, seniority[project])
            )
            if wants[first] > free:
                blocked.add(first)
                continue
            active.append((first, wants[first]))
            free -= wants[first]
            wants[first], seniority[first] = rnd.randint(1, 3), len(weights) + step
        for project, gpus in active:
            used[project] += gpus
    return used


@examples(15)
@given(st.integers(0, 10**9))
def test_shares_converge_to_the_weights(seed: int) -> None:
    """R25: 1:2:4 over time, whatever the sizes of the runs and the order of their ends."""
    used = simulate([1, 2, 4], total=70, seed=seed, steps=150)
    whole = used.total()
    for project, weight in enumerate([1, 2, 4]):
        assert abs(used[project] / whole - weight / 7) < 0.05


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9), st.integers(0, 99)), min_size=2),
    st.booleans(),
)
def test_no_project_is_served_before_one_with_less_usage_per_weight(
    projects: list[tuple[int, int, int, int]], asks_gpus: bool
) -> None:
    first = min(projects, key=lambda p: fair_share_key(ProjectUsage(p[0], p[1]), p[2], asks_gpus, p[3]))
    share = [(p[0] if asks_gpus else p[1]) / p[2] for p in projects]
    mine = (first[0] if asks_gpus else first[1]) / first[2]
    assert mine == min(share)
    assert first[3] == min(p[3] for p, other in zip(projects, share, strict=True) if other == mine)
