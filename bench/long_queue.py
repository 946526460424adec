"""What a long queue costs, with 1k, 10k and 100k waiting runs, on SQLite and on PostgreSQL.

    python -m bench.long_queue [sqlite|postgres] [SIZE …]

Everything in one process, as a web worker or a cluster worker does it; pages through Django's test client, so without
the network. Milliseconds: the median, and between the least and the most.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Literal
from uuid import UUID

from bench import sides

SIZES = (1_000, 10_000, 100_000)
REPEATS = 9
MANY = 500
"""Runs placed at once to see how many a second can be."""
Row = Callable[[], Callable[[], object]]
"""Prepares one measurement, and returns what is measured."""


def measure(sizes: list[int]) -> None:
    """Prints the table of this process's database."""
    import django

    django.setup()
    from django.db import connection
    from django.test import Client
    from django.utils import timezone

    from bench.filled import BOXES, SHAPES, Filled
    from dstackweb.runs import attempts, selectors, services
    from dstackweb.runs.models import Job, Run
    from dstackweb.runs.queue import queues, reorder
    from dstackweb.runs.queue.move_preview import MoveTarget
    from dstackweb.runs.states import JobStatus, Reason
    from dstackweb.scheduler.passes.placement_pass import run_passes
    from dstackweb.scheduler.passes.queue_scan import QueueScan

    there = Filled(room=(100 * (REPEATS + 1) + 2 * MANY) * len(sizes))
    browser = Client(headers={"Host": "localhost"})
    browser.force_login(there.ada)

    def bare() -> Row:
        sql, params = selectors.in_order(there.queue).values_list("pk", "rank", "shape")[:50].query.sql_with_params()

        def ask() -> None:
            with connection.cursor() as cursor:
                cursor.execute(sql, params)
                sides.must_be(len(cursor.fetchall()), 50)

        return lambda: ask

    def pick() -> Callable[[], object]:
        line = QueueScan(there.queue)

        def take() -> None:
            for _ in range(50):
                run = line.head()
                assert run is not None
                assert line.spec(run) is not None
                line.pop()

        return take

    def place_50(priority: int) -> Row:
        def prepare() -> Callable[[], object]:
            there.submit(50, priority=priority)
            return lambda: sides.must_be(run_passes(), 50)

        return prepare

    def change_priority() -> Callable[[], object]:
        run = there.middle()
        return lambda: services.set_priority(run, there.ada, "manager", 60 if run.priority == 50 else 50)

    def move(where: Literal["before", "top"]) -> Row:
        def prepare() -> Callable[[], object]:
            target = MoveTarget(where, there.waiting(0.3) if where == "before" else None)
            run = there.middle()
            return lambda: reorder.move([run], there.ada, "manager", target)

        return prepare

    def rank_anew() -> Callable[[], object]:
        there.queue.refresh_from_db()
        minutes = 60 if there.queue.ageing_minutes == 30 else 30
        return lambda: queues.change_queue(there.queue, there.ada, "manager", ageing_minutes=minutes)

    def bound_anew() -> Callable[[], object]:
        there.queue.refresh_from_db()
        minutes = 30 if there.queue.fair_share_minutes == 60 else 60
        return lambda: queues.change_queue(there.queue, there.ada, "manager", fair_share_minutes=minutes)

    submitted: list[Run] = []

    def submit() -> Callable[[], object]:
        return lambda: submitted.extend(there.submit(1, resources={"gpu": 8}))

    def stop_submitted() -> None:
        for run in submitted:
            services.stop(run, there.ada, "manager")
        submitted.clear()

    def count_shares() -> Callable[[], object]:
        return lambda: queues.count_shares(timezone.now())

    def lend(reclaim: str) -> None:
        """The queue may hold twice what the hosts have, beside four that own 8 GPUs each and have nothing waiting."""
        for number in range(4):
            other = services.ensure_queue(there.project, f"other-{number}")
            queues.change_queue(other, there.ada, "manager", cohort="team", max_gpus=8)
        most = 2 * 8 * BOXES
        queues.change_queue(there.queue, there.ada, "manager", cohort="team", max_gpus=most, reclaim=reclaim)

    def one_position() -> Callable[[], object]:
        run = there.middle()
        return lambda: selectors.position(run)

    def page() -> Callable[[], object]:
        return lambda: sides.must_be(browser.get("/p/main/queue/").status_code, 200)

    def page_kb(encoding: str = "identity") -> str:
        answer = browser.get("/p/main/queue/", headers={"Accept-Encoding": encoding})
        return f"{len(answer.content) / 1024:.1f}"

    def placements_a_second() -> str:
        there.submit(MANY, priority=100)
        took_ms = sides.timed(lambda: sides.must_be(run_passes(), MANY))
        return f"{MANY / took_ms * 1000:,.0f}"

    def placed_jobs() -> list[UUID]:
        waiting = Job.objects.filter(status=JobStatus.PROVISIONING, host__name="large")
        return list(waiting.values_list("pk", flat=True))

    def runs_a_second() -> str:
        def live() -> None:
            there.submit(MANY // 5, priority=100)
            run_passes()
            for job in placed_jobs():
                attempts.claim_job(job, "nonce", "here")
                attempts.start_job(job)
                attempts.end_job(job, Reason.DONE_BY_RUNNER, exit_code=0)

        for job in placed_jobs():
            attempts.end_job(job, Reason.DONE_BY_RUNNER, exit_code=0)
        return f"{MANY // 5 / sides.timed(live) * 1000:,.0f}"

    rows: dict[str, Row] = {
        "the bare query for the next 50": bare(),
        "picking the next 50": pick,
        "a pass that places 50 at the head": place_50(100),
        "a pass that places 50 behind all": place_50(0),
        f"a pass in which {SHAPES} shapes fit nowhere": lambda: lambda: sides.must_be(run_passes(), 0),
        "priority change": change_priority,
        "move from the middle to before another": move("before"),
        "move from the middle to the top": move("top"),
        "position of the run in the middle": one_position,
        "first queue page": page,
    }
    found: dict[str, list[str]] = defaultdict(list)
    for size in sizes:
        there.fill(size)
        for name, prepare in rows.items():
            found[name].append(sides.measured(prepare, REPEATS))
        found["first queue page, KB"].append(page_kb())
        found["first queue page, KB as sent"].append(page_kb("gzip"))
        found[f"placements a second, {MANY} at once"].append(placements_a_second())
        found["runs a second, submit to done"].append(runs_a_second())
        found["another ageing step: rank all anew"].append(sides.measured(rank_anew, 3))
        found["a submission"].append(sides.measured(submit, REPEATS))
        found["another fair share: set all penalties"].append(sides.measured(bound_anew, 3))
        found["a submission with fair share"].append(sides.measured(submit, REPEATS))
        stop_submitted()
        found["counting the shares"].append(
            sides.measured(lambda: lambda: queues.count_shares(timezone.now()), REPEATS)
        )
        queues.change_queue(there.queue, there.ada, "manager", fair_share_minutes=None)
        for reclaim, name in (("never", "in a cohort"), ("any", "in a cohort that takes back")):
            lend(reclaim)
            found[f"the pass with {SHAPES} shapes, {name}"].append(
                sides.measured(lambda: lambda: sides.must_be(run_passes(), 0), REPEATS)
            )
        queues.change_queue(there.queue, there.ada, "manager", cohort="", max_gpus=None)
        sides.must_be(Run.objects.filter(queue=there.queue, status="submitted").count(), size)
    heading = f"{sides.database()}; {BOXES} full hosts, {8 * BOXES} GPUs"
    sides.table(heading, [f"{size:,} waiting" for size in sizes], found)


if __name__ == "__main__":
    if sides.here():
        measure([int(size) for size in sys.argv[1:]] or list(SIZES))
    else:
        sides.on_each_side(sys.argv[1:])
