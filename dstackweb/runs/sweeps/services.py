"""What people do with sweeps: submit, release, stop, change the priority, retry failed runs."""

from __future__ import annotations

from django.db import IntegrityError
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Conflict, NotFound
from dstackweb.runs import dependencies, run_names, services
from dstackweb.runs.concurrency import check_priority, may_change as may_change
from dstackweb.runs.models import Dependency, Queue, Run, Sweep, SweepCount
from dstackweb.runs.queue.queues import lock_queue, refuse_draining, take_seniority
from dstackweb.runs.queue.reorder import set_priority_of_all
from dstackweb.runs.services import PreparedSubmission, Submission
from dstackweb.runs.shared_rows import shared_rows_last, touch_sweep
from dstackweb.runs.states import ACTIVE
from dstackweb.runs.sweeps import creation
from dstackweb.runs.sweeps.selectors import find_sweep
from dstackweb.runs.transitions import RunChanged


def submit(
    project: Project, user: User, role: str, submission: Submission, idempotency_key: str = ""
) -> tuple[Run | Sweep, bool]:
    """Submit a run, or a sweep where the file has an `array`, as `services.submit` does."""
    if idempotency_key and (earlier := replayed(project, user, idempotency_key, submission)):
        return earlier, False
    prepared = services.prepare(project, user, role, submission)
    if prepared.effective.spec.array is None:
        return services.submit_prepared(project, user, prepared, submission, idempotency_key)
    sweep = new_sweep(project, user, prepared, submission, idempotency_key)
    try:
        with shared_rows_last():
            store(sweep, prepared)
    except IntegrityError:
        if idempotency_key and (earlier := replayed(project, user, idempotency_key, submission)):
            return earlier, False
        raise name_taken(project, sweep.name) from None
    return find_sweep(project, str(sweep.uid)), True


def new_sweep(project: Project, user: User, prepared: PreparedSubmission, submission: Submission, key: str) -> Sweep:
    """The sweep of a submission, not stored. Raises TooMany where the project has submitted too much."""
    array = prepared.effective.spec.array
    assert array is not None, "the file of a sweep has an array"
    name = prepared.effective.spec.name or run_names.free_name(project)
    values = services.submitted_values(project, user, name, prepared, submission, key)
    sweep = Sweep(
        **values,
        size=array.size,
        max_parallel=array.max_parallel,
        is_pending=bool(values["status_detail"]),
        array=array.model_dump(mode="json"),
    )
    services.count_large(project, 2 * creation.config_size(sweep) + len(sweep.env_secret), array.size)
    _end_if_over(project, name)
    return sweep


def store(sweep: Sweep, prepared: PreparedSubmission) -> None:
    """Store a new sweep, inside `shared_rows_last`, and create the runs that there is room for; none while it waits for
    others. Raises IntegrityError where its name or key, or the name of a run, is taken.
    """
    now = timezone.now()
    queue = take_seniority(prepared.queue.pk)
    queue.project = sweep.project
    refuse_draining(queue)
    if run_names.is_taken(sweep.project, sweep.name):
        raise run_names.name_taken(sweep.project, sweep.name)
    sweep.queue, sweep.seniority_us, sweep.submitted_at = queue, queue.last_seniority_us, now
    sweep.save(force_insert=True)
    sweep.count = SweepCount.objects.create(sweep=sweep)
    for dependency in prepared.dependencies:
        dependency.waiting_sweep = sweep
    Dependency.objects.bulk_create(prepared.dependencies)
    touch_sweep(sweep)
    creation.fill(queue, sweep, now)


def _end_if_over(project: Project, name: str) -> None:
    """Free the name of a sweep whose last run has ended a moment ago."""
    for sweep in Sweep.objects.filter(project=project, name=name, ended_at=None).select_related("count"):
        if sweep.is_over:
            creation.settle_one(sweep.pk, timezone.now())


def replayed(project: Project, user: User, key: str, submission: Submission) -> Run | Sweep | None:
    """What was created with this key before. Raises Conflict if that was a different submission."""
    found = services.replayed(Run, project, user, key, submission)
    return found or services.replayed(Sweep, project, user, key, submission)


def name_taken(project: Project, name: str) -> Conflict:
    if run_names.is_taken(project, name):
        return run_names.name_taken(project, name)
    msg = _(
        "a run with the name of one of %(name)s was submitted at the same moment. Nothing was submitted. Try again."
    ) % {"name": repr(name)}
    return Conflict(msg, name=name)


def release(sweep: Sweep, user: User, role: str) -> Sweep:
    """Let a sweep enter its queue without waiting for others any longer. Raises Conflict if it doesn't, Forbidden."""
    may_change(sweep, user, role)
    with shared_rows_last():
        queue, fresh = _locked(sweep)
        if not fresh.is_pending:
            raise Conflict(_("sweep %(sweep)s doesn't wait for other runs") % {"sweep": sweep.name})
        dependencies.stop_waiting(fresh)
        creation.enter_queue(queue, fresh)
    creation.settle_one(sweep.pk, timezone.now())
    return find_sweep(sweep.project, str(sweep.uid))


def stop(sweep: Sweep, user: User, role: str, abort: bool = False) -> Sweep:
    """Create no more runs of a sweep, and stop those that are active as `services.stop` does. Repeatable.

    Where this is interrupted, the next check stops the rest. Raises Conflict once it has ended, Forbidden.
    """
    may_change(sweep, user, role)
    with shared_rows_last():
        fresh = _locked(sweep)[1]
        if fresh.ended_at is not None:
            raise Conflict(_("sweep %(sweep)s has already ended") % {"sweep": sweep.name})
        fresh.stopped_at = fresh.stopped_at or timezone.now()
        fresh.stopped_by, fresh.is_stopping, fresh.is_aborted = user, True, fresh.is_aborted or abort
        fresh.retry_before, fresh.waits_for_name = None, ""
        fresh.is_pending, fresh.status_detail = False, {}
        fresh.save(update_fields=STOP_FIELDS)
        touch_sweep(fresh)
    creation.finish_stop(fresh)
    creation.settle_one(sweep.pk, timezone.now())
    return find_sweep(sweep.project, str(sweep.uid))


STOP_FIELDS = (
    "stopped_at", "stopped_by", "is_stopping", "is_aborted", "retry_before", "waits_for_name", "is_pending",
    "status_detail",
)  # fmt: skip


def set_priority(sweep: Sweep, user: User, role: str, priority: int) -> Sweep:
    """Give this priority to a sweep's runs, also those to come. Raises Conflict if it has ended, Forbidden."""
    may_change(sweep, user, role)
    check_priority(sweep.project, role, priority)
    with shared_rows_last():
        # A run may be in another queue by now.
        active = Run.objects.filter(sweep=sweep, status__in=ACTIVE).exclude(queue=sweep.queue_id).order_by()
        others = set(active.values_list("queue_id", flat=True))
        queues = {queue_id: lock_queue(queue_id) for queue_id in sorted({sweep.queue_id, *others})}
        fresh = _fresh(sweep)
        if fresh.ended_at is not None:
            raise Conflict(
                _("sweep %(sweep)s has already ended. Its priority was not changed.") % {"sweep": sweep.name}
            )
        Sweep.objects.filter(pk=sweep.pk).update(priority=priority)
        for queue in queues.values():
            mine = Run.objects.filter(sweep=sweep, status__in=ACTIVE, queue=queue)
            set_priority_of_all(queue, list(mine.values_list("pk", flat=True)), user, priority)
        touch_sweep(fresh)
    return find_sweep(sweep.project, str(sweep.uid))


def retry(sweep: Sweep, user: User, role: str) -> Sweep:
    """Create the failed runs of a sweep once more, with their names, indices and parameters, as there is room.

    Each takes the place of the failed run, which stays as a run of its own. Runs that people stopped are left.
    Raises Conflict where none has failed, or while it is being stopped; Forbidden.
    """
    may_change(sweep, user, role)
    now = timezone.now()
    try:
        with shared_rows_last():
            queue, fresh = _locked(sweep)
            refuse_draining(queue)
            if fresh.is_stopping:
                raise Conflict(
                    _("sweep %(sweep)s is being stopped. Nothing was retried. Try again in a moment.")
                    % {"sweep": sweep.name}
                )
            if not creation.failed_runs(fresh).exists():
                raise Conflict(_("no run of sweep %(sweep)s has failed") % {"sweep": sweep.name})
            if Run.objects.filter(project=sweep.project, name=sweep.name, status__in=ACTIVE).exists():
                raise Conflict(
                    _("a run named %(run)s is active. Nothing was retried. Try again later.")
                    % {"run": repr(sweep.name)}
                )
            fresh.retry_before, fresh.ended_at = now, None
            fresh.save(update_fields=["retry_before", "ended_at"])
            touch_sweep(fresh)
            creation.fill(queue, fresh, now)
    except (IntegrityError, RunChanged):
        others = Sweep.objects.filter(project=sweep.project, name=sweep.name, ended_at=None).exclude(pk=sweep.pk)
        if others.exists():
            text = _("another sweep named %(sweep)s has not ended. Nothing was retried. Try again later.")
        else:
            text = _("a run of it has just changed. Nothing was retried. Try again later.")
        raise Conflict(text % {"sweep": repr(sweep.name)}) from None
    return find_sweep(sweep.project, str(sweep.uid))


def _locked(sweep: Sweep) -> tuple[Queue, Sweep]:
    """A sweep's queue, locked, and the sweep as it is now."""
    queue = lock_queue(sweep.queue_id)
    return queue, _fresh(sweep)


def _fresh(sweep: Sweep) -> Sweep:
    """Raises NotFound where it was removed with its last run."""
    fresh = Sweep.objects.select_related("user", "count").filter(pk=sweep.pk).first()
    if fresh is None:
        raise NotFound(_("sweep %(sweep)s no longer exists") % {"sweep": sweep.name})
    return fresh
