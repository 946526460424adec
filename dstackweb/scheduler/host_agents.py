"""Calls of the agents on joined hosts, and what they get in return (docs/decisions/0013-agents-poll.md). Any call may
be repeated, doubled or lost: answers follow from rows alone, and a claim lets only one runner start a job."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid4

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Exists, F, OuterRef, Q
from django.utils import timezone

from dstackweb.backends.hosts import inventory
from dstackweb.backends.models import Gpu, Host
from dstackweb.gpus import intake
from dstackweb.lib.errors import Conflict, Forbidden
from dstackweb.lib.secrets import digest
from dstackweb.lib.times import to_ms
from dstackweb.runner.isolation import Arrangement
from dstackweb.runner.machine import Probe
from dstackweb.runner.nvml import Snapshot
from dstackweb.runs import removal, wakeups
from dstackweb.runs.attempts import KILL_MARGIN_S, RUNNER_GONE_S, end_job, return_job
from dstackweb.runs.codes import MessageCode
from dstackweb.runs.launch import job_token
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.scheduler import restored
from dstackweb.scheduler.models import RestoredHost, Retention, RetentionKind
from dstackweb.scheduler.restored import HeldTicket

REFRESH_S = 0.5
IDLE_POLL_S, BUSY_POLL_S = 2.0, 1.0
"""How often an agent asks, without and with jobs."""
TAKEN_OVER_S = 30.0
"""Silence after which another machine may take over a host's name."""
IN_USE = "Host {name} is in use by another machine. Join this one under its own name."
STARTING, RUNNER, LEFT, GONE = "starting", "runner", "left", "gone"
"""A job on its host: its runner is being started or alive, its processes are left without one, or nothing is."""


@dataclass(frozen=True)
class KnownHost:
    """A host with an agent. `busy`: it has jobs, or is held back. `registered`: its machine has sent its facts.

    `process` is the agent process whose calls count, empty if any does. `asked`: the server was restored, and needs to
    know which jobs were started there.
    """

    id: int
    name: str
    removed: bool
    busy: bool
    registered: bool
    process: str = ""
    asked: bool = False


@dataclass(frozen=True)
class HostReport:
    """What an agent reports: states of its jobs, errors of starts, its last start without a job, GPU samples with their
    age in seconds. `probe` is the error of that start, empty if it worked, None if there was none. `tickets`, if it was
    asked for them, and how many are left for the next report."""

    jobs: Mapping[UUID, str] = field(default_factory=dict)
    failed: Mapping[UUID, str] = field(default_factory=dict)
    probe: str | None = None
    samples: Sequence[tuple[float, Snapshot]] = ()
    tickets: Sequence[HeldTicket] | None = None
    tickets_left: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.jobs or self.failed or self.samples) and self.probe is None and self.tickets is None


class KnownHosts:
    """All hosts with agents, by their tokens' digests, as this process read them last; and who called since."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: dict[str, KnownHost] = {}
        self._heard: set[int] = set()
        self._read_at = float("-inf")

    def find(self, token: str, process: str) -> KnownHost | None:
        """Find the host of an agent's token; None for any other string. A call of its process is its heartbeat."""
        key = digest(token)
        with self._lock:
            found = self._hosts.get(key)
            if found is not None and found.process in ("", process):
                self._heard.add(found.id)
            if found is None and not Host.objects.filter(token_digest=key).exists():
                return None  # of a stranger, who must not have all hosts read
            if found is None or time.monotonic() - self._read_at >= REFRESH_S:
                self._refresh()
                if found is None and (found := self._hosts.get(key)) is not None and found.process in ("", process):
                    self._heard.add(found.id)
            return self._hosts.get(key)

    def _refresh(self) -> None:
        # Without Django's own check of the connection, a statement of its own: if it is lost, the agent asks again.
        connection.health_check_done = True  # type: ignore[attr-defined]
        active = Job.objects.filter(host=OuterRef("pk"), status__in=JOB_ACTIVE)
        asked = RestoredHost.objects.filter(host=OuterRef("pk"), reported=False)
        columns = ("pk", "name", "token_digest", "left_at", "held_back_at", "runs_dir", "agent_process", "has_jobs",
                   "is_asked")  # fmt: skip
        with transaction.atomic():
            if self._heard:
                called = Host.joined.filter(pk__in=self._heard)
                # The holder of a host's row is not waited for: its next call counts.
                free = called.select_for_update(skip_locked=True, no_key=True).order_by().values("pk")
                Host.objects.filter(pk__in=free).update(heartbeats=F("heartbeats") + 1, seen_at=timezone.now())
            rows = list(
                Host.objects.exclude(token_digest="")
                .annotate(has_jobs=Exists(active), is_asked=Exists(asked))
                .order_by()
                .values_list(*columns)
            )
        self._heard.clear()
        self._hosts = {
            key: KnownHost(
                pk, name, left_at is not None, has_jobs or held_back_at is not None, bool(runs_dir), process, is_asked
            )
            for pk, name, key, left_at, held_back_at, runs_dir, process, has_jobs, is_asked in rows
        }
        self._read_at = time.monotonic()


_known = KnownHosts()


def host_of_token(token: str, process: str) -> KnownHost | None:
    """The host that an agent's token is for; None for any other string. A token that ended may work for REFRESH_S."""
    return _known.find(token, process)


def check_process(known: KnownHost, process: str) -> None:
    """Raise Conflict if another process is the host's agent: its jobs are given to one machine only."""
    if process != known.process:
        # Another web server may have registered it since.
        current = Host.objects.filter(pk=known.id).values_list("agent_process", flat=True).first()
        if current and process != current:
            raise Conflict(IN_USE.format(name=known.name))


def take_over(known: KnownHost, process: str, place: str) -> None:
    """Make a process the agent of its host: the successor of one at the same place, or after a silence.

    `place`: its boot and home. Raises Conflict if another machine's process is alive.
    """
    if process and process != known.process:
        successor = Q(agent_process__in=["", process]) | Q(agent_place=place) | Q(silent_s__gt=TAKEN_OVER_S)
        free = Host.objects.filter(successor, pk=known.id)
        if not free.update(agent_process=process, agent_place=place):
            raise Conflict(IN_USE.format(name=known.name))


def poll(known: KnownHost, report: HostReport) -> dict[str, Any]:
    """What the host's jobs need (docs/runner.md#the-agent-of-a-host)."""
    if known.removed:
        return {"removed": True}
    answer: dict[str, Any] = {
        "sample_every_s": settings.DSTACKWEB_SAMPLE_EVERY_S,
        "register": not known.registered,
        "tickets": known.asked,
        "files": {
            "jobs_s": settings.DSTACKWEB_JOB_FILES_HOURS * 3600,
            "runs_s": settings.DSTACKWEB_RUN_DIRS_DAYS * 86400,
        },
    }
    if report.is_empty and not known.busy:
        return answer | {"active": [], "again_s": IDLE_POLL_S}
    host = Host.joined.filter(pk=known.id).first()
    if host is None:  # since it was last read
        return {"removed": True}
    for age_s, snapshot in report.samples:
        intake.add_snapshot(host, snapshot, to_ms(timezone.now()) - round(age_s * 1000))
    _note_probe(host, report.probe)
    if report.tickets is not None:
        restored.take_tickets(host, report.tickets, is_last=not report.tickets_left)
    if host.held_back_at is not None:
        job_id = uuid4()
        answer["probe"] = {"job": str(job_id), "token": job_token(job_id)}
    orders = _job_orders(host, report)
    return answer | orders | {"again_s": BUSY_POLL_S if orders["active"] else IDLE_POLL_S}


def _job_orders(host: Host, report: HostReport) -> dict[str, Any]:
    """`active` jobs, and among them those to `start`, to `stop` (the runner calls the API) and to `kill`."""
    orders: dict[str, list[Any]] = {"active": [], "start": [], "stop": [], "kill": []}
    jobs = Job.objects.timed().select_related("run").filter(host=host, status__in=JOB_ACTIVE)
    for job in jobs.order_by("placed_at", "pk"):
        state, error = report.jobs.get(job.pk), report.failed.get(job.pk)
        if error is not None and return_job(job.pk, message=error, failed_start=True):
            continue
        if state == GONE and job.claim_nonce and job.silent_s > RUNNER_GONE_S:
            end_job(job.pk, Reason.INSTANCE_UNREACHABLE, detail={"code": MessageCode.RUNNER_GONE})
            continue
        orders["active"].append(str(job.pk))
        stopping = job.status == JobStatus.TERMINATING
        if stopping and state != GONE and job.status_s > (job.stop_grace_s or 0) + KILL_MARGIN_S:
            orders["kill"].append(str(job.pk))
        elif state not in (STARTING, RUNNER):
            # Also where the state is not known: the runner decides from its files what is left to do.
            run = {"run_uid": str(job.run.uid), "node": job.node}
            orders["start"].append({"job": str(job.pk), "token": job_token(job.pk), **run})
        elif stopping:
            orders["stop"].append(str(job.pk))
    return orders


def _note_probe(host: Host, error: str | None) -> None:
    """The outcome of a start without a job."""
    if error:
        inventory.note_failed_probe(host.pk, error)
    elif error is not None and inventory.clear_failed_starts(host.pk, timezone.now(), after_probe=True):
        wakeups.request_pass()


def register(
    known: KnownHost,
    seen: Probe,
    arrangement: Arrangement,
    *,
    address: str,
    version: str,
    starting: bool,
    labels: Mapping[str, str],
) -> None:
    """Write what a machine has. A GPU that another host shows at the moment stays there, and so does one that a job
    on another host has: the one that claims it could say what it does. Raises Forbidden."""
    taken = {
        gpu.uuid: f"{gpu.host.name}, which is online" if inventory.is_online(gpu.host) else f"{gpu.host.name}, in a job"
        for gpu in Gpu.objects.select_related("host")
        .filter(uuid__in=[one.uuid for one in seen.gpus])
        .filter(Q(present=True, host__left_at=None) | Q(allocation__isnull=False))
        .exclude(host=known.id)
        if inventory.is_online(gpu.host) or hasattr(gpu, "allocation")
    }
    if taken:
        doubled = "; ".join(f"GPU {uuid} is on host {where}" for uuid, where in sorted(taken.items()))
        gpus = tuple(one for one in seen.gpus if one.uuid not in taken)
        seen = replace(seen, gpus=gpus, error="; ".join(filter(None, [seen.error, doubled])))
    try:
        inventory.register(
            known.name,
            address=address,
            cluster="",
            probe=seen,
            arrangement=arrangement,
            starting=starting,
            labels=labels,
            agent_version=version,
        )
    except inventory.HasLeft:
        raise Forbidden(f"host {known.name} was removed") from None


def removable(
    known: KnownHost, jobs: Sequence[UUID], runs: Sequence[UUID], *, removed_runs: bool
) -> dict[str, list[str]]:
    """Which of these old files may go: of ended jobs, and of runs that ended long ago or were removed. With
    `removed_runs` also lately removed runs, whatever the age of their directories."""
    active = set(Job.objects.filter(pk__in=jobs, status__in=JOB_ACTIVE).values_list("pk", flat=True))
    if restored.is_waiting():
        active = set(jobs)  # a restored database does not know yet which of them it needs
    before = timezone.now() - dt.timedelta(days=settings.DSTACKWEB_RUN_DIRS_DAYS)
    found = removal.over([str(run) for run in runs], before)
    if removed_runs:
        found |= set(removal.removed_lately(before))
    return {"jobs": [str(job) for job in jobs if job not in active], "runs": sorted(found)}


def note_pruned(known: KnownHost, jobs: tuple[int, int], runs: tuple[int, int]) -> None:
    """Keep how many files a host removed, and how many are left to remove."""
    now = timezone.now()
    for kind, (pruned, waiting) in ((RetentionKind.JOB_FILES, jobs), (RetentionKind.RUN_DIRS, runs)):
        Retention.note(kind, known.name, waiting=waiting, pruned=pruned, now=now)
