"""One run in words: its steps, why it ended, its jobs, its events and where each setting came from."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.runs import placement_summary, spend
from dstackweb.runs.models import Job, Run, RunEvent
from dstackweb.runs.states import ENDED, JobStatus, Reason, RunStatus
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.wording import events as event_words
from dstackweb.wording import statuses, units
from dstackweb.wording.sentence import Sentence


class Step(NamedTuple):
    """One step of the line at the top: reached or not, when, and how long it took to get there."""

    label: str
    reached: bool
    at: dt.datetime | None = None
    note: str = ""
    status: str = ""


def steps(run: Run, jobs: Sequence[Job]) -> list[Step]:
    """Submitted, placed, running, ended: of the newest attempt."""
    placed_at = min((job.placed_at for job in jobs if job.attempt == run.attempt), default=None)
    began = min((job.started_at for job in jobs if job.attempt == run.attempt and job.started_at), default=None)
    over = run.status in ENDED
    line = [
        Step(_("Submitted"), True, run.submitted_at),
        Step(_("Placed"), placed_at is not None, placed_at, _between(run.submitted_at, placed_at)),
        Step(_("Running"), began is not None, began, _between(placed_at, began)),
    ]
    ending = _between(began, run.ended_at) if over else ""
    label = statuses.status(run.status).capitalize() if over else _("End")
    return [*line, Step(label, over, run.ended_at, ending, run.status if over else "")]


def _between(start: dt.datetime | None, end: dt.datetime | None) -> str:
    return units.duration((end - start).total_seconds()) if start and end else ""


class EndNotice(NamedTuple):
    """How a run ended: a title, a sentence of ours, and the message of what ended it as it came."""

    title: str
    text: str
    message: str
    status: str


def end_notice(run: Run, jobs: Sequence[Job]) -> EndNotice | None:
    """Why it ended, or why it is being tried again; None for a run that is fine."""
    if run.status == RunStatus.PENDING and run.attempt > 1:
        nowhere = statuses.termination(Reason.OUT_OF_CAPACITY)
        if run.status_message.startswith(nowhere):
            last = run.status_message.removeprefix(nowhere).strip()
            return EndNotice(nowhere, _("It will be tried again, with its place in the queue kept."), last, run.status)
        return EndNotice(_("It will be tried again"), "", run.status_message, run.status)
    if run.status not in (RunStatus.FAILED, RunStatus.TERMINATED):
        return None
    bad = [job for job in jobs if job.attempt == run.attempt and job.status == JobStatus.FAILED]
    title = statuses.termination(run.termination_reason) or statuses.status(run.status).capitalize()
    if run.termination_reason == Reason.JOB_FAILED and bad:
        title = statuses.termination(bad[0].termination_reason)
    text = statuses.exited(run.exit_code) if run.exit_code else ""
    return EndNotice(title, text, event_words.beyond(title, run.status_message), run.status)


class Cost(NamedTuple):
    """What a run has cost, in USD, and what it costs an hour now."""

    so_far: Decimal
    rate: Decimal


def cost(run: Run, jobs: Sequence[Job]) -> Cost | None:
    """Of all its attempts; None for a run that was only ever on what costs nothing."""
    if not any(job.price for job in jobs):
        return None
    paid = Job.objects.filter(Q(instance=None) | Q(instance__launched_at__isnull=False), run=run, ended_at=None)
    rate = sum(paid.values_list("price", flat=True), Decimal(0))
    return Cost(spend.costs_by_run([run], timezone.now()).get(run.pk, Decimal(0)), rate)


@dataclass(frozen=True)
class NodeLine:
    """One node of one attempt."""

    job: Job
    where: str
    gpus: str
    why: str
    machine: str

    @classmethod
    def of(cls, job: Job) -> NodeLine:
        """The row with its words."""
        why = _why(job) if job.status in ("failed", "terminated") else ""
        if job.status == JobStatus.PROVISIONING:
            why = job.message
        return cls(job, placement_summary.where(job), units.gpus(len(job.gpus)) if job.gpus else "", why, machine(job))


def starting(run: Run) -> str:
    """Changes with what is told of its machines while they start, which changes nothing of the run."""
    told = run.jobs.filter(status=JobStatus.PROVISIONING).order_by("pk")
    shown = list(told.values_list("pk", "message", "instance_type", "instance__cloud_id"))
    return hashlib.sha256(repr(shown).encode()).hexdigest()[:8] if shown else ""


def machine(job: Job) -> str:
    """What the cloud calls the machine that a job is on; empty for those of the team, and before there is one."""
    return job.instance.cloud_id if job.instance else ""


def _why(job: Job) -> str:
    reason = statuses.termination(job.termination_reason)
    return f"{reason} {event_words.beyond(reason, job.message)}".strip()


class EventLine(NamedTuple):
    """One thing that happened, and who did it."""

    event: RunEvent
    text: Sentence


def events(found: Iterable[RunEvent], nodes: int) -> list[EventLine]:
    """The rows, newest first."""
    return [EventLine(event, text) for event, text in event_words.grouped(found, nodes)]


class Setting(NamedTuple):
    """One effective setting: `origin` says where its value came from; `code` asks for lines kept as they are."""

    name: str
    value: str
    origin: str = ""
    code: bool = False


FIRST = ("priority", "queue", "profile", "resources.cpu", "resources.memory", "resources.gpu", "nodes", "commands")
"""What is looked for most, on top."""
ALWAYS = {"priority", "queue", "resources.cpu", "resources.memory", "commands", "max_duration", "stop_duration"}
"""Shown even at their defaults; of the others only what somebody set."""
ELSEWHERE = {"type", "name"}


def settings(run: Run) -> list[Setting]:
    """The settings in effect, with where each came from; what people changed since says so."""
    spec = EffectiveSpec.model_validate(run.spec)
    now = {"priority": run.priority, "queue": run.queue.name, "max_duration_s": run.limit_s}
    changed = {key.removesuffix("_s") for key, value in now.items() if getattr(spec, key) != value}
    return settings_of(spec.model_copy(update=now), run.provenance, changed)


def settings_of(spec: EffectiveSpec, provenance: dict[str, Any], changed: Collection[str] = ()) -> list[Setting]:
    """A spec as the rows of a table, in the words of the run file. `changed` names what people changed since."""
    values = _flat(spec.as_file())
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
        rows.append(Setting(key, text(values[key]), whence, code=key == "commands" or isinstance(values[key], dict)))
    return rows


def profile_settings(values: dict[str, Any]) -> list[Setting]:
    """What a profile sets, as it was written."""
    return [Setting(key, text(value), code=isinstance(value, dict)) for key, value in values.items()]


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """`resources` as `resources.cpu` and so on, as provenance names them."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"resources.{part}": inner for part, inner in value.items()} if key == "resources" else {key: value}
    return flat


def text(value: Any) -> str:
    """A value of a run file, one line per key of a mapping and per command."""
    if isinstance(value, dict):
        return "\n".join(f"{key}: {text(inner).replace(chr(10), ' ')}" for key, inner in value.items())
    if isinstance(value, list):
        return ("\n" if any(" " in str(part) for part in value) else ", ").join(str(part) for part in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def origin(source: dict[str, Any]) -> str:
    """Where a value came from, in words."""
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
