"""What people do with runs: submit, change, stop. Errors are DomainErrors that say what is wrong and what is safe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.access import allows
from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import secret_names as project_secret_names
from dstackweb.lib.errors import Conflict, Forbidden, Invalid, NotFound, TooMany
from dstackweb.lib.models import Bucket, Busy
from dstackweb.lib.secrets import encrypt
from dstackweb.profiles.resolve import Effective, ProfileData, as_hold, resolve
from dstackweb.profiles.services import profile_for
from dstackweb.runs import archives, dependencies, selectors, wakeups
from dstackweb.runs.attempts import settle_run, stop_jobs
from dstackweb.runs.codes import RunEventKind, ScheduleWait
from dstackweb.runs.concurrency import check_priority, etag as etag, may_change
from dstackweb.runs.connections import require_gateway
from dstackweb.runs.models import Archive, Dependency, Queue, QueueCount, Run, Sweep
from dstackweb.runs.queue import member_shares, ordering
from dstackweb.runs.queue.queues import lock_queue, refuse_draining, take_seniority
from dstackweb.runs.queue.reorder import set_priorities
from dstackweb.runs.queue.transfer import transfer
from dstackweb.runs.recurrence import end_schedule, next_time, seniority_us
from dstackweb.runs.run_names import free_name, name_taken, run_name
from dstackweb.runs.shared_rows import count_new, shared_rows_last
from dstackweb.runs.states import ENDED, WAITING, Reason, RunStatus
from dstackweb.runs.transitions import lock_run, move_run, record
from dstackweb.spec.codes import RunType
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.spec.env import EnvError, secret_names
from dstackweb.spec.run_fields import MAX_NAME
from dstackweb.spec.run_file import RunFile, parse_run_file
from dstackweb.spec.source import Config, as_yaml

R = TypeVar("R", Run, Sweep)
STOPPED_AT_ONCE = 25
_PREFIXES = {RunType.TASK: "", RunType.DEV_ENVIRONMENT: "dev-", RunType.SERVICE: "service-"}
"""How names that are generated begin."""
LARGE = 16 * 1024
"""Bytes of a run's file and environment from which they count: a small run costs no statement for it."""


@dataclass(frozen=True)
class Submission:
    """A run file as received, with additions of the command line."""

    config: Config
    env: dict[str, str] = field(default_factory=dict)
    """Values from the client's environment for the bare names in the file's `env` list."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the run file set on the command line; `env` is merged."""
    archive: str | None = None
    """SHA-256 of an archive uploaded before."""
    hold: bool = False
    """Whether the run is a hold (`holds.submit_hold`)."""
    part_of: str = ""
    """The digest of the whole submission, where this is one run of a pipeline."""

    def digest(self) -> str:
        """A hash to compare submissions with the same Idempotency-Key."""
        body = [self.config, self.env, self.overrides, self.archive, *(["hold"] if self.hold else [])]
        body += [self.part_of] if self.part_of else []
        return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class PreparedSubmission:
    """A submission that was parsed, resolved and checked against its user's permissions."""

    run_file: RunFile
    effective: Effective
    queue: Queue
    config_text: str
    archive: Archive | None
    dependencies: list[Dependency]


def ensure_queue(project: Project, name: str = "default") -> Queue:
    queue = selectors.queue_called(project, name)
    if queue is None:
        with transaction.atomic():
            queue, _created = Queue.objects.get_or_create(project=project, name=name)
            QueueCount.objects.get_or_create(queue=queue)
    return queue


def find_queue(project: Project, name: str) -> Queue:
    """The queue of this name; `default` is created if missing. Raises NotFound."""
    queue = ensure_queue(project) if name == "default" else selectors.queue_called(project, name)
    if queue is None:
        raise NotFound(_("no queue is called %(name)s in %(project)s") % {"name": repr(name), "project": project.name})
    return queue


def prepare(
    project: Project, user: User, role: str, submission: Submission, beside: Collection[str] = ()
) -> PreparedSubmission:
    """Parse and resolve a submission without storing it. Raises Invalid with the line, or Forbidden.

    `beside` are the names of the runs in the same file, which it may wait for before they are stored.
    """
    if not allows(role, "member"):
        raise Forbidden(_("Viewers cannot submit runs. Ask a manager of the project for the role of member."))
    run_file = parse_run_file(submission.config, client_env=submission.env, overrides=submission.overrides)
    profile = _profile(project, run_file)
    effective = resolve(run_file, profile)
    if submission.hold:
        effective = as_hold(effective)
    spec = effective.spec
    queue = selectors.queue_called(project, spec.queue)
    if queue is None and spec.queue != "default":
        known = ", ".join(Queue.objects.filter(project=project).values_list("name", flat=True)) or "default"
        raise Invalid.at(
            "queue",
            msg=_("no queue %(queue)s. Available: %(known)s") % {"queue": repr(spec.queue), "known": known},
            line=run_file.line("queue"),
        )
    if queue is not None:
        refuse_draining(queue)
    check_priority(project, role, spec.priority, line=run_file.line("priority"))
    wanted = secret_names(spec.with_secrets())
    if wanted and (missing := sorted(wanted - set(project_secret_names(project)))):
        msg = _("the project has no secret %(missing)s. Admins can add it on the secrets page") % {
            "missing": repr(missing[0])
        }
        place = "env" if missing[0] in secret_names(spec.env) else "registry_auth"
        raise Invalid.at(place, msg=msg, line=run_file.line(place))
    archive = _archive(project, submission.archive) if submission.archive else None
    text = submission.config if isinstance(submission.config, str) else as_yaml(submission.config)
    waits = dependencies.find(project, spec, run_file, beside)
    _check_array(spec, run_file)
    require_gateway(spec)
    return PreparedSubmission(run_file, effective, queue or ensure_queue(project), text, archive, waits)


def _archive(project: Project, sha256: str) -> Archive:
    """An uploaded archive, in use from now on. Raises Invalid when it isn't there."""
    archive = archives.use_archive(project, sha256)
    if archive is None:
        raise Invalid.at("archive", msg=_("this archive was not uploaded, or was removed. Upload it again"))
    return archive


def _profile(project: Project, run_file: RunFile) -> ProfileData | None:
    """The profile that the file names, or the project's default. Raises Invalid with the line of an unknown one."""
    try:
        return profile_for(project, run_file.fields.profile)
    except Invalid as error:
        raise Invalid.at("profile", msg=error.errors[0]["msg"], line=run_file.line("profile")) from None


def _check_array(spec: EffectiveSpec, run_file: RunFile) -> None:
    """What a file with an `array` must keep to, beyond the key's own rules. Raises Invalid with the line."""
    array = spec.array
    if array is None:
        return
    line = run_file.line("array")
    if spec.schedule is not None:
        msg = _("a sweep can't have a `schedule`. Submit it from a scheduler of your own, such as cron, each time")
        raise Invalid.at("schedule", msg=msg, line=run_file.line("schedule"))
    if twice := sorted(set(array.names) & run_file.masked_env):
        msg = _("%(twice)s is a parameter of the `array`; remove the bare %(twice)s from `env`") % {"twice": twice[0]}
        raise Invalid.at("array", msg=msg, line=line)
    try:
        array.check_env(spec.env)
    except EnvError as error:
        raise Invalid.at("array", msg=str(error), line=line) from None
    if spec.name is not None and len(last := run_name(spec.name, array.size - 1)) > MAX_NAME:
        msg = _("the name of the last run, %(last)s, has more than %(max_name)s characters") % {
            "last": last,
            "max_name": MAX_NAME,
        }
        raise Invalid.at("name", msg=msg, line=run_file.line("name"))


def submit(
    project: Project, user: User, role: str, submission: Submission, idempotency_key: str = ""
) -> tuple[Run, bool]:
    """Submit a run to its queue. Returns it, and whether this call created it (False: the key was used before).

    Raises Invalid, Forbidden, Conflict when the name is taken by an active run or the key by another body, or TooMany.
    """
    if idempotency_key and (earlier := replayed(Run, project, user, idempotency_key, submission)):
        return earlier, False
    prepared = prepare(project, user, role, submission)
    if prepared.effective.spec.array is not None:
        raise Invalid.at("array", msg=_("this is the file of a sweep, not of one run"))
    return submit_prepared(project, user, prepared, submission, idempotency_key)


def submit_prepared(
    project: Project, user: User, prepared: PreparedSubmission, submission: Submission, idempotency_key: str
) -> tuple[Run, bool]:
    """Submit what `prepare` returned, as `submit` does."""
    run = new_run(project, user, prepared, submission, idempotency_key)
    try:
        with shared_rows_last():
            store(run, prepared)
    except IntegrityError:
        if idempotency_key and (earlier := replayed(Run, project, user, idempotency_key, submission)):
            return earlier, False
        raise name_taken(project, run.name) from None
    return run, True


def new_run(
    project: Project, user: User, prepared: PreparedSubmission, submission: Submission, idempotency_key: str
) -> Run:
    """The run of a submission, not stored. Raises TooMany where the project has submitted too much."""
    spec = prepared.effective.spec
    name = spec.name or free_name(project, "hold-" if spec.hold else _PREFIXES[spec.type])
    values = submitted_values(project, user, name, prepared, submission, idempotency_key)
    due = next_time(spec.schedule.cron, timezone.now()) if spec.schedule else None
    run = Run(
        **values, status=RunStatus.PENDING if due or values["status_detail"] else RunStatus.SUBMITTED, retry_at=due
    )
    count_large(project, 2 * len(run.config_text) + len(run.env_secret))  # of the file, and of the spec read from it
    return run


def submitted_values(
    project: Project, user: User, name: str, prepared: PreparedSubmission, submission: Submission, key: str
) -> dict[str, Any]:
    """The columns of a submission that a run and a sweep have in common."""
    spec = prepared.effective.spec
    waits = prepared.dependencies
    # Values from the client's environment are stored encrypted and never in the spec.
    masked = {name: submission.env[name] for name in prepared.run_file.masked_env if name in submission.env}
    return {
        "project": project,
        "user": user,
        "name": name,
        "status_detail": dependencies.detail(waits) if dependencies.waits(waits) else {},
        "priority": spec.priority,
        "shape": spec.shape_key(user.pk),
        "spec": spec.model_copy(update={"name": name, "array": None}).model_dump(mode="json"),
        "provenance": prepared.effective.provenance,
        "config_text": prepared.config_text,
        "env_secret": encrypt(json.dumps(masked)),
        "archive": prepared.archive,
        "idempotency_key": key,
        "body_digest": submission.digest() if key else "",
    }


def store(run: Run, prepared: PreparedSubmission) -> None:
    """Store a new run, inside `shared_rows_last`. Raises IntegrityError where a run has its name or key, Conflict."""
    due, waits = run.retry_at, run.status == RunStatus.SUBMITTED
    queue = take_seniority(prepared.queue.pk, run.name)
    refuse_draining(queue)
    if queue.has_sweep_named:
        raise name_taken(run.project, run.name)
    run.queue = queue
    run.seniority_us = seniority_us(due) if due else queue.last_seniority_us
    if waits or due:
        member_shares.enter(queue, run, waits=waits)
    else:
        run.rank = ordering.rank(run.seniority_us, run.priority, queue.step_us)
    run.submitted_at = run.queued_at = run.place_since = timezone.now()
    run.save(force_insert=True)
    for dependency in prepared.dependencies:
        dependency.run = run
    Dependency.objects.bulk_create(prepared.dependencies)
    facts = {"priority": run.priority, "queue": queue.name}
    event = record(run, RunEventKind.SUBMITTED, facts, actor=run.user, is_locked=True)
    run.first_events = [event]
    count_new(run)
    wakeups.request_pass(urgent=False)


def count_large(project: Project, size: int, runs: int = 1) -> None:
    """Limit the bytes of large run files. Raises TooMany, and Invalid for a sweep that no hour has room for."""
    if size < LARGE:
        return
    most = settings.DSTACKWEB_PROJECT_SUBMIT_MB << 20
    if runs > 1 and size * runs > most:
        msg = _("%(runs)s runs with %(size)s KB each are more than %(most)s MB: put what is large into the code") % {
            "runs": f"{runs:,}",
            "size": size >> 10,
            "most": most >> 20,
        }
        raise Invalid.at("array", msg=msg)
    try:
        Bucket.reserve(f"submit:{project.pk}", most / 3600, most, 0.0, amount=size * runs)
    except Busy as busy:
        raise TooMany(
            _(
                "project %(project)s has submitted %(limit_mb)s MB of large run files within an hour. Nothing was "
                "submitted. Try again later, or put what is large into the code or a secret"
            )
            % {"project": project.name, "limit_mb": settings.DSTACKWEB_PROJECT_SUBMIT_MB},
            retry_after=busy.wait_s,
        ) from None


def replayed(kind: type[R], project: Project, user: User, key: str, submission: Submission) -> R | None:
    """The run or sweep created with this key before. Raises Conflict if that was a different submission."""
    rows = kind._default_manager.select_related("queue", "project", "user")
    found = rows.filter(project=project, user=user, idempotency_key=key).first()
    if found is not None and found.body_digest != submission.digest():
        raise Conflict(_("this Idempotency-Key was used for another submission. Nothing was submitted."))
    return found


def set_priority(run: Run, user: User, role: str, priority: int, if_match: str | None = None) -> Run:
    """As `set_priorities` for one run, whose etag was `if_match`."""
    set_priorities([run], user, role, priority, None if if_match is None else {run.pk: if_match})
    return Run.objects.select_related("queue", "project", "user").get(pk=run.pk)


def set_queue(run: Run, user: User, role: str, name: str, if_match: str | None = None) -> Run:
    """Move a waiting run to another queue of its project, at the position of its seniority there."""
    transfer([run], user, role, name, None if if_match is None else {run.pk: if_match})
    return Run.objects.select_related("queue", "project", "user").get(pk=run.pk)


def stop(run: Run, user: User, role: str, abort: bool = False) -> Run:
    """Stop a run: TERM and the run's `stop_duration`, or at once with `abort`. Repeatable.

    Of an ended run it ends the schedule, if its next occurrence has not been created. Raises Conflict where nothing is
    left to stop, Forbidden for another member's run.
    """
    may_change(run, user, role)
    return _stop(run, user, abort)


def _stop(run: Run, user: User | None, abort: bool) -> Run:
    now = timezone.now()
    reason = Reason.ABORTED_BY_USER if abort else Reason.STOPPED_BY_USER
    job_reason = Reason.ABORTED_BY_USER if abort else Reason.TERMINATED_BY_USER
    with shared_rows_last():
        fresh = lock_run(run.pk)
        if _is_over(fresh):
            raise Conflict(
                _("run %(run)s has already ended (%(status)s)") % {"run": fresh.name, "status": fresh.status}
            )
        if fresh.status in ENDED:
            end_schedule(fresh, ScheduleWait.STOPPED, actor=user)
        elif fresh.status in WAITING:
            move_run(
                fresh, RunStatus.TERMINATED, now=now, actor=user, termination_reason=reason, data={"reason": reason}
            )
            wakeups.request_pass()
        else:
            if fresh.status != RunStatus.TERMINATING:
                move_run(fresh, RunStatus.TERMINATING, now=now, actor=user, stop_reason=reason, data={"reason": reason})
            elif abort or not fresh.stop_reason:
                Run.objects.filter(pk=fresh.pk).update(stop_reason=reason)
                fresh.stop_reason = reason
                record(fresh, RunEventKind.STOP_REQUESTED, {"reason": reason}, actor=user)
            stop_jobs(fresh, job_reason, grace_s=0 if abort else None)
            settle_run(fresh)
    return Run.objects.select_related("queue", "project", "user").get(pk=run.pk)


def _is_over(run: Run) -> bool:
    """Whether a run has ended, and its schedule with it."""
    return run.status in ENDED and run.retry_at is None


def stop_all(runs: Sequence[Run], user: User, role: str) -> list[Run]:
    """Stop several runs, as `stop` does each, and return them; those that have ended meanwhile are left out.

    A few at a time: others wait for their queues only so long. Locks these and then all of the rows first, as moves and
    passes do. Raises Forbidden, having stopped none, and Conflict if all have ended.
    """
    for run in runs:
        may_change(run, user, role)
    stopped = stop_runs(runs, user)
    if runs and not stopped:
        raise Conflict(_("run %(name)s has already ended") % {"name": runs[0].name})
    return stopped


def stop_runs(runs: Sequence[Run], user: User | None, *, abort: bool = False) -> list[Run]:
    """`stop_all` for a user who may do that; nothing if all have ended."""
    stopped: list[Run] = []
    for start in range(0, len(runs), STOPPED_AT_ONCE):
        part = runs[start : start + STOPPED_AT_ONCE]
        with shared_rows_last():
            for queue_id in sorted({run.queue_id for run in part}):
                lock_queue(queue_id)
            ended = {pk for pk in sorted({run.pk for run in part}) if _is_over(lock_run(pk))}
            stopped += [_stop(run, user, abort) for run in part if run.pk not in ended]
    return stopped
