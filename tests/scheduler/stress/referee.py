"""Judges that look while everybody works: the database itself at each placement, and readers of one snapshot."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from django.db import connection, transaction

from dstackweb.backends.models import Host
from dstackweb.runs import selectors
from dstackweb.runs.models import Allocation, Job, Queue, Run
from dstackweb.runs.queue import ordering
from dstackweb.runs.recount import differences
from dstackweb.runs.rows import queue_rows
from dstackweb.runs.states import ACTIVE

PLACED = "('provisioning', 'running', 'terminating')"

USED = f"""
CREATE VIEW stress_used AS
SELECT run.id AS run, run.queue_id AS queue, queue.paused,
    queue.max_running, queue.max_gpus, queue.max_running_per_user, queue.max_gpus_per_user,
    (SELECT count(*) FROM runs_run r WHERE r.queue_id = queue.id AND r.status IN {PLACED}) AS running,
    (SELECT count(*) FROM runs_run r
        WHERE r.queue_id = queue.id AND r.user_id = run.user_id AND r.status IN {PLACED}) AS running_of_user,
    (SELECT count(a.gpu_id) FROM runs_allocation a JOIN runs_job j ON j.id = a.job_id JOIN runs_run r ON r.id = j.run_id
        WHERE r.queue_id = queue.id) AS gpus,
    (SELECT count(a.gpu_id) FROM runs_allocation a JOIN runs_job j ON j.id = a.job_id JOIN runs_run r ON r.id = j.run_id
        WHERE r.queue_id = queue.id AND r.user_id = run.user_id) AS gpus_of_user,
    CASE WHEN queue.cohort = '' OR queue.max_gpus IS NULL THEN NULL
        WHEN queue.lend_gpus < queue.max_gpus THEN queue.max_gpus - queue.lend_gpus ELSE 0 END AS keeps,
    (SELECT sum(q.max_gpus) FROM runs_queue q
        WHERE q.project_id = queue.project_id AND q.cohort = queue.cohort AND q.cohort <> '') AS max_gpus_of_cohort,
    (SELECT count(a.gpu_id) FROM runs_allocation a JOIN runs_job j ON j.id = a.job_id JOIN runs_run r ON r.id = j.run_id
        JOIN runs_queue q ON q.id = r.queue_id
        WHERE q.project_id = queue.project_id AND q.cohort = queue.cohort AND q.cohort <> ''
            AND q.max_gpus IS NOT NULL) AS gpus_of_cohort,
    (SELECT count(a.gpu_id) FROM runs_allocation a JOIN runs_job j ON j.id = a.job_id WHERE j.run_id = run.id) AS mine
FROM runs_run run JOIN runs_queue queue ON queue.id = run.queue_id
"""
"""What a queue allows beside what its runs hold; `mine` are the GPUs of the run itself."""

NOTED = "run, queue, paused, max_running, running, max_running_per_user, running_of_user, max_gpus, gpus, \
max_gpus_per_user, gpus_of_user, keeps, max_gpus_of_cohort, gpus_of_cohort"

NOTE = f"""
INSERT INTO stress_over SELECT {NOTED} FROM stress_used WHERE run = {{run}} AND (
    paused OR running > max_running OR running_of_user > max_running_per_user
    OR mine > 0 AND (gpus_of_user > max_gpus_per_user
        OR keeps IS NULL AND gpus > max_gpus
        OR gpus > keeps AND gpus_of_cohort > max_gpus_of_cohort));
"""
"""A placement that its queue, as it stands in this transaction, does not allow. Null is no limit, and compares so. A
queue of a cohort may borrow, as long as all together hold no more than the sum of their limits."""

SQLITE = [
    # One transaction writes at a time, so each trigger sees what will be there when it commits.
    f"""CREATE TRIGGER stress_runs AFTER UPDATE OF status ON runs_run WHEN NEW.status = 'provisioning'
        BEGIN {NOTE.format(run="NEW.id")} END""",
    f"""CREATE TRIGGER stress_gpus AFTER INSERT ON runs_allocation WHEN NEW.gpu_id IS NOT NULL
        BEGIN {NOTE.format(run="(SELECT run_id FROM runs_job WHERE id = NEW.job_id)")} END""",
]
POSTGRES = [
    # Deferred: fires at the commit, and sees what others have committed by then. Ends only lower what is used, and
    # placements come one after the other, so what is too much here is too much.
    f"""CREATE FUNCTION stress_judge() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN {NOTE.format(run="NEW.id")} RETURN NULL; END $$""",
    """CREATE CONSTRAINT TRIGGER stress_runs AFTER UPDATE OF status ON runs_run DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (NEW.status = 'provisioning') EXECUTE FUNCTION stress_judge()""",
]


def install() -> None:
    """Let the database judge each placement against its queue's limits and pause as they stand when it commits."""
    columns = ", ".join(f"{name} {'boolean' if name == 'paused' else 'bigint'}" for name in NOTED.split(", "))
    with connection.cursor() as cursor:
        for statement in [USED, f"CREATE TABLE stress_over ({columns})"]:
            cursor.execute(statement)
        for statement in SQLITE if connection.vendor == "sqlite" else POSTGRES:
            cursor.execute(statement)


def placed_above_limits() -> Iterator[str]:
    """What the database noted."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {NOTED} FROM stress_over")
        for row in cursor.fetchall():
            yield "placed above a limit: " + ", ".join(
                f"{name} {value}" for name, value in zip(NOTED.split(", "), row, strict=True)
            )


def wrong_at_any_time() -> Iterator[str]:
    """What may not be so in any snapshot, however many are at work."""
    with transaction.atomic():
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        yield from (str(difference) for difference in differences())
        yield from wrong_ranks()


def wrong_ranks() -> Iterator[str]:
    """Active runs whose rank is not that of their seniority and priority in their queue."""
    for run in Run.objects.filter(status__in=ACTIVE).select_related("queue__project"):
        if run.rank != ordering.rank(run.seniority_us, run.priority, run.queue.step_us, run.penalty_s):
            yield f"{run}: {run.rank} is not the rank of priority {run.priority}, {run.seniority_us} in {run.queue}"


class Reader:
    """Polls as pages do: while a version stays the same, what it stands for may not change. Then counts a snapshot."""

    def __init__(self) -> None:
        self.shown: dict[str, tuple[str, Any]] = {}

    def __call__(self, rnd: random.Random) -> None:
        queue = rnd.choice(list(Queue.objects.select_related("project")))
        self._poll(str(queue), lambda: selectors.list_version(queue.project), lambda: _queue_page(queue.pk))
        if (run := one_of(rnd, Run.objects.values_list("pk", flat=True)[:200])) is not None:
            self._poll(f"run {run}", lambda: str(Run.objects.get(pk=run).version), lambda: _run_page(run))
        over = [host.name for host in Host.objects.all() if host.cpus_used > host.cpus]
        assert not over, f"more given away than there is: {over}"
        wrong = list(wrong_at_any_time()) if rnd.random() < 0.2 else []
        assert not wrong, wrong

    def _poll(self, what: str, version: Callable[[], str], page: Callable[[], Any]) -> None:
        before = version()
        data = page()
        if what in self.shown and self.shown[what][0] == before == version():
            assert self.shown[what][1] == data, f"a poll of {what} hid: {self.shown[what][1]} became {data}"
        self.shown[what] = before, data


def _queue_page(pk: int) -> Any:
    # Read after the version, as the page's view does.
    queue = Queue.objects.select_related("project").get(pk=pk)
    rows = [(row.id, row.priority, row.reason, row.reason_data) for row in queue_rows(queue, 20)]
    active = Run.objects.filter(queue=queue, status__in=ACTIVE).order_by("pk").values_list("pk", "status")
    held = Allocation.objects.filter(job__run__queue=queue, gpu__isnull=False).count()
    return rows, list(active), held, queue.paused


def _run_page(run: int) -> Any:
    jobs = Job.objects.filter(run=run).order_by("attempt", "node")
    state = list(jobs.values_list("node", "status", "host", "gpus", "exit_code", "termination_reason", "message"))
    return state, Run.objects.filter(pk=run).values_list("status", "priority", "queue", "attempt").get()


def one_of(rnd: random.Random, rows: Any) -> Any:
    """Any of `rows`; None when there are none."""
    found = list(rows)
    return rnd.choice(found) if found else None
