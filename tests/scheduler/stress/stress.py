"""All actors at once on one database: `python -m tests.scheduler.stress SECONDS SEED` prints a report as JSON.

Processes do what people, passes, watchers and runners do (`acts`, `moves`); the database and readers check on them
(`referee`); once all have stopped, the final state is checked (`judges`). Run with the environment of a deployment
whose database is empty.
"""

from __future__ import annotations

import collections
import contextlib
import json
import multiprocessing
import random
import time
import traceback
from collections.abc import Callable
from typing import Any

from django.core.management import call_command
from django.db import connection, connections
from django.db.models import Sum

from dstackweb.lib.errors import DomainError
from dstackweb.runs import services
from dstackweb.runs.models import Job, QueueCount, Run, RunEvent
from dstackweb.runs.states import ENDED
from dstackweb.scheduler.models import PassState
from tests.factories import join, make_host, make_project, make_user
from tests.scheduler.stress import acts, moves
from tests.scheduler.stress.judges import end_all, judge, judge_after_a_pass
from tests.scheduler.stress.referee import Reader, install

Act = Callable[[random.Random], object]
Mix = list[tuple[int, Act]]
"""What one process does, each so often."""
REFUSALS = (DomainError, Run.DoesNotExist, Job.DoesNotExist)
"""Errors that a caller who comes too late may get."""


def processes() -> list[Mix]:
    """Who is at work."""
    people: Mix = [
        (6, acts.prioritise), (3, acts.prioritise_stale), (3, acts.change_queue), (2, acts.stop),
        (1, acts.stop_several), (2, acts.hold), (2, acts.extend),
        (8, moves.move), (4, moves.undo), (3, moves.prioritise_many),
    ]  # fmt: skip
    managers: Mix = [
        (1, moves.pause_or_drain),
        (3, moves.rank_anew),
        (6, moves.limit),
        (2, moves.preempt),
        (4, moves.lend),
        (2, moves.share),
        (4, moves.move),
    ]
    submitter: Mix = [(1, acts.submit)]
    return [
        submitter, submitter, people, people, managers, [(1, acts.place)], [(1, acts.place)], [(1, acts.look)],
        [(1, acts.Runners())], [(1, acts.Runners())], [(1, Reader())],
    ]  # fmt: skip


def prepare() -> None:
    """An empty database becomes a deployment with two projects, each with two queues, and three hosts.

    Their ageing steps differ, one of them strict; those of the second lend each other GPUs. Some runs wait.
    """
    call_command("migrate", verbosity=0)
    members = {name: make_user(name) for name in (*acts.MEMBERS, acts.MANAGER)}
    steps = {"main": {"default": 30, "night": None}, "lab": {"default": 1, "night": 240}}
    for project, most in [(make_project("main"), 80), (make_project("lab", weight=3), 60)]:
        type(project).objects.filter(pk=project.pk).update(member_max_priority=most)
        for name, user in members.items():
            join(project, user, "manager" if name == acts.MANAGER else "member")
        for name, minutes in steps[project.name].items():
            queue = services.ensure_queue(project, name)
            type(queue).objects.filter(pk=queue.pk).update(ageing_minutes=minutes, preempt_points=1)
            if project.name == "lab":
                type(queue).objects.filter(pk=queue.pk).update(cohort="team", max_gpus=6, reclaim="any")
    for index in (1, 2, 3):
        make_host(f"box-{index}", cpus=8, gpus=4)
    install()
    rnd = random.Random(0)
    for _ in range(40):
        with contextlib.suppress(DomainError):
            acts.submit(rnd)


def work(mix: Mix, seconds: float, seed: int, begin: float, answers: Any) -> None:
    """One process: act until the time is over; answers with what it did, how long it took, and what went wrong."""
    rnd = random.Random(seed)
    done: collections.defaultdict[str, dict[str, float]]
    done = collections.defaultdict(lambda: {"done": 0, "refused": 0, "seconds": 0.0})
    errors: list[str] = []
    time.sleep(max(0.0, begin - time.monotonic()))
    while (now := time.monotonic()) < begin + seconds:
        (act,) = rnd.choices([act for _, act in mix], [often for often, _ in mix])
        counts = done[getattr(act, "__name__", type(act).__name__)]
        try:
            act(rnd)
            counts["done"] += 1
        except REFUSALS:
            counts["refused"] += 1
            time.sleep(0.005)  # who finds nothing to do leaves the processor to others
        except Exception:
            errors.append(traceback.format_exc())
        counts["seconds"] += time.monotonic() - now
    claimed = [claim for _, act in mix if isinstance(act, acts.Runners) for claim in act.claimed]
    connections.close_all()
    answers.put((dict(done), errors, claimed))


def main(seconds: float, seed: int) -> None:
    prepare()
    connections.close_all()
    context = multiprocessing.get_context("fork")
    answers, begin = context.SimpleQueue(), time.monotonic() + 0.2
    workers = [
        context.Process(target=work, args=(mix, seconds, seed * 1000 + index, begin, answers))
        for index, mix in enumerate(processes())
    ]
    for worker in workers:
        worker.start()
    done: collections.defaultdict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    errors: list[str] = []
    claimed: list[tuple[str, str]] = []
    for _ in workers:
        counts, wrong, claims = answers.get()
        for name, numbers in counts.items():
            done[name].update(numbers)
        errors += wrong
        claimed += claims
    for worker in workers:
        worker.join()
    wrong = list(dict.fromkeys([*judge(claimed), *judge_after_a_pass(), *end_all(), *judge(claimed)]))
    report = {
        "acts": {name: _figures(numbers, seconds) for name, numbers in sorted(done.items())},
        "errors": errors,
        "wrong": wrong,
        "ended": {s.value: QueueCount.objects.aggregate(n=Sum(s.value))["n"] for s in ENDED},
        "placed": RunEvent.objects.filter(kind="provisioning").count(),
        "displaced": RunEvent.objects.filter(kind="displaced").count(),
        "taken_back": RunEvent.objects.filter(kind="displaced", data__has_key="queue").count(),
        "passes": PassState.objects.get().generation,
        "on": connection.vendor,
    }
    print(json.dumps(report))


def _figures(numbers: collections.Counter[str], seconds: float) -> dict[str, float]:
    """How often a second an act was done, how often it was refused, and how long it took on the average."""
    times = numbers["done"] + numbers["refused"]
    return {
        "per_s": round(numbers["done"] / seconds, 1),
        "refused": int(numbers["refused"]),
        "ms": round(1000 * numbers["seconds"] / max(1, times), 1),
    }
