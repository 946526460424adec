"""The question before a project is deleted: how much of each kind goes with it, and what has to end first."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.decorators import method_decorator
from django.utils.translation import gettext as _
from django.views.decorators.csrf import csrf_protect

from dstackweb.accounts.models import ApiToken, Project, User
from dstackweb.lib.errors import DomainError
from dstackweb.profiles.models import Profile
from dstackweb.runs import files, selectors
from dstackweb.runs.models import Archive, ProjectArtifacts, ProjectLogs, Queue, Sweep
from dstackweb.scheduler.processes import project_removal, tasks
from dstackweb.web.common.pages import sentence
from dstackweb.wording import units
from dstackweb.wording.sentence import listing


class Content(NamedTuple):
    """How much of one kind a project has, in words."""

    label: str
    amount: str


class ProjectDeletion(ModelAdmin[Any]):
    """Projects are deleted one at a time, by deployment admins; from the answer on they are shown as being deleted."""

    delete_confirmation_template = "admin/accounts/project/delete_confirmation.html"

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        actions: dict[str, Any] = super().get_actions(request)
        actions.pop("delete_selected", None)
        return actions

    def has_change_permission(self, request: HttpRequest, obj: Project | None = None) -> bool:
        return _is_there(obj) and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Project | None = None) -> bool:
        may = isinstance(request.user, User) and request.user.is_superuser
        return may and _is_there(obj) and super().has_delete_permission(request, obj)

    @method_decorator(csrf_protect)
    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        project = self.get_object(request, unquote(object_id))
        if project is None:
            raise Http404
        if not self.has_delete_permission(request, project):
            raise PermissionDenied
        if request.method == "POST":
            return _delete(request, project)
        context = {
            **self.admin_site.each_context(request),
            "object": project,
            "opts": self.opts,
            "title": _("Delete %s") % project.name,
            "contents": contents(project),
            "active": listing(project_removal.blockers(project)),
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, self.delete_confirmation_template, context)


def _is_there(project: Project | None) -> bool:
    return project is None or project.deleting_since is None


def _delete(request: HttpRequest, project: Project) -> HttpResponse:
    try:
        project_removal.begin(project, timezone.now())
    except DomainError as refused:
        messages.error(request, sentence(refused.detail))
        return redirect("admin:accounts_project_delete", project.pk)
    tasks.prune_soon()
    text = _("Deleting %(project)s. Health shows how many of its runs are left.")
    messages.success(request, text % {"project": project.name})
    return redirect(reverse("admin:accounts_project_changelist"))


def contents(project: Project) -> list[Content]:
    """What goes with the project, by kept counters and short counts; without what it has none of."""
    logs = ProjectLogs.objects.filter(pk=project.pk).values_list("bytes", flat=True).first() or 0
    numbers = {
        _("Runs, with their jobs and events"): sum(selectors.counts(project).values()),
        _("Sweeps"): Sweep.objects.filter(project=project).count(),
        _("Queues"): Queue.objects.filter(project=project).count(),
        _("Archives of code"): Archive.objects.filter(project=project, removed_at=None).count(),
        _("Profiles"): Profile.objects.filter(project=project).count(),
        _("Secrets"): project.secrets.count(),
        _("Memberships"): project.memberships.count(),
        _("API tokens for this project alone"): ApiToken.objects.filter(project=project).count(),
    }
    sizes = {_("Logs"): logs, _("Artifacts"): ProjectArtifacts.used(project), _("Code"): files.code_size(project)}
    found = [Content(label, f"{number:,}") for label, number in numbers.items() if number]
    return found + [Content(label, units.size(size)) for label, size in sizes.items() if size]
