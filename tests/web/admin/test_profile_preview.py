"""The preview of a profile's change: errors of fields, differences, runs that could never start, the policy."""

from __future__ import annotations

import pytest
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse

from dstackweb.profiles.models import Profile
from tests.factories import join, make_host, make_project, make_run, make_user
from tests.forms import open_form, submit

pytestmark = pytest.mark.django_db
URL = "/admin/profiles/profile/preview/"


def preview(client: Client, profile: Profile | None, **values: str) -> HttpResponse:
    """The answer to the button on the form of a profile, or of a new one, after these fields were filled in."""
    page = (
        reverse("admin:profiles_profile_change", args=[profile.pk])
        if profile
        else reverse("admin:profiles_profile_add")
    )
    answer: HttpResponse = submit(client, page, {"name": "nightly", **values}, button="Preview the impact")
    return answer


def test_faults_are_named_with_their_fields(admin_client: Client) -> None:
    answer = preview(admin_client, None, max_duration="soon", labels="disk", min_gpu_utilization="10")
    page = answer.content.decode()
    assert answer.status_code == 422
    for field in ("id_max_duration", "id_labels", "id_time_window"):
        assert f'data-wrong="{field}"' in page


def test_while_typing_only_the_differences_are_shown(admin_client: Client) -> None:
    profile = Profile.objects.create(name="nightly", settings={"max_duration": "8h", "backends": ["hosts"]})
    form = open_form(admin_client, reverse("admin:profiles_profile_change", args=[profile.pk]))
    sent_by_script = form.filled({"max_duration": "12h", "min_gpu_utilization": "20", "time_window": "30m"})
    page = admin_client.post(f"{URL}?profile={profile.pk}&live=1", sent_by_script).content.decode()
    assert "max_duration: 8h → 12h" in page
    assert "utilization_policy.min_gpu_utilization: 20" in page
    assert "Waiting runs" not in page
    profile.refresh_from_db()
    assert profile.settings["max_duration"] == "8h"


def test_waiting_runs_that_could_never_start_are_named(admin_client: Client) -> None:
    make_host("box-1", cpus=8)
    project = make_project("vision")
    ada = join(project, make_user("ada"))
    profile = Profile.objects.create(name="nightly", settings={})
    for name in ("a", "b"):
        make_run(project, ada, name, profile="nightly", resources={"cpu": 2})
    make_run(project, ada, "own", profile="nightly", max_duration="1h", labels={"disk": "ssd"})
    page = preview(admin_client, profile, labels="disk=nvme", max_duration="4h").content.decode()
    assert "3 runs wait with this profile" in page
    assert "and runs like it (2) could never start." in page
    assert "<code>max_duration</code> would differ for 2 runs" in page


def test_people_without_the_permission_get_no_preview(client: Client) -> None:
    """No page of theirs asks for one."""
    client.force_login(make_user("staff", is_staff=True))
    assert client.post(URL, {"name": "nightly"}).status_code == 403
