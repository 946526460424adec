"""The profiles that runs of a project can name."""

from __future__ import annotations

from django.http import HttpResponse
from django.shortcuts import render

from dstackweb.profiles import selectors as profiles
from dstackweb.web.common.pages import PageRequest, project_page
from dstackweb.web.runs import details


@project_page()
def profiles_page(request: PageRequest) -> HttpResponse:
    """The profiles of this project, and its default."""
    found = [
        {"profile": profile, "settings": details.profile_settings(profile.settings)}
        for profile in profiles.visible(request.project)
    ]
    context = {"profiles": found, "chosen": profiles.default(request.project), "can_edit": request.user.is_staff}
    return render(request, "runs/profiles.html", context)
