"""The parts of a run's page: why it ended, nodes, events, and settings with their sources."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.runs import run_places, spend
from dstackweb.runs.codes import MessageCode
from dstackweb.runs.comparison import CHANGEABLE, current_spec
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import JobStatus, Reason, RunStatus
from dstackweb.spec.effective import EffectiveSpec, flat, value_text
from dstackweb.wording import accounting, statuses


class EndNotice(NamedTuple):
    """Why a run ended: a title, a sentence, and the raw message of its cause."""

    title: str
    text: str
    message: str
    status: str


def end_notice(run: Run, jobs: Sequence[Job]) -> EndNotice | None:
    """Why it ended or is retried; None otherwise."""
    if run.status == RunStatus.PENDING and run.attempt > 1:
        if run.status_detail.get("code") == MessageCode.OUT_OF_CAPACITY:
            again = _("It will be retried and keeps its place in the queue.")
            return EndNotice(statuses.termination(Reason.OUT_OF_CAPACITY), again, run.status_message, run.status)
        return EndNotice(_("It will be retried"), "", statuses.run_message(run), run.status)
    if run.status not in (RunStatus.FAILED, RunStatus.TERMINATED):
        return None
    bad = [job for job in jobs if job.attempt == run.attempt and job.status == JobStatus.FAILED]
    title = statuses.termination(run.termination_reason) or statuses.status(run.status).capitalize()
    if run.termination_reason == Reason.JOB_FAILED and bad:
        title = statuses.termination(bad[0].termination_reason)
    text = statuses.exited(run.exit_code) if run.exit_code else ""
    return EndNotice(title, text, statuses.beyond_reason(run.status_detail, run.status_message), run.status)


class Cost(NamedTuple):
    """Cost of a run so far (USD) and its current rate (USD per hour)."""

    so_far: Decimal
    rate: Decimal


def cost(run: Run, jobs: Sequence[Job]) -> Cost | None:
    """The cost of all attempts; None for a run that used only free capacity."""
    if not any(job.price for job in jobs):
        return None
    paid = Job.objects.filter(Q(instance=None) | Q(instance__launched_at__isnull=False), run=run, ended_at=None)
    rate = sum(paid.values_list("price", flat=True), Decimal(0))
    return Cost(spend.costs_by_run([run], timezone.now()).get(run.pk, Decimal(0)), rate)


class NodeLine(NamedTuple):
    """One node of one attempt."""

    job: Job
    where: str
    why: str
    used: str
    """What its backend's accounting says; empty where it says nothing."""


def node_line(job: Job) -> NodeLine:
    why = ""
    is_asked = job.status == JobStatus.TERMINATING and job.reported_at is not None
    if job.status == JobStatus.PROVISIONING or is_asked:
        why = statuses.message(job.detail, job.message)
    elif job.status in (JobStatus.FAILED, JobStatus.TERMINATED):
        reason = statuses.termination(job.termination_reason)
        why = f"{reason} {statuses.beyond_reason(job.detail, job.message)}".strip()
    return NodeLine(job, run_places.job_place(job), why, accounting.used(job.instance.usage if job.instance else None))


def starting(run: Run) -> str:
    """A version of what is shown of its instances while they start: the run's own version does not change then."""
    jobs = run.jobs.filter(status=JobStatus.PROVISIONING).order_by("pk")
    shown = list(jobs.values_list("pk", "message", "detail", "instance_type", "instance__cloud_id"))
    return hashlib.sha256(repr(shown).encode()).hexdigest()[:8] if shown else ""


class SettingRow(NamedTuple):
    """One effective setting; `origin` is the source of its value, `code` keeps its lines as they are."""

    name: str
    value: str
    origin: str = ""
    code: bool = False


FIRST = ("priority", "queue", "profile", "resources.cpu", "resources.memory", "resources.gpu", "nodes", "commands")
"""Shown first."""
ALWAYS = {"priority", "queue", "resources.cpu", "resources.memory", "commands", "max_duration", "stop_duration"}
"""Shown even at their defaults; others only if set."""
ELSEWHERE = {"type", "name"}


def settings(run: Run) -> list[SettingRow]:
    """The effective settings with their sources, including later changes."""
    spec = EffectiveSpec.model_validate(run.spec)
    now = current_spec(run)
    changed = {key.removesuffix("_s") for key in CHANGEABLE if getattr(spec, key) != getattr(now, key)}
    return settings_of(now, run.provenance, changed)


def settings_of(spec: EffectiveSpec, provenance: dict[str, Any], changed: Collection[str] = ()) -> list[SettingRow]:
    """A spec as rows of a table with the run file's keys. `changed` names settings changed since submission."""
    values = flat(spec.as_file())
    rows = []
    for key in sorted(values, key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST)):
        source = provenance.get(key, {})
        if (
            key in ELSEWHERE
            or (spec.hold and key == "commands")
            or (key not in ALWAYS and source.get("source", "default") == "default")
        ):
            continue
        whence = _("changed since") if key in changed else origin(source)
        rows.append(
            SettingRow(key, value_text(values[key]), whence, code=key == "commands" or isinstance(values[key], dict))
        )
    return rows


def origin(source: dict[str, Any]) -> str:
    if source.get("notifies"):
        return _("%s; a hold only notifies") % origin({**source, "notifies": False})
    match source.get("source"):
        case "hold":
            return _("the hold")
        case "run_file" if source.get("line"):
            return _("run file, line %d") % int(source["line"])
        case "run_file":
            return _("run file")
        case "command_line":
            return _("command line")
        case "profile":
            return _("profile %s") % str(source.get("profile", ""))
    return _("default")
