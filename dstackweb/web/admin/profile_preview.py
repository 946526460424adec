"""What a change of a profile would do, before it is saved: what differs, which runs, what it would have stopped."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any, NamedTuple

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.views.decorators.http import require_POST

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import Project, User
from dstackweb.gpus import rollout
from dstackweb.gpus.savings import WhatIf, what_if
from dstackweb.profiles.models import Profile
from dstackweb.scheduler.passes.profile_impact import Affected, Impact, impact
from dstackweb.spec.effective import UtilizationPolicy
from dstackweb.spec.run_file import parse_profile_settings
from dstackweb.wording import audit, waiting
from dstackweb.wording.sentence import Sentence

MOST_PROJECTS = 5
"""Whose last day is simulated: each reads up to a million samples."""
SHOWN = 10


class Stopped(NamedTuple):
    """What the policy would have done in a project in the last day."""

    project: Project
    result: WhatIf


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


def _stopped(request: HttpRequest, profile: Profile, policy: UtilizationPolicy, now: dt.datetime) -> Iterator[Stopped]:
    assert isinstance(request.user, User), "the admin site requires a sign-in"
    mine = rollout.projects_of(profile) & visible_projects(request.user)
    for project in mine.order_by("name")[:MOST_PROJECTS]:
        result = what_if(project, policy, now)
        if result.runs:
            yield Stopped(project, result)
