"""What must hold after all: as the commands noted it themselves, as the API shows it, and as a recount finds it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tools.chaos.deployment import LOST_AFTER_S, Deployment
from tools.chaos.faults import Breaker, living
from tools.chaos.workload import Execution, Task

SELF_STOP_S = LOST_AFTER_S + 2 + 60
"""Without contact for so long a job with `retry` counts as ended: `lost_after`, `stop_duration` and a minute."""


@dataclass(frozen=True)
class JobRow:
    """One node of one attempt, as the database has it."""

    id: str
    attempt: int
    node: int
    status: str
    reason: str


def violations(
    deployment: Deployment, tasks: Iterable[Task], breaker: Breaker, executions: dict[str, Execution]
) -> Iterator[str]:
    """Each thing that does not hold, in one line."""
    shown = _shown(deployment)
    jobs = _jobs(deployment)
    known: set[str] = set()
    for task in tasks:
        run = shown.get(task.name)
        if run is None:
            yield f"{task.name}: it was submitted, and is not there"
            continue
        mine = jobs.get(task.name, [])
        known |= {job.id for job in mine}
        yield from _status(task, run, mine)
        yield from _executed(task, run, mine, executions, breaker)
        yield from _logs(deployment, task, mine, executions, breaker)
    for stranger in sorted(set(executions) - known):
        yield f"job {stranger} executed commands, and is of no run"
    yield from _left(deployment)


def _shown(deployment: Deployment) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    cursor: str | None = ""
    while cursor is not None:
        params = {"limit": "500"} | ({"cursor": cursor} if cursor else {})
        page = deployment.http.get("/projects/main/runs", params=params).raise_for_status().json()
        for run in page["items"]:
            assert run["name"] not in found, f"{run['name']} is there twice"
            found[run["name"]] = run
        cursor = page["next"]
    return found


def _jobs(deployment: Deployment) -> dict[str, list[JobRow]]:
    """The jobs of each run, by attempt and node."""
    found: dict[str, list[JobRow]] = defaultdict(list)
    with deployment.database() as database:
        rows = database.execute(
            "SELECT run.name, job.id, job.attempt, job.node, job.status, job.termination_reason FROM runs_job job "
            "JOIN runs_run run ON run.id = job.run_id ORDER BY run.id, job.attempt, job.node"
        )
        for name, job, attempt, node, status, reason in rows:
            found[name].append(JobRow(str(job), attempt, node, status, reason))
    return found


def _status(task: Task, run: dict[str, Any], jobs: list[JobRow]) -> Iterator[str]:
    if run["status"] != task.status:
        last = [f"{job.status} ({job.reason})" for job in jobs if job.attempt == max(job.attempt for job in jobs)]
        yield f"{task.name}: {run['status']} instead of {task.status}; its last attempt: {', '.join(last) or 'none'}"


def _executed(
    task: Task, run: dict[str, Any], jobs: list[JobRow], executions: dict[str, Execution], breaker: Breaker
) -> Iterator[str]:
    """Nothing twice at once, nothing after its end, and a run that ended by its command was executed by it."""
    for job in jobs:
        found = executions.get(job.id)
        if found and len(found.starts) > 1:
            yield f"{task.name}: job {job.id} of attempt {job.attempt} started {len(found.starts)} times"
        if job.status == "done" and (found is None or found.ended != 0):
            yield f"{task.name}: job {job.id} is done, and its commands did not end with 0"
        if (
            job.reason == "container_exited_with_error"
            and job.id not in breaker.victims
            and not (found and found.ended)
        ):
            yield f"{task.name}: job {job.id} failed by its command, which did not end with an error"
    done = {job.attempt for job in jobs if job.status == "done"}
    if task.status == "done" and task.nodes == 1 and len(done) > 1:
        yield f"{task.name}: attempts {sorted(done)} are all done"
    if run["status"] == "failed" and task.status == "failed":
        own = [job for job in jobs if (found := executions.get(job.id)) and found.ended == task.exit_code]
        if not own:
            yield f"{task.name}: failed, but not by its own command"
        most = (task.config.get("retry") or {}).get("max_attempts", 1)
        lost = [job for job in jobs if job.reason == "instance_unreachable"]
        if len(own) + len(lost) != most and task.nodes == 1:
            yield f"{task.name}: failed {len(own)} times by its own command, and should {most} times"
    for earlier in jobs:
        for later in jobs:
            if later.node == earlier.node and later.attempt == earlier.attempt + 1:
                yield from _in_turn(task, earlier, later, executions, breaker)


def _in_turn(
    task: Task, earlier: JobRow, later: JobRow, executions: dict[str, Execution], breaker: Breaker
) -> Iterator[str]:
    first, second = executions.get(earlier.id), executions.get(later.id)
    if not (first and first.starts and second and second.starts):
        return
    if second.starts[0] < first.last:
        yield (
            f"{task.name}: attempt {later.attempt} began {first.last - second.starts[0]:.1f} s before attempt "
            f"{earlier.attempt} was over"
        )
    was_done = first.ended == 0 and task.nodes == 1 and earlier.id not in breaker.victims
    if was_done and second.starts[0] - first.last < SELF_STOP_S:
        yield f"{task.name}: attempt {later.attempt} began after attempt {earlier.attempt} was done"


def _logs(
    deployment: Deployment, task: Task, jobs: list[JobRow], executions: dict[str, Execution], breaker: Breaker
) -> Iterator[str]:
    for job in jobs:
        found = executions.get(job.id)
        if found is None:
            continue
        answer = deployment.http.get(
            f"/projects/main/runs/{task.name}/logs", params={"attempt": job.attempt, "node": job.node}
        )
        if not answer.is_success:
            yield f"{task.name}: the log of attempt {job.attempt} answers {answer.status_code}"
            continue
        lines, least = answer.text.splitlines(), 0 if job.id in breaker.victims else found.ticks
        where = f"{task.name}: the log of attempt {job.attempt}, node {job.node}"
        if answer.headers["X-Log-Complete"] != "true":
            yield f"{where} is not complete"
        if lines[-1:] == ["Terminated"]:
            lines.pop()  # bash's own line, when the job was stopped
        if lines != task.log[: len(lines)]:
            yield f"{where} has other lines than were printed: {lines[:3]} …"
        elif len(lines) < least:
            yield f"{where} has {len(lines)} of {least} lines"


def _left(deployment: Deployment) -> Iterator[str]:
    with deployment.database() as database:
        for (name,) in database.execute(
            "SELECT run.name FROM runs_allocation held JOIN runs_job job ON job.id = held.job_id "
            "JOIN runs_run run ON run.id = job.run_id"
        ):
            yield f"{name}: still holds something of a host"
    for host in deployment.hosts():
        if host["cpus_used"]:
            yield f"host {host['name']}: {host['cpus_used']} CPUs are in use by nothing"
        if not host["online"]:
            yield f"host {host['name']} is offline"
        if host.get("held_back_at"):
            yield f"host {host['name']} is held back: {host['start_error']}"
    for job in living(deployment):
        yield f"job {job} still has a runner"
    recount = deployment.planes[0].manage("recount", "--check")
    if recount.returncode:
        yield f"counters differ from a recount: {recount.stdout.strip() or recount.stderr.strip()}"
