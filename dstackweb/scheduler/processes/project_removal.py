"""Deletes whole projects, which may have very many runs: marked by an admin, then removed by `retention` in small
steps. From the mark on it is hidden and takes nothing. What was interrupted goes on with the next tick, since the
project's row goes last."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

from django.db import transaction
from django.db.models import CASCADE, ForeignObjectRel, Model, Q, QuerySet
from django.utils.translation import gettext as _, ngettext

from dstackweb.accounts.models import Project
from dstackweb.backends.models import Instance, InstanceStatus
from dstackweb.lib.errors import Conflict
from dstackweb.lib.storage import storage
from dstackweb.progress.models import Scope
from dstackweb.runs import removal
from dstackweb.runs.models import Archive, Queue, Run, Sweep
from dstackweb.runs.queue.queues import lock_queue
from dstackweb.runs.states import ACTIVE

RUNS_AT_ONCE = 50
ROWS_AT_ONCE = 2_000


def blockers(project: Project) -> list[str]:
    """What has to end before the project can be deleted, in words; empty when it can be."""
    found = []
    if runs := Run.objects.filter(project=project, status__in=ACTIVE).count():
        found.append(ngettext("%d active run", "%d active runs", runs) % runs)
    if sweeps := Sweep.objects.filter(project=project, ended_at=None).count():
        found.append(ngettext("%d active sweep", "%d active sweeps", sweeps) % sweeps)
    if instances := Instance.objects.filter(project=project).exclude(status=InstanceStatus.GONE).count():
        found.append(ngettext("%d cloud instance", "%d cloud instances", instances) % instances)
    return found


def begin(project: Project, now: dt.datetime) -> None:
    """Mark the project as being deleted, which ends its schedules. Raises Conflict while anything of it is active."""
    with transaction.atomic():
        # Submits and schedules lock their queue before they add a run: none does after this.
        ids = Queue.objects.filter(project=project).order_by("pk").values_list("pk", flat=True)
        locked = [lock_queue(queue_id) for queue_id in ids]
        if active := blockers(project):
            text = _("project %(project)s still has: %(active)s. Nothing was deleted. Stop them or wait for their end.")
            raise Conflict(text % {"project": project.name, "active": _(", ").join(active)})
        for queue in locked:
            queue.draining = True
            queue.save(update_fields=["draining"])
        Run.objects.filter(project=project, retry_at__isnull=False).update(retry_at=None)
        project.deleting_since = now
        project.save(update_fields=["deleting_since"])


def marked() -> QuerySet[Project]:
    """The projects that are being deleted, the first mark first."""
    return Project.objects.filter(deleting_since__isnull=False).order_by("deleting_since", "pk")


def waiting(most: int) -> int:
    """How many runs such projects still have, and the projects themselves; at most `most`."""
    return min(most, Run.objects.filter(project__in=marked())[:most].count() + marked().count())


def step(now: dt.datetime) -> int:
    """Remove a little of the project that was marked first; returns how much, 0 when nothing is left to do now."""
    project = marked().first()
    if project is None:
        return 0
    ids = list(Run.objects.filter(project=project).order_by("pk").values_list("pk", flat=True)[:RUNS_AT_ONCE])
    if ids:
        return removal.remove(ids, Q(), now)
    archives = list(Archive.objects.filter(project=project).order_by("pk")[:RUNS_AT_ONCE])
    for archive in archives:  # the files first: an interrupted step finds them again by their rows
        storage().remove(archive.key)
    scopes = Scope.objects.filter(project=project, run_id__gt=0)
    scopes.exclude(ended_ms=0).update(ended_ms=0)
    for rows in _rows(project):
        if some := list(rows.order_by().values_list("pk", flat=True)[:ROWS_AT_ONCE]):
            deleted: int = rows.model._base_manager.filter(pk__in=some).delete()[0]
            return deleted
    if scopes.exists():
        return 0  # `finalize` prunes their tasks, in small steps too
    return project.delete()[0]


def _rows(project: Project) -> Iterator[QuerySet[Any]]:
    """The project's other rows, each kind behind those that refer to it."""
    yield Sweep.objects.filter(project=project)
    yield Archive.objects.filter(pk__in=Archive.objects.filter(project=project).order_by("pk")[:RUNS_AT_ONCE])
    for model in _belonging_to(Queue):
        yield model._base_manager.filter(queue__project=project)
    for model in _belonging_to(Project):
        yield model._base_manager.filter(project=project)


def _belonging_to(owner: type[Model]) -> list[type[Model]]:
    """The models whose rows go with those of `owner`, which they call by its name; without those removed above."""
    relations = [one for one in owner._meta.get_fields(include_hidden=True) if isinstance(one, ForeignObjectRel)]
    mine = [one for one in relations if one.on_delete is CASCADE and one.field.name == owner._meta.model_name]
    return [one.field.model for one in mine if one.field.model not in (Run, Sweep, Archive, Scope)]
