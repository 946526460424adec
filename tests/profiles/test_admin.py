"""Profiles in the admin: settings as people write them, errors beside the field."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from dstackweb.profiles.models import Profile
from tests.forms import open_form, submit

pytestmark = pytest.mark.django_db
ADD = "admin:profiles_profile_add"


def post(client: Client, settings: str, url: str | None = None, **more: str | bool) -> str:
    """The page after saving; empty when it was saved."""
    fields = {"name": "nightly", "settings": settings} | more
    response = submit(client, url or reverse(ADD) + "?as=yaml", fields)
    return "" if response.status_code == 302 else response.content.decode()


def test_settings_are_written_as_in_a_run_file(admin_client: Client) -> None:
    """R16, R33: an admin gives a profile a utilization policy."""
    text = "# for the night\nmax_duration: 8h\nutilization_policy: {min_gpu_utilization: 50, time_window: 1m}\n"
    assert post(admin_client, text) == ""
    assert Profile.objects.get().settings == {
        "max_duration": "8h",
        "utilization_policy": {"min_gpu_utilization": 50, "time_window": "1m"},
    }


def test_stored_settings_are_shown_in_that_notation(admin_client: Client) -> None:
    profile = Profile.objects.create(name="x", settings={"max_duration": "8h", "backends": ["hosts"]})
    page = admin_client.get(
        reverse("admin:profiles_profile_change", args=[profile.pk]), {"as": "yaml"}
    ).content.decode()
    assert "backends:\n- hosts\nmax_duration: 8h" in page


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_duration: 8h\nbackend: [hosts]", "Line 2: unknown key `backend`; did you mean `backends`?"),
        ("max_duration: [", "Line 1: invalid YAML in line 1, column 16"),
        ("just words", "Line 1: expected a mapping of keys to values"),
        ("retry: {duration: soon}", "Line 1: `retry.duration` should be a duration"),
        ("a: " + "x" * 300_000, "the limit is 256 KB"),
    ],
)
def test_an_error_shows_its_line_and_the_typed_text_stays(admin_client: Client, text: str, says: str) -> None:
    page = post(admin_client, text).replace("&#x27;", "'")
    assert says in page
    assert text.splitlines()[0][:40] in page
    assert not Profile.objects.exists()


def test_a_profile_may_set_nothing(admin_client: Client) -> None:
    assert post(admin_client, "  ") == ""
    assert Profile.objects.get().settings == {}


def test_a_second_default_is_refused_with_a_remedy(admin_client: Client) -> None:
    Profile.objects.create(name="first", is_default=True)
    assert "All projects have a default profile already" in post(admin_client, "", is_default=True)


def test_the_lists_action_changes_the_default(admin_client: Client) -> None:
    first = Profile.objects.create(name="first", is_default=True)
    second = Profile.objects.create(name="second", settings={"max_duration": "8h"})
    url = reverse("admin:profiles_profile_changelist")
    for chosen in ([first.pk, second.pk], [second.pk]):
        submit(admin_client, url, {"action": "make_default", "_selected_action": chosen})
    assert Profile.objects.get(is_default=True) == second
    page = admin_client.get(url, {"q": "sec"}).content.decode()
    assert "max_duration" in page


def test_the_form_links_to_the_list_of_backends(admin_client: Client) -> None:
    for look in ("", "yaml"):
        page = admin_client.get(reverse(ADD), {"as": look}).content.decode()
        assert f'<a href="{reverse("admin:backends_backend_changelist")}">Backends</a>' in page


def test_two_admins_who_edit_a_profile_at_once_keep_each_others_settings(admin_client: Client) -> None:
    profile = Profile.objects.create(name="x", settings={"max_duration": "8h"})
    address = reverse("admin:profiles_profile_change", args=[profile.pk])
    opened = open_form(admin_client, address)
    Profile.objects.update(settings={"max_duration": "8h", "stop_duration": "5m"})
    assert opened.send({"max_duration": "4h"}).status_code == 302
    profile.refresh_from_db()
    assert profile.settings == {"max_duration": "4h", "stop_duration": "5m"}
    again = opened.send({"stop_duration": "1m"})
    assert "changed since you opened the page" in again.content.decode()


def test_settings_as_yaml_are_saved_unless_someone_else_has_changed_them(admin_client: Client) -> None:
    profile = Profile.objects.create(name="x", settings={"max_duration": "8h", "backends": ["hosts"]})
    address = reverse("admin:profiles_profile_change", args=[profile.pk]) + "?as=yaml"
    opened = open_form(admin_client, address)
    (shown,) = opened.values["settings"]
    assert opened.send({"settings": shown.replace("8h", "4h")}).status_code == 302
    profile.refresh_from_db()
    assert profile.settings == {"max_duration": "4h", "backends": ["hosts"]}
    assert opened.send({"name": "y"}).status_code == 302
    profile.refresh_from_db()
    assert (profile.name, profile.settings["max_duration"]) == ("y", "4h")
    refused = opened.send({"settings": shown.replace("8h", "2h")}).content.decode()
    assert "changed since you opened the page" in refused
