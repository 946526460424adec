"""The preview of a profile's change: errors of fields, differences, runs that could never start, the policy."""

from __future__ import annotations

import pytest
from django.test import Client

from dstackweb.profiles.models import Profile
from tests.factories import join, make_host, make_project, make_run, make_user

pytestmark = pytest.mark.django_db
URL = "/admin/profiles/profile/preview/"


def form(**values: str) -> dict[str, str]:
    return {"name": "nightly", "project": "", "description": "", **values}


def test_faults_are_named_with_their_fields(admin_client: Client) -> None:
    answer = admin_client.post(URL, form(max_duration="soon", labels="disk", min_gpu_utilization="10"))
    page = answer.content.decode()
    assert answer.status_code == 422
    for field in ("id_max_duration", "id_labels", "id_time_window"):
        assert f'data-wrong="{field}"' in page


def test_while_typing_only_the_differences_are_shown(admin_client: Client) -> None:
    profile = Profile.objects.create(name="nightly", settings={"max_duration": "8h", "backends": ["hosts"]})
    values = form(max_duration="12h", backends="hosts", min_gpu_utilization="20", time_window="30m")
    page = admin_client.post(f"{URL}?profile={profile.pk}&live=1", values).content.decode()
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
    page = admin_client.post(
        f"{URL}?profile={profile.pk}", form(labels="disk=nvme", max_duration="4h")
    ).content.decode()
    assert "3 runs wait with this profile" in page
    assert "and runs like it (2) could never start." in page
    assert "<code>max_duration</code> would differ for 2 runs" in page


def test_people_without_the_permission_get_no_preview(client: Client) -> None:
    client.force_login(make_user("staff", is_staff=True))
    assert client.post(URL, form()).status_code == 403
