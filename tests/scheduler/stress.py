"""Everybody at once on one database: `python -m tests.scheduler.stress SECONDS SEED` prints a report as JSON.

Processes submit, reorder, stop, place, watch, read, and play the runners; afterwards nobody moves, and what is there
is judged. Run with the environment of a deployment whose database is empty.
"""

from __future__ import annotations

import collections
import datetime as dt
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import django

django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connection, connections  # noqa: E402
from django.db.models import Sum  # noqa: E402
from django.utils import timezone  # noqa: E402

from dstackweb.accounts.models import Project, User  # noqa: E402
from dstackweb.backends.models import Gpu, Host  # noqa: E402
from dstackweb.lib.errors import DomainError  # noqa: E402
from dstackweb.runs import attempts, selectors, services  # noqa: E402
from dstackweb.runs.models import Allocation, Job, Queue, QueueCount, Run, RunEvent  # noqa: E402
from dstackweb.runs.recount import differences  # noqa: E402
from dstackweb.runs.states import ACTIVE, ENDED, JOB_ACTIVE, RUN_MOVES, JobStatus, Reason, RunStatus  # noqa: E402
from dstackweb.scheduler import housekeeping, pass_claim, passes, watch  # noqa: E402
from tests.factories import join, make_host, make_project, make_user  # noqa: E402

Act = Callable[[random.Random], object]
REFUSALS = (DomainError, Run.DoesNotExist, Job.DoesNotExist)
"""What a caller who comes too late may be told."""


def submit(rnd: random.Random) -> None:
    """Few names and few keys, so that they collide."""
    project, user = Project.objects.get(), User.objects.get(username=rnd.choice(["ada", "bob"]))
    config: dict[str, Any] = {
        "type": "task", "commands": ["true"], "priority": rnd.randint(0, 80), "nodes": rnd.choice([1, 1, 1, 2, 3]),
        "resources": {"cpu": rnd.randint(1, 3), "gpu": rnd.choice([0, 1, 1, 2])}, "retry": rnd.random() < 0.4,
        "queue": rnd.choice(["default", "default", "night"]),
    }  # fmt: skip
    if rnd.random() < 0.3:
        config["name"] = f"name-{rnd.randint(1, 20)}"
    if rnd.random() < 0.3:
        key = rnd.randint(1, 60)
        config |= {"name": f"keyed-{key}", "priority": 50, "nodes": 1, "retry": False, "queue": "default"}
        config["resources"] = {"gpu": 1}
        for _ in range(2):
            services.submit(project, user, "member", services.Submission(config), f"key-{key}")
        return
    services.submit(project, user, "member", services.Submission(config))


def change(rnd: random.Random) -> None:
    """What people do to a run or a queue."""
    user = User.objects.get(username="boss")
    if rnd.random() < 0.05:
        queue = rnd.choice(list(Queue.objects.all()))
        services.set_paused(queue, user, "manager", True)
        services.set_paused(queue, user, "manager", False)
        return
    run = _any(rnd, Run.objects.filter(status__in=ACTIVE).values_list("pk", flat=True))
    if run is None:
        return
    found = Run.objects.select_related("queue", "project", "user").get(pk=run)
    match rnd.randint(0, 9):
        case 0:
            services.stop(found, user, "manager")
        case 1:
            services.stop(found, user, "manager", abort=True)
        case 2 | 3 | 4 | 5:
            services.set_queue(found, user, "manager", rnd.choice(["default", "night"]))
        case _:
            services.set_priority(found, user, "manager", rnd.randint(0, 100))


def place(rnd: random.Random) -> None:
    """Passes; now and then one whose claim is over before it has begun, so that two are at work."""
    pass_claim.EXPIRES_S = rnd.choice([30.0, 0.01])
    passes.run_passes()


def look(rnd: random.Random) -> None:
    """Everything that is periodic, with every back-off over."""
    watch.watch()
    attempts.requeue_due(timezone.now() + dt.timedelta(hours=1))
    Host.objects.filter(name=rnd.choice(["box-1", "box-2", "box-3"])).update(draining=rnd.random() < 0.2)
    if rnd.random() < 0.1:
        housekeeping.keep_house()


class Runners:
    """Plays runners: some job's next step, some of them twice, and remembers what it claimed."""

    def __init__(self) -> None:
        self.claimed: list[tuple[str, str]] = []

    def __call__(self, rnd: random.Random) -> None:
        pk = _any(rnd, Job.objects.filter(status__in=JOB_ACTIVE).values_list("pk", flat=True))
        job = Job.objects.filter(pk=pk).first()
        if job is None:
            return
        if job.status == JobStatus.TERMINATING:
            attempts.ended(job.pk, Reason.TERMINATED_BY_SERVER, exit_code=143)
        elif job.status == JobStatus.RUNNING:
            reasons = [Reason.DONE_BY_RUNNER] * 5 + [
                Reason.CONTAINER_EXITED_WITH_ERROR, Reason.INSTANCE_UNREACHABLE, Reason.MAX_DURATION_EXCEEDED
            ]  # fmt: skip
            attempts.ended(job.pk, rnd.choice(reasons), exit_code=0)
        elif job.claim_nonce:
            attempts.started(job.pk)
        else:
            nonce = f"{os.getpid()}-{rnd.random()}"
            attempts.claim(job.pk, nonce, "here")
            self.claimed.append((str(job.pk), nonce))


class Reader:
    """Polls as pages do: while a version stays the same, what it stands for may not change."""

    def __init__(self) -> None:
        self.shown: dict[str, tuple[str, Any]] = {}

    def __call__(self, rnd: random.Random) -> None:
        project = Project.objects.get()
        queue = rnd.choice(list(Queue.objects.all()))
        self._poll(queue.name, lambda: selectors.list_version(project), lambda: _queue_page(queue))
        run = _any(rnd, Run.objects.values_list("pk", flat=True)[:200])
        if run is not None:
            self._poll(f"run {run}", lambda: str(Run.objects.get(pk=run).version), lambda: _run_page(run))
        over = [host.name for host in Host.objects.all() if host.cpus_used > host.cpus]
        assert not over, f"more given away than there is: {over}"

    def _poll(self, what: str, version: Callable[[], str], page: Callable[[], Any]) -> None:
        before = version()
        data = page()
        if what in self.shown and self.shown[what][0] == before == version():
            assert self.shown[what][1] == data, f"a poll of {what} hid: {self.shown[what][1]} became {data}"
        self.shown[what] = before, data


def _queue_page(queue: Queue) -> Any:
    rows = [(row.run.pk, row.run.priority, row.reason, row.reason_data) for row in selectors.queue_rows(queue, 20)]
    active = Run.objects.filter(queue=queue, status__in=ACTIVE).order_by("pk").values_list("pk", "status")
    held = Allocation.objects.filter(job__run__queue=queue, gpu__isnull=False).count()
    return rows, list(active), held, Queue.objects.get(pk=queue.pk).paused


def _run_page(run: int) -> Any:
    jobs = Job.objects.filter(run=run).order_by("attempt", "node")
    told = list(jobs.values_list("node", "status", "host", "gpus", "exit_code", "termination_reason", "message"))
    return told, Run.objects.filter(pk=run).values_list("status", "priority", "queue", "attempt").get()


def _any(rnd: random.Random, rows: Any) -> Any:
    found = list(rows)
    return rnd.choice(found) if found else None


def work(act: Act, seconds: float, seed: int, begin: float, answers: Any) -> None:
    """One process: repeat `act` until the time is over; answers with what it did and what went wrong."""
    rnd = random.Random(seed)
    done: collections.Counter[str] = collections.Counter()
    errors: list[str] = []
    time.sleep(max(0.0, begin - time.monotonic()))
    while time.monotonic() < begin + seconds:
        try:
            act(rnd)
            done["done"] += 1
        except REFUSALS:
            done["refused"] += 1
        except Exception:
            errors.append(traceback.format_exc())
    claimed = act.claimed if isinstance(act, Runners) else []
    connections.close_all()
    answers.put((type(act).__name__ if isinstance(act, Runners | Reader) else act.__name__, done, errors, claimed))


def prepare() -> None:
    """An empty database becomes a deployment with two queues, three members and three hosts."""
    call_command("migrate", verbosity=0)
    call_command("createcachetable", verbosity=0)
    project = make_project("main")
    for name, role in [("ada", "member"), ("bob", "member"), ("boss", "manager")]:
        join(project, make_user(name), role)
    services.ensure_queue(project, "night")
    for index in (1, 2, 3):
        make_host(f"box-{index}", cpus=8, gpus=4)


def judge(claimed: list[tuple[str, str]]) -> Iterator[str]:
    """Everything that is wrong now that nobody moves."""
    yield from (str(difference) for difference in differences())
    yield from (f"job {job} was claimed by several" for job, n in collections.Counter(j for j, _ in claimed).items()
                if n > 1)  # fmt: skip
    for host in Host.objects.all():
        if host.cpus_used > host.cpus or host.memory_used_mib > host.memory_mib:
            yield f"{host.name}: {host.cpus_used} of {host.cpus} CPUs are taken"
    for job in Job.objects.filter(status__in=JOB_ACTIVE).select_related("run"):
        rows = Allocation.objects.filter(job=job)
        held = sorted(Gpu.objects.filter(allocation__job=job).values_list("uuid", flat=True))
        if held != sorted(job.gpus) or rows.aggregate(n=Sum("cpus"))["n"] != job.cpus:
            yield f"{job} has {job.gpus} and {job.cpus} CPUs, but holds {held}"
        if job.attempt != job.run.attempt:
            yield f"{job} is {job.status}, of an attempt that is over"
    for queue in Queue.objects.all():
        shown = [row.run for row in selectors.queue_rows(queue, 10_000)]
        if [run.pk for run in shown] != [run.pk for run in sorted(shown, key=lambda run: (run.rank, run.pk))]:
            yield f"{queue}: the page is not in the order of the ranks"
        for run in Run.objects.filter(queue=queue):
            if run.rank != run.seniority_us - run.priority * queue.step_us:
                yield f"{run.name}: its rank is not that of its priority in {queue.name}"
    for run in Run.objects.all():
        yield from _judge_run(run)


def _judge_run(run: Run) -> Iterator[str]:
    events = RunEvent.objects.filter(run=run, node=None).order_by("id").values_list("kind", "data")
    status = RunStatus.SUBMITTED
    for kind, data in events:
        if "from" in data and (new := {"retry": "pending", "requeued": "submitted"}.get(kind, kind)) in list(RunStatus):
            if data["from"] != status or RunStatus(new) not in RUN_MOVES[status]:
                yield f"{run.name}: {data['from']} → {new} after {status}"
            status = RunStatus(new)
    if status != run.status:
        yield f"{run.name} is {run.status}, its events say {status}"
    jobs = list(Job.objects.filter(run=run))
    complete = {job.attempt for job in jobs} - {job.attempt for job in jobs if job.status != JobStatus.DONE}
    if complete != ({run.attempt} if run.status == RunStatus.DONE else set()):
        yield f"{run.name} is {run.status} in attempt {run.attempt}; complete are {complete}"
    if run.status in ENDED and any(job.status in JOB_ACTIVE for job in jobs):
        yield f"{run.name} is {run.status} and has active jobs"
    placed = [job for job in jobs if job.attempt == run.attempt]
    if placed and len(placed) != run.spec["nodes"]:
        yield f"{run.name}: {len(placed)} of {run.spec['nodes']} nodes were placed"


def end_all() -> Iterator[str]:
    """Let the rest run for a few rounds, then stop it; says what doesn't end."""
    Host.objects.update(draining=False)
    for _ in range(3):
        attempts.requeue_due(timezone.now() + dt.timedelta(hours=1))
        passes.run_passes()
        for job in Job.objects.filter(status__in=JOB_ACTIVE):
            attempts.claim(job.pk, job.claim_nonce or "last", "here")
            attempts.started(job.pk)
            attempts.ended(job.pk, Reason.DONE_BY_RUNNER, exit_code=0)
    boss = User.objects.get(username="boss")
    for run in Run.objects.filter(status__in=ACTIVE).select_related("project", "queue", "user"):
        services.stop(run, boss, "manager", abort=True)
    yield from (f"{run.name} is still {run.status}" for run in Run.objects.filter(status__in=ACTIVE))
    if Allocation.objects.exists():
        yield "something is still held"


def main(seconds: float, seed: int) -> None:
    prepare()
    connections.close_all()
    acts: list[Act] = [submit, submit, change, change, place, place, look, Runners(), Runners(), Reader()]
    context = multiprocessing.get_context("fork")
    answers, begin = context.SimpleQueue(), time.monotonic() + 0.2
    workers = [
        context.Process(target=work, args=(act, seconds, seed + index, begin, answers))
        for index, act in enumerate(acts)
    ]
    for worker in workers:
        worker.start()
    done: collections.Counter[str] = collections.Counter()
    errors: list[str] = []
    claimed: list[tuple[str, str]] = []
    for _ in workers:
        name, counts, wrong, claims = answers.get()
        done.update({f"{name} {what}": n for what, n in counts.items()})
        errors += wrong
        claimed += claims
    for worker in workers:
        worker.join()
    wrong = [*judge(claimed), *end_all(), *judge(claimed)]
    ended = {s.value: QueueCount.objects.aggregate(n=Sum(s.value))["n"] for s in ENDED}
    print(json.dumps({"done": done, "errors": errors, "wrong": wrong, "ended": ended, "on": connection.vendor}))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
