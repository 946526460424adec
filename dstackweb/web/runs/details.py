"""The parts of a run's page: why it ended, nodes, settings with their sources, stages, and what it waits for."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from django.db.models import Q
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.runs import run_places, selectors, usage
from dstackweb.runs.codes import DependencyOutcome, MessageCode
from dstackweb.runs.comparison import CHANGEABLE, current_spec
from dstackweb.runs.models import Dependency, Job, Run, Sweep
from dstackweb.runs.states import ENDED, JobStatus, Reason, RunStatus
from dstackweb.spec.codes import On
from dstackweb.spec.effective import EffectiveSpec, flat, value_text
from dstackweb.web.common.pages import fingerprint
from dstackweb.wording import statuses, units
from dstackweb.wording.sentence import words


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
    return Cost(usage.costs_by_run([run], timezone.now()).get(run.pk, Decimal(0)), rate)


class Recurrence(NamedTuple):
    """When a scheduled run recurs (`at`), with the next and the previous run."""

    crons: str
    at: dt.datetime | None
    following: str
    previous: str
    over: bool


def recurrence(run: Run) -> Recurrence | None:
    """None for a run without a schedule."""
    if not (crons := (run.spec.get("schedule") or {}).get("cron")):
        return None
    made = run.events.filter(kind="next_scheduled").last()
    # The next time comes from the schedule; of a later attempt it is the retry's back-off.
    waits = run.status in ENDED or (run.status == RunStatus.PENDING and run.attempt == 1)
    at = dt.datetime.fromisoformat(made.data["at"]) if made else run.retry_at if waits else None
    ended = run.status in ENDED and made is None and run.retry_at is None
    over = ended or run.stop_reason in (Reason.STOPPED_BY_USER, Reason.ABORTED_BY_USER)
    first = run.events.filter(kind="scheduled").first()
    following, previous = made.data["next"] if made else "", first.data["previous"] if first else ""
    return Recurrence(" · ".join(crons), at, following, previous, over)


class NodeLine(NamedTuple):
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
    return NodeLine(job, run_places.job_place(job), why, units.used(job.instance.usage if job.instance else None))


def starting(run: Run) -> str:
    """A version of what is shown of its instances while they start: the run's own version does not change then."""
    jobs = run.jobs.filter(status=JobStatus.PROVISIONING).order_by("pk")
    shown = list(jobs.values_list("pk", "message", "detail", "instance_type", "instance__cloud_id"))
    return fingerprint(shown) if shown else ""


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


class Stage(NamedTuple):
    """A moment of a run, and what follows it: `verb` says what, `took` how long, or `since` when it goes on now."""

    label: str
    at: dt.datetime | None = None
    verb: str = ""
    took: str = ""
    since: dt.datetime | None = None
    status: str = ""


def stages(run: Run, jobs: Sequence[Job]) -> list[Stage]:
    """Submitted (or queued again), placed, running, artifacts being sent, and ended: of the newest attempt."""
    mine = [job for job in jobs if job.attempt == run.attempt]
    placed_at = min((job.placed_at for job in mine), default=None)
    began = min((job.started_at for job in mine if job.started_at), default=None)
    sent = _sent_from(run, mine)
    over = run.status in ENDED
    label = statuses.status(run.status).capitalize() if over else _("End")
    return [
        _queued(run, placed_at),
        _stage(_("Placed"), placed_at, began or run.ended_at, _("started in"), _("starting")),
        _stage(_("Running"), began, sent or run.ended_at, _("ran"), _("running")),
        *([Stage(_("Artifacts"), sent, _("being sent"), since=sent)] if sent else []),
        Stage(label, run.ended_at, status=run.status if over else ""),
    ]


def _sent_from(run: Run, jobs: Sequence[Job]) -> dt.datetime | None:
    """When the last commands had ended, while what they left is being sent."""
    if run.ended_at is not None or any(job.exited_at is None and job.ended_at is None for job in jobs):
        return None
    return max((job.exited_at for job in jobs if job.exited_at is not None), default=None)


def _queued(run: Run, placed_at: dt.datetime | None) -> Stage:
    """A pending run is in no queue, and neither was one that ended before a retry began."""
    entered_later = run.queued_at - run.submitted_at > dt.timedelta(seconds=1)
    label, at = (_("Queued"), run.queued_at) if entered_later else (_("Submitted"), run.submitted_at)
    unknown = run.status == RunStatus.PENDING or (placed_at is None and run.ended_at and run.attempt > 1)
    return Stage(label, at) if unknown else _stage(label, at, placed_at or run.ended_at, _("waited"), _("waiting"))


def _stage(label: str, start: dt.datetime | None, end: dt.datetime | None, past: str, present: str) -> Stage:
    if start is None:
        return Stage(label)
    if end is None:
        return Stage(label, start, present, since=start)
    return Stage(label, start, past, units.elapsed((end - start).total_seconds()))


def newest(found: Sequence[Stage]) -> Stage | None:
    """The last stage with a duration: what the run does now, or did last."""
    return next((stage for stage in reversed(found) if stage.verb), None)


SHOWN = 8
"""Runs on each side."""

condition = words({On.DONE: "", On.FAILED: gettext_lazy("if it fails"), On.ENDED: gettext_lazy("once it has ended")})


class GraphNode(NamedTuple):
    """A run or sweep of the graph. `uid` is empty once it was removed; `status` then as well."""

    name: str
    uid: str
    status: str
    note: str
    is_sweep: bool


@dataclass(frozen=True)
class Graph:
    """`more_before` and `more_behind` count runs that are not listed."""

    before: list[GraphNode]
    behind: list[GraphNode]
    more_before: int
    more_behind: bool
    release_url: str
    """Empty unless it can be released."""


def dependency_graph(run: Run | Sweep) -> Graph | None:
    """None for one that neither waits for others nor is waited for."""
    before, behind = selectors.dependencies_of(run), selectors.followers_of(run, SHOWN + 1)
    if not before and not behind:
        return None
    address = "web:sweep-release" if isinstance(run, Sweep) else "web:release"
    undecided = any(one.outcome in (DependencyOutcome.WAITING, DependencyOutcome.UNMET) for one in before)
    return Graph(
        list(_nodes((one, one.of) for one in before[:SHOWN])),
        list(_nodes((one, one.follower) for one in behind[:SHOWN])),
        len(before[SHOWN:]),
        len(behind) > SHOWN,
        reverse(address, args=[run.project.name, run.uid]) if run.status == RunStatus.PENDING and undecided else "",
    )


def graph_stamp(run: Run | Sweep) -> str:
    """Changes with what the graph shows: with the ends and starts of others, which do not change the run itself."""
    graph = dependency_graph(run)
    return f".{fingerprint(graph)}" if graph else ""


def _nodes(found: Iterable[tuple[Dependency, Run | Sweep | None]]) -> Iterable[GraphNode]:
    for one, run in found:
        note = _("released") if one.outcome == DependencyOutcome.RELEASED else condition(one.on)
        if run is None:
            yield GraphNode(one.name, "", "", note, is_sweep=False)
        else:
            yield GraphNode(run.name, str(run.uid), run.status, note, is_sweep=isinstance(run, Sweep))
