"""Histories of tasks as a reporter tells them: stages, generated from seeds. Pure.

A workload is stages of tasks that share pools of workers. It is played event by event, and every `step_s` seconds the
counts of each prefix are written down as a reporter would send them.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tools import demo_progress

Draw = Callable[[random.Random], float]
"""Draws the duration of a task in seconds."""


class Counts(NamedTuple):
    """A prefix in a report. Tasks are timed unless their worker had nothing to do for them."""

    total: int
    processing: int
    done: int
    duration_n: int
    duration_s: float


@dataclass(frozen=True)
class Report:
    """The counts of all prefixes at a moment. `back`: nothing was heard since the report before."""

    at_s: float
    prefixes: dict[str, Counts]
    back: bool = False


@dataclass(frozen=True)
class History:
    """Reports, the moment when the last task ended, and the silence: its beginning and length."""

    shape: str
    seed: int
    reports: list[Report]
    end_s: float
    silence: tuple[float, float] = (math.inf, 0.0)

    def left_s(self, at_s: float) -> float:
        """The true time left, without a silence that comes yet, which nobody can know of."""
        begin, length = self.silence
        return self.end_s - at_s - (length if at_s < begin else 0.0)

    def share(self, at_s: float) -> float:
        """The share of the observed time that has gone."""
        left = self.left_s(at_s)
        begin, length = self.silence
        gone = at_s - (length if at_s >= begin + length else 0.0)
        return gone / (gone + left) if gone + left else 1.0


@dataclass(frozen=True)
class Stage:
    """Tasks of one prefix. They can start when all tasks of the stages `after` have ended, each one when the task of
    the same place in `behind` has ended, and `found_s` seconds after each other; they are counted once they are found.
    """

    name: str
    tasks: int
    draw: Draw
    pool: str = ""
    after: tuple[str, ...] = ()
    behind: str = ""
    found_s: float = 0.0
    skipped: int = 0
    """So many tasks at the beginning are found done: they take a millisecond each."""


@dataclass
class _State:
    stage: Stage
    ready: list[int] = field(default_factory=list)
    released: int = 0
    found: int = 0
    running: int = 0
    done: int = 0
    duration_n: int = 0
    duration_s: float = 0.0


Workers = Callable[[float], int]


def play(
    shape: str,
    seed: int,
    stages: Sequence[Stage],
    workers: dict[str, Workers],
    *,
    step_s: float = 1.0,
    silence: tuple[float, float] | None = None,
    assigned: bool = False,
    mixed: bool = False,
) -> History:
    """Play a workload. `workers`: how many a pool has at a time. `silence`: share of the time, and length.

    `assigned`: tasks count as processing as soon as they can start. `mixed`: stages take turns at random, instead of
    the later ones first, as with Dask.
    """
    rng = random.Random(f"{shape} {seed}")
    states = {stage.name: _State(stage) for stage in stages}
    draws = {stage.name: [stage.draw(rng) for _ in range(stage.tasks)] for stage in stages}
    ended: dict[str, set[int]] = {stage.name: set() for stage in stages}
    # Time, kind (0: a task ends, 1: a task is found, 2: a report), stage, task.
    events: list[tuple[float, int, str, int]] = []
    for stage in stages:
        for task in range(stage.tasks if stage.found_s else 0):
            heapq.heappush(events, (task * stage.found_s, 1, stage.name, task))
        if not stage.found_s:
            states[stage.name].found = stage.tasks
    heapq.heappush(events, (0.0, 2, "", 0))
    busy = dict.fromkeys(workers, 0)
    reports: list[Report] = []
    remaining, end_s, now = sum(stage.tasks for stage in stages), 0.0, 0.0

    def refill() -> None:
        for state in states.values():
            stage = state.stage
            if all(states[name].done == states[name].stage.tasks for name in stage.after):
                before = ended[stage.behind] if stage.behind else range(stage.tasks)
                while state.released < state.found and state.released in before:
                    state.ready.append(state.released)
                    state.released += 1

    def begin(state: _State) -> None:
        task = state.ready.pop(0)
        busy[state.stage.pool] += 1
        state.running += 1
        took = 0.001 if task < state.stage.skipped else draws[state.stage.name][task]
        heapq.heappush(events, (now + took, 0, state.stage.name, task))

    def start() -> None:
        order = list(states.values())[::-1]
        while mixed and (ready := [state for state in order if state.ready]):
            state = rng.choice(ready)
            if busy[state.stage.pool] >= workers[state.stage.pool](now):
                break
            begin(state)
        for state in () if mixed else order:
            while state.ready and busy[state.stage.pool] < workers[state.stage.pool](now):
                begin(state)

    while remaining:
        now, kind, name, task = heapq.heappop(events)
        if kind == 2:
            refill()
            start()
            reports.append(_report(now, states, assigned))
            heapq.heappush(events, (now + step_s, 2, "", 0))
            continue
        state = states[name]
        if kind == 1:
            state.found += 1
        else:
            state.running -= 1
            busy[state.stage.pool] -= 1
            state.done += 1
            ended[name].add(task)
            state.duration_n += 1
            state.duration_s += 0.001 if task < state.stage.skipped else draws[name][task]
            remaining -= 1
            end_s = now
        refill()
        start()
    reports.append(_report(end_s, states, assigned))
    history = History(shape, seed, reports, end_s)
    return history if silence is None else _silenced(history, *silence)


def _report(now: float, states: dict[str, _State], assigned: bool) -> Report:
    return Report(
        now,
        {
            name: Counts(
                state.found,
                state.running + assigned * len(state.ready),
                state.done,
                state.duration_n,
                state.duration_s,
            )
            for name, state in states.items()
            if state.found
        },
    )


def _silenced(history: History, share: float, length_s: float) -> History:
    """The history with nothing done, and nothing heard, for a time."""
    begin = share * history.end_s
    reports = [report for report in history.reports if report.at_s < begin]
    after = [report for report in history.reports if report.at_s >= begin]
    reports += [Report(report.at_s + length_s, report.prefixes, at == 0) for at, report in enumerate(after)]
    return History(history.shape, history.seed, reports, history.end_s + length_s, (begin, length_s))


def demo(step_s: float = 1.0) -> History:
    """What `make demo-progress` reports."""
    reports, at_s, total = [], 0.0, sum(not stage.stuck for stage in demo_progress.STAGES)
    while True:
        prefixes = {}
        over = 0
        for stage, (done, begun) in zip(
            demo_progress.STAGES, demo_progress.done_after(demo_progress.SPEED * at_s), strict=True
        ):
            if stage.stuck:
                continue
            running = min(stage.at_once, stage.total - done) if begun else 0
            prefixes[stage.prefix] = Counts(
                stage.total, running, done, done, done * stage.seconds / demo_progress.SPEED
            )
            over += done == stage.total
        reports.append(Report(at_s, prefixes))
        if over == total:
            return History("the demo", 0, reports, at_s)
        at_s += step_s


def steady(mean_s: float, spread: float = 0.3) -> Draw:
    """Durations around a mean: lognormal, `spread` in units of the logarithm."""
    return lambda rng: mean_s * math.exp(rng.gauss(-spread * spread / 2, spread))


def heavy(mean_s: float, shape: float = 1.6) -> Draw:
    """Pareto: a few tasks take very long."""
    return lambda rng: min(60 * mean_s, mean_s * (shape - 1) / shape * rng.paretovariate(shape))


def many(number: int) -> Workers:
    return lambda now: number


def ramp(first: int, last: int, over_s: float) -> Workers:
    """From one number of workers to another, over a time."""
    return lambda now: round(first + (last - first) * min(1.0, now / over_s))


Make = Callable[[int], History]


def _vary(seed: int, low: float, high: float, salt: str) -> float:
    """A number between two, the logarithm of which is spread evenly."""
    return math.exp(random.Random(f"{salt} {seed}").uniform(math.log(low), math.log(high)))


def one_stage(seed: int) -> History:
    return play("one uniform stage", seed, [Stage("work", 1500, steady(_vary(seed, 2, 20, "a")))], {"": many(12)})


def three_phases(seed: int) -> History:
    first, last = _vary(seed, 0.5, 4, "b"), _vary(seed, 10, 60, "c")
    stages = [
        Stage("load", 2000, steady(first)),
        Stage("train", 160, steady(last), after=("load",)),
        Stage("score", 800, steady(2.5), after=("train",)),
    ]
    return play("three phases, very different", seed, stages, {"": many(8)})


def heavy_tail(seed: int) -> History:
    return play("heavy-tailed durations", seed, [Stage("fit", 900, heavy(_vary(seed, 5, 15, "d")))], {"": many(10)})


def growing(seed: int) -> History:
    return play("workers join", seed, [Stage("work", 1800, steady(8.0))], {"": ramp(2, 24, _vary(seed, 200, 900, "e"))})


def shrinking(seed: int) -> History:
    workers = {"": ramp(20, 5, _vary(seed, 200, 900, "f"))}
    return play("workers leave", seed, [Stage("work", 1500, steady(8.0))], workers)


def discovered(seed: int) -> History:
    tasks = 1200
    stages = [Stage("crawl", tasks, steady(4.0), found_s=_vary(seed, 0.2, 0.5, "g")), Stage("parse", 400, steady(2.0))]
    return play("tasks found on the way", seed, stages, {"": many(8)})


def slow_reduce(seed: int) -> History:
    stages = [
        Stage("map", 1200, steady(_vary(seed, 2, 6, "h"))),
        Stage("combine", 120, steady(8.0), after=("map",)),
        Stage("reduce", 6, steady(_vary(seed, 60, 150, "i"), 0.1), after=("combine",)),
    ]
    return play("map, combine, slow reduce", seed, stages, {"": many(10)})


def paused(seed: int) -> History:
    stages = [Stage("work", 1000, steady(6.0)), Stage("check", 1000, steady(2.0), behind="work")]
    silence = (_vary(seed, 0.3, 0.7, "j"), _vary(seed, 600, 7200, "k"))
    return play("a pause in the middle", seed, stages, {"": many(8)}, silence=silence)


def bursts(seed: int) -> History:
    stages = [
        Stage("list", 6000, steady(0.05)),
        Stage("copy", 60, steady(_vary(seed, 40, 120, "l"), 0.4), after=("list",)),
    ]
    return play("many short, then few long", seed, stages, {"": many(6)})


def parallel(seed: int) -> History:
    stages = [
        Stage("cpu", 1500, steady(3.0), pool="cpu"),
        Stage("gpu", 200, steady(_vary(seed, 20, 60, "m")), pool="gpu"),
    ]
    return play("two in parallel", seed, stages, {"cpu": many(10), "gpu": many(4)})


def skipping(seed: int) -> History:
    done = round(_vary(seed, 200, 700, "n"))
    return play("resumed: many done before", seed, [Stage("fit", 1000, steady(12.0), skipped=done)], {"": many(8)})


def assigned_at_once(seed: int) -> History:
    stages = [Stage("read", 900, steady(_vary(seed, 2, 6, "v"))), Stage("store", 900, steady(4.0), behind="read")]
    return play("all assigned at once", seed, stages, {"": many(8)}, assigned=True)


def taking_turns(seed: int) -> History:
    stages = [Stage("small", 1500, steady(1.5)), Stage("large", 300, steady(_vary(seed, 5, 25, "w")))]
    return play("two that share workers", seed, stages, {"": many(10)}, mixed=True)


TUNED: tuple[Make, ...] = (
    one_stage, three_phases, heavy_tail, growing, shrinking, discovered, slow_reduce, paused, bursts, parallel,
    skipping, assigned_at_once, taking_turns,
)  # fmt: skip


def fused(seed: int) -> History:
    stages = [
        Stage("read", 800, steady(1.5)),
        Stage("clean", 800, steady(_vary(seed, 2, 8, "o")), behind="read"),
        Stage("embed", 800, steady(_vary(seed, 4, 12, "p")), behind="clean"),
    ]
    return play("a fused pipeline", seed, stages, {"": many(16)})


def diamond(seed: int) -> History:
    stages = [
        Stage("prepare", 300, steady(4.0)),
        Stage("left", 500, steady(_vary(seed, 2, 20, "q")), after=("prepare",)),
        Stage("right", 200, steady(_vary(seed, 5, 40, "r")), after=("prepare",)),
        Stage("join", 40, steady(15.0), after=("left", "right")),
    ]
    return play("a diamond", seed, stages, {"": many(12)})


def epochs(seed: int) -> History:
    mean_s = _vary(seed, 5, 15, "s")
    stages = [
        Stage("train", 60, steady(mean_s, 0.1)),
        Stage("evaluate", 60, steady(4.0), behind="train"),
    ]
    return play("epochs one by one", seed, stages, {"": many(1)})


def sweep(seed: int) -> History:
    return play("a sweep of long trainings", seed, [Stage("trial", 64, steady(240.0, 0.5))], {"": many(6)}, step_s=2.5)


def lost_workers(seed: int) -> History:
    lost_s = _vary(seed, 120, 500, "t")
    workers = {"": lambda now: 16 if now < lost_s else 8}
    return play("half of the workers lost", seed, [Stage("work", 1400, steady(7.0, 0.8))], workers)


def two_pools(seed: int) -> History:
    stages = [
        Stage("decode", 1200, steady(2.0), pool="cpu"),
        Stage("infer", 1200, steady(_vary(seed, 1, 6, "u")), pool="gpu", behind="decode"),
        Stage("report", 20, steady(6.0), pool="cpu", after=("infer",)),
    ]
    return play("two pools in a row", seed, stages, {"cpu": many(6), "gpu": many(8)})


HELD_OUT: tuple[Make, ...] = (fused, diamond, epochs, sweep, lost_workers, two_pools)
