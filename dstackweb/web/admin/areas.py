"""The areas of the admin site: its models by what admins do. Pure data; a test finds each registered model in it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import Permission
from django.db.models import QuerySet
from django.forms import CheckboxSelectMultiple, ModelMultipleChoiceField
from django.forms.models import ModelChoiceIterator, ModelChoiceIteratorValue
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _, pgettext_lazy

from dstackweb.accounts.models import User


class Entry(NamedTuple):
    """A model by its label (`app.model`), with one line of help. `name` stands for the model's own name in lists."""

    model: str
    help: Any
    name: Any = ""


class Area(NamedTuple):
    """Models that belong together. In a `fixed` one nothing can be added, changed or deleted."""

    key: str
    label: Any
    help: Any
    icon: str
    entries: tuple[Entry, ...]
    fixed: bool = False


AREAS = (
    Area(
        "people",
        _("People and access"),
        _("Who may sign in, and with what."),
        "members",
        (
            Entry("accounts.user", _("Accounts, passwords and two-step sign-in.")),
            Entry("accounts.apitoken", _("For programs and the command line. Revoke lost ones here."), _("API tokens")),
            Entry("accounts.invite", _("Links that let one person into a project.")),
            Entry("accounts.sshkey", _("What people enter dev environments with."), _("SSH keys")),
            Entry("accounts.loginlink", _("Links that sign in once."), _("Sign-in links")),
            Entry("auth.group", _("Permissions for staff who are not deployment admins."), _("Staff groups")),
            Entry(
                "accounts.passwordfailures",
                _("Failed sign-ins by user and address. Delete a row to let them try again."),
                _("Failed sign-ins"),
            ),
            Entry(
                "accounts.addressfailures",
                _("Addresses with many failed attempts. Delete a row to let one try again."),
                _("Blocked addresses"),
            ),
        ),
    ),
    Area(
        "projects",
        _("Projects and queues"),
        _("What teams share, and in which order they get it."),
        "queue",
        (
            Entry("accounts.project", _("Teams, with their weight, budget and members.")),
            Entry("accounts.membership", _("Who is in which project, and with which role.")),
            Entry("runs.queue", _("Order, limits, fair share and preemption.")),
            Entry("runs.run", _("All runs. The priority of active ones and the queue of waiting ones can be changed.")),
            Entry("runs.sweep", _("Many runs of one file.")),
            Entry("accounts.projectsecret", _("Values that run files name; stored encrypted."), _("Secrets")),
            Entry("accounts.savedview", _("Filters of the queue that people saved.")),
            Entry("accounts.defaultview", _("The views with which people's queue pages begin.")),
        ),
    ),
    Area(
        "profiles",
        _("Profiles and policies"),
        _("Defaults for runs, and what happens to idle GPUs."),
        "profiles",
        (
            Entry("profiles.profile", _("Defaults for runs: backends, durations, retries, utilization policy.")),
            Entry(
                "gpus.projectpolicies",
                _("How each project enforces utilization policies."),
                _("Policy enforcement"),
            ),
        ),
    ),
    Area(
        "capacity",
        _("Capacity"),
        _("Hosts, clouds and clusters that run jobs."),
        "hosts",
        (
            Entry("backends.backend", _("Own hosts, clouds and clusters, with a connection test.")),
            Entry("backends.host", _("Own machines: labels, set-up, draining.")),
            Entry("backends.gpu", _("GPUs that hosts reported.")),
            Entry("backends.instance", _("Machines started in a cloud, and why they ended."), _("Cloud instances")),
            Entry("backends.hostevent", _("When hosts joined, drained, failed or left.")),
        ),
    ),
    Area(
        "system",
        _("System"),
        _("What the scheduler keeps, for looking into a problem. Read-only."),
        "health",
        (
            Entry("audit.auditentry", _("Who changed what, when and from where."), _("Audit log")),
            Entry("runs.job", _("Nodes of runs, with their place and end.")),
            Entry("runs.allocation", _("CPUs, memory and GPUs that jobs hold.")),
            Entry("runs.runevent", _("What happened to runs.")),
            Entry("runs.queueevent", _("Changes of queues' settings.")),
            Entry("runs.verdict", _("Why runs wait: the last answer per queue and shape.")),
            Entry("runs.pastverdict", _("Earlier reasons to wait.")),
            Entry("runs.pastplace", _("Where runs stood in their queue.")),
            Entry("runs.membershare", _("Used, held and queued GPUs of members, for fair share.")),
            Entry("runs.queuecount", _("Counters of runs by status.")),
            Entry("runs.sweepcount", _("Counters of a sweep's runs by status.")),
            Entry("runs.archive", _("Uploaded code.")),
            Entry("runs.artifact", _("Files that runs left, with their sizes.")),
            Entry("progress.scope", _("Task counters of runs.")),
            Entry("progress.reporter", _("Programs that report tasks.")),
            Entry("scheduler.periodicjob", _("When each periodic job is due and last ran.")),
            Entry("scheduler.passstate", _("The last placement pass.")),
            Entry("scheduler.retention", _("How far old data is pruned.")),
            Entry("lib.watch", _("How long the server has watched hosts and runners.")),
            Entry("lib.lease", _("Which process does what only one may do.")),
            Entry("django_q.ormq", _("Tasks that wait for a worker."), _("Task queue")),
            Entry("django_q.failure", _("Tasks that ended with an error."), _("Failed tasks")),
        ),
        fixed=True,
    ),
)
UNUSED = frozenset(
    {
        "django_q.schedule",  # periodic jobs are rows of the scheduler's own
        "django_q.success",
    }
)
"""Models of other packages that this product keeps empty."""

AREA_OF = {entry.model: area for area in AREAS for entry in area.entries}


ACTIONS = {
    "view": pgettext_lazy("permission", "View"),
    "add": pgettext_lazy("permission", "Add"),
    "change": pgettext_lazy("permission", "Change"),
    "delete": pgettext_lazy("permission", "Delete"),
}
ALL: Any = SimpleNamespace(user=User(is_superuser=True))
"""Stands for the request of a deployment admin, of which options read only the user."""


class Line(NamedTuple):
    """A model's name, and the actions of ACTIONS that its pages have, by the key of their permission."""

    name: str
    actions: dict[tuple[str, str], str]


def name_of(entry: Entry) -> str:
    """What lists call a model."""
    return str(entry.name or capfirst(apps.get_model(entry.model)._meta.verbose_name_plural))


def lines() -> list[Line]:
    """In the order of the areas. django-q registers its table of tasks only where the broker is the database."""
    entries = (entry for area in AREAS for entry in area.entries)
    registered = (entry for entry in entries if apps.get_model(entry.model) in admin.site._registry)
    return [Line(name_of(entry), dict(_actions(entry.model))) for entry in registered]


def _actions(label: str) -> Iterator[tuple[tuple[str, str], str]]:
    """On the model's own pages, and on those of others that have its rows."""
    model = apps.get_model(label)
    options: list[Any] = [admin.site._registry[model]]
    for owner in admin.site._registry.values():
        options += [inline(owner.model, admin.site) for inline in owner.inlines if inline.model is model]
    for action in ACTIONS:
        if any(_allows(one, action) for one in options):
            yield (model._meta.app_label, f"{action}_{model._meta.model_name}"), action


def _allows(options: Any, action: str) -> bool:
    """Of no row in particular; only inlines ask for one before it is added."""
    if action == "delete" and not getattr(options, "can_delete", True):
        return False
    row = () if action == "add" and isinstance(options, admin.ModelAdmin) else (None,)
    return bool(getattr(options, f"has_{action}_permission")(ALL, *row))


def offered() -> QuerySet[Permission]:
    """The permissions that the site's pages ask for."""
    keys = {key for line in lines() for key in line.actions}
    found = Permission.objects.filter(codename__in={codename for _label, codename in keys})
    rows = found.values_list("pk", "content_type__app_label", "codename")
    return Permission.objects.filter(pk__in=[pk for pk, *key in rows if tuple(key) in keys])


class _ByModel(ModelChoiceIterator):  # type: ignore[type-arg]  # not subscriptable at run time
    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        rows = {(row.content_type.app_label, row.codename): row for row in self.queryset.select_related("content_type")}
        for line in lines():
            boxes = [
                (
                    ModelChoiceIteratorValue(rows[key].pk, rows[key]),
                    format_html('{}<span class="visually-hidden"> {}</span>', ACTIONS[action], line.name),
                )
                for key, action in line.actions.items()
                if key in rows
            ]
            if boxes:
                yield line.name, boxes


class PermissionsField(ModelMultipleChoiceField):  # type: ignore[type-arg]  # not subscriptable at run time
    """Permissions as a line of checkboxes for each model."""

    iterator = _ByModel
    widget = CheckboxSelectMultiple(attrs={"class": "dw-permissions"})
