"""What admins see before a change: how much goes with a project, and what a profile's new settings would do."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

from django.contrib import admin, messages
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
from django.views.decorators.http import require_POST

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import ApiToken, Project, User
from dstackweb.gpus import rollout
from dstackweb.gpus.savings import WhatIf, what_if
from dstackweb.lib.errors import DomainError
from dstackweb.profiles.models import Profile
from dstackweb.runs import archives, selectors
from dstackweb.runs.models import Archive, ProjectArtifacts, ProjectLogs, Queue, Sweep
from dstackweb.scheduler.passes.profile_impact import Affected, Impact, impact
from dstackweb.scheduler.processes import project_removal, tasks
from dstackweb.spec.effective import UtilizationPolicy
from dstackweb.spec.run_file import parse_profile_settings
from dstackweb.web.common.pages import sentence
from dstackweb.wording import audit, units, waiting
from dstackweb.wording.sentence import Sentence, listing


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


def contents(project: Project) -> list[tuple[str, str]]:
    """What goes with the project, and how much of it, by kept counters and short counts."""
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
    sizes = {_("Logs"): logs, _("Artifacts"): ProjectArtifacts.used(project), _("Code"): archives.code_size(project)}
    found = [(label, f"{number:,}") for label, number in numbers.items() if number]
    return found + [(label, units.size(size)) for label, size in sizes.items() if size]


MOST_PROJECTS = 5
"""Whose last day is simulated: each reads up to a million samples."""
SHOWN = 10


@require_POST
def preview(request: HttpRequest) -> HttpResponse:
    """The answer to the form as it is now. With `live` only its errors and differences, which cost nothing."""
    options = admin.site._registry[Profile]
    pk = request.GET.get("profile", "")
    saved = options.get_object(request, pk) if pk else None
    if pk and saved is None:
        raise Http404
    if not (options.has_change_permission(request, saved) if saved else options.has_add_permission(request)):
        raise PermissionDenied
    before = dict(saved.settings) if saved else {}
    form = options.get_form(request, saved, change=saved is not None)(request.POST, instance=saved)
    is_live = "live" in request.GET
    context: dict[str, Any] = {"live": is_live}
    if form.is_valid():
        after = form.instance
        context["differences"] = audit.differences(before, after.settings)
        if not is_live:
            context |= _impact(request, after, timezone.now())
    else:
        context["wrong"] = [_fault(form, name, str(one)) for name, errors in form.errors.items() for one in errors]
    status = 422 if "wrong" in context else 200
    return TemplateResponse(request, "admin/profiles/profile/preview.html", context, status=status)


def _fault(form: Any, name: str, text: str) -> tuple[str, Any, str]:
    """The field's id and label, empty for the form as a whole, with the error."""
    known = name in form.fields
    return (form[name].auto_id, form.fields[name].label, text) if known else ("", "", text)


def _impact(request: HttpRequest, profile: Profile, now: dt.datetime) -> dict[str, Any]:
    """`profile` has the new settings, and is not saved."""
    fields = parse_profile_settings(profile.settings)
    policy = rollout.policy_set_by(profile)
    found: Impact = impact(profile, fields, now)
    changes = rollout.changes(profile, now) if profile.pk else None
    return {
        "impact": found,
        "changed": sorted(found.changed.items()),
        "impossible": [(one, _why(one)) for one in found.impossible[:SHOWN]],
        "freed": found.freed[:SHOWN],
        "policy": policy,
        "policy_runs": changes.total if changes else 0,
        "policy_listed": changes.listed[:SHOWN] if changes else [],
        "stopped": list(_stopped(request, profile, policy, now)) if policy else [],
        "now": now,
    }


def _why(one: Affected) -> Sentence:
    return Sentence(waiting.reason(one.wait.reason, one.wait.data).text).capitalized()


def _stopped(
    request: HttpRequest, profile: Profile, policy: UtilizationPolicy, now: dt.datetime
) -> Iterator[tuple[Project, WhatIf]]:
    """What the policy would have done in each project in the last day."""
    assert isinstance(request.user, User), "the admin site requires a sign-in"
    mine = rollout.projects_of(profile) & visible_projects(request.user)
    for project in mine.order_by("name")[:MOST_PROJECTS]:
        result = what_if(project, policy, now)
        if result.runs:
            yield project, result
