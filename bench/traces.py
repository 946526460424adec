"""Jobs like those of public traces of GPU clusters, replayed through the scheduler's decisions with several policies.

    python -m bench.traces [JOBS [SEEDS [HOSTS [LOAD]]]]

Drawn from the published distributions of Philly and Helios (bench/replay/jobs.py, which names them), so many jobs for
each seed, on hosts with eight GPUs of which they need the share LOAD on average. Time is simulated: months take
minutes. Prints hours waited by size and by member, GPU use, fairness, and what preemption cost; then how the estimates
of starts did. Each policy has what those above it have, but for the baselines: "FIFO, no one passes", and "shortest
first, known ahead", which no scheduler can know. Cells: the median of the seeds, and between the least and the most.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import median
from typing import TYPE_CHECKING

from bench import sides

if TYPE_CHECKING:
    from bench.replay.deployment import Policy
    from bench.replay.figures import Figures
    from bench.replay.forecasts import Calibration, Outcome

JOBS, SEEDS, HOSTS, LOAD = 20_000, 1, 16, 0.9
REFRESH_S = 3600.0
"""Estimates are refreshed so often, in simulated time. A deployment does it every 30 s where something has changed."""
HORIZONS = ("15 min", "1 h", "4 h", "12 h", "24 h", "more")


def main(jobs: int, seeds: int, hosts: int, load: float) -> None:
    """Print the tables."""
    from bench.replay import figures
    from bench.replay.deployment import DEFAULT, POLICIES
    from bench.replay.jobs import ASSUMED

    print(f"{sides.cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}; load {os.getloadavg()[0]:.1f}")
    print(f"{jobs:,} jobs, seeds 1 to {seeds}, {hosts} hosts with 8 GPUs, needed to {load:.0%}. Assumed:\n{ASSUMED}\n")
    began = time.monotonic()
    with ProcessPoolExecutor(initializer=_set_up) as pool:
        outcomes = [pool.submit(forecasts, DEFAULT, seed, jobs, hosts, load) for seed in range(1, seeds + 1)]
        asked = {
            (policy.name, seed): pool.submit(replay, policy, seed, jobs, hosts, load)
            for seed, policy in product(range(1, seeds + 1), POLICIES)
        }
        found: dict[str, list[Figures]] = {policy.name: [] for policy in POLICIES}
        for (name, _seed), one in asked.items():
            found[name].append(one.result())

        def show(heading: str, columns: Sequence[str], values: Callable[[Figures], Sequence[float]]) -> None:
            rows = {name: [cell(each) for each in zip(*map(values, of), strict=True)] for name, of in found.items()}
            sides.table(heading, list(columns), rows)

        quantiles = [f"P{share}" for share in figures.QUANTILES]
        for size in figures.SIZES:
            show(f"hours waited, {size} GPUs", quantiles, of_size(size))
        for group in figures.GROUPS:
            show(f"hours waited, {group}", quantiles, of_group(group))
        show(
            "all",
            ["GPU use, %", "Jain's index", "displaced", "work lost, %"],
            lambda one: (100 * one.gpu_use, one.fairness, one.displaced, 100 * one.lost),
        )
        show_forecasts([one for of_seed in outcomes for one in of_seed.result()])
    print(f"took {time.monotonic() - began:,.0f} s; load {os.getloadavg()[0]:.1f}")


def of_size(size: str) -> Callable[[Figures], Sequence[float]]:
    return lambda one: one.by_size[size]


def of_group(group: str) -> Callable[[Figures], Sequence[float]]:
    return lambda one: one.by_member[group]


def show_forecasts(outcomes: Sequence[Outcome]) -> None:
    """Print where starts were in the windows that were shown."""
    from bench.replay.forecasts import Calibration

    def cells(of: Sequence[Outcome]) -> list[str]:
        shown, simulated = Calibration.of(of), Calibration.of(of, corrected=False)
        return [f"{shown.starts:,}", shares(shown), shares(simulated)]

    first = [one for one in outcomes if one.is_first]
    rows = {"shown first": cells(first), "shown in each hour of waiting": cells(outcomes)}
    for number, name in enumerate(HORIZONS):
        rows[f"shown first, up to {name} ahead"] = cells([one for one in first if one.shown.horizon == number])
    sides.table("% before P50 / P50 to P90 / after P90", ["starts", "as shown", "as simulated"], rows)


def shares(one: Calibration) -> str:
    return " / ".join(f"{100 * share:.0f}" for share in (one.before, one.inside, one.after)) if one.starts else "–"


def replay(policy: Policy, seed: int, jobs: int, hosts: int, load: float) -> Figures:
    from bench.replay import figures
    from bench.replay.jobs import generate

    return figures.replayed(policy, generate(seed, jobs, hosts * 8, load), hosts)


def forecasts(policy: Policy, seed: int, jobs: int, hosts: int, load: float) -> list[Outcome]:
    from bench.replay.forecasts import forecast
    from bench.replay.jobs import generate

    return forecast(policy, generate(seed, jobs, hosts * 8, load), hosts, REFRESH_S).outcomes


def cell(values: Sequence[float]) -> str:
    """The median, and between the least and the most."""
    digits = 0 if max(values) >= 100 else 1 if max(values) >= 2 else 2
    least, most = min(values), max(values)
    spread = "" if len(values) == 1 else f" ({least:,.{digits}f}–{most:,.{digits}f})"
    return f"{median(values):,.{digits}f}{spread}"


def _set_up() -> None:
    """Django without a database: models are only filled in."""
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dstackweb.settings")
    django.setup()


if __name__ == "__main__":
    _set_up()
    given = sys.argv[1:]
    main(*(int(one) for one in given[:3]), *(JOBS, SEEDS, HOSTS)[len(given) :], float(given[3]) if given[3:] else LOAD)
