"""From a row on the admin site to the page of the product that shows it."""

from __future__ import annotations

from django.db.models import Model
from django.urls import reverse

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import Invite, Membership, Project, ProjectSecret, SavedView, User
from dstackweb.backends.models import Backend, Gpu, Host, HostEvent, Instance
from dstackweb.gpus.models import ProjectPolicies
from dstackweb.profiles.models import Profile
from dstackweb.runs.models import Allocation, Job, Queue, QueueEvent, Run, RunEvent, Sweep


def page_for(row: Model, reader: User) -> str:
    """Its address, if the reader may see that page."""
    projects = visible_projects(reader)
    project = _project_of(row)
    if project is not None and not projects.filter(pk=project.pk).exists():
        return ""
    return page_of(row, projects.order_by("name").first())


def _project_of(row: Model) -> Project | None:
    match row:
        case Project():
            return row
        case Job() | RunEvent():
            return row.run.project
        case Allocation():
            return row.job.run.project
        case QueueEvent():
            return row.queue.project
    return getattr(row, "project", None)


def page_of(row: Model, home: Project | None) -> str:
    """Its address; empty if there is none. `home` is the reader's project, for what belongs to no project."""
    match row:
        case Run():
            return reverse("web:run", args=[row.project.name, row.uid])
        case Job() | RunEvent():
            return page_of(row.run, home)
        case Allocation():
            return page_of(row.job.run, home)
        case Sweep():
            return reverse("web:sweep", args=[row.project.name, row.uid])
        case Queue():
            return reverse("web:queue-settings", args=[row.project.name, row.name])
        case QueueEvent():
            return page_of(row.queue, home)
        case Project():
            return reverse("web:queue", args=[row.name])
        case Membership() | Invite():
            return reverse("members", args=[row.project.name])
        case ProjectSecret():
            return reverse("secrets", args=[row.project.name])
        case ProjectPolicies():
            return reverse("web:utilization", args=[row.project.name])
        case SavedView():
            return f"{reverse('web:queue', args=[row.project.name])}?{row.query}"
        case Instance() if row.project is not None:
            return reverse("web:instances", args=[row.project.name])
        case Profile() if (project := row.project or home) is not None:
            return reverse("web:profiles", args=[project.name])
        case Host() if home is not None:
            return reverse("web:host", args=[home.name, row.name])
        case HostEvent():
            return page_of(row.host, home)
        case Gpu() if home is not None:
            return reverse("web:gpu", args=[home.name, row.uuid])
        case Backend() if home is not None:
            return reverse("web:offers", args=[home.name]) + f"?backend={row.name}"
    return ""
