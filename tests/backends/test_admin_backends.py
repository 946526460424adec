"""The form of a backend in the admin, and the test of its connection."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from dstackweb.backends import services
from dstackweb.backends.aws import check, config
from dstackweb.backends.aws.check import Finding, FindingState
from dstackweb.backends.hosts.inventory import ensure_embedded_backend
from dstackweb.backends.kinds import Kind
from dstackweb.backends.models import Backend, Instance
from dstackweb.profiles.models import Profile
from standins.aws import ACCESS_KEY, SECRET_KEY, Cloud
from tests import factories
from tests.forms import open_form, submit
from tests.standins.fixtures import cloud

__all__ = ["cloud"]

pytestmark = pytest.mark.django_db(transaction=True)

ADD, LIST = "admin:backends_backend_add", "admin:backends_backend_changelist"
SECRET = "kept/and+never shown"
FORM = {"name": "aws", "regions": ["eu-west-1"]}
KEY = {"sign_in": "access_key_id", "access_key_id": ACCESS_KEY, "secret_access_key": SECRET}
WITH_KEY = {**FORM, **KEY}
TEST = "Test connection"


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(factories.make_user(is_staff=True, is_superuser=True))
    return client


@pytest.fixture
def aws() -> Backend:
    said = {"regions": ["eu-west-1"], "credentials": {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET}}
    kept, secret = config.settle(said)
    return Backend.objects.create(name="aws", kind="aws", config=kept, secret=secret)


def change(backend: Backend) -> str:
    return reverse("admin:backends_backend_change", args=[backend.pk])


def secret_of(backend: Backend) -> str:
    return config.secret_of(ACCESS_KEY, backend.secret)


def errors(answer: Any) -> dict[str, str]:
    return {name: " ".join(problem) for name, problem in answer.context["adminform"].form.errors.items()}


def test_a_secret_of_another_server_key_is_an_error_at_its_field(admin: Client, aws: Backend) -> None:
    Backend.objects.update(secret="stored under another key")
    form = open_form(admin, change(aws))
    saved = form.send()
    assert "encrypted with another secret key" in errors(saved)["secret_access_key"]
    tested = form.send(button=TEST)
    assert tested.status_code == 422
    assert "encrypted with another secret key" in tested.content.decode()


def test_regions_alone_make_a_backend(admin: Client) -> None:
    answer = submit(admin, reverse(ADD), FORM, follow=True)
    assert "backends: [aws]" in answer.content.decode()
    made = Backend.objects.get()
    assert (made.name, made.kind, made.config, made.secret, made.version) == (
        "aws",
        "aws",
        {"regions": ["eu-west-1"]},
        "",
        1,
    )


def test_all_settings_are_stored_and_shown_again(admin: Client) -> None:
    said = {
        **FORM,
        "other_regions": "cn-north-1",
        "role_arn": "arn:aws:iam::123456789012:role/dw",
        "external_id": "x1",
        "families": "g5, p5",
        "subnets": "eu-west-1: subnet-1, subnet-2\ncn-north-1: subnet-3",
        "ami": "ami-1",
        "tags": "team=vision",
    }
    submit(admin, reverse(ADD), said)
    made = Backend.objects.get()
    read = config.read(made.config)
    assert read.regions == ("eu-west-1", "cn-north-1")
    assert (read.credentials.external_id, read.families) == ("x1", ("g5", "p5"))
    assert read.subnets_in("eu-west-1") == ("subnet-1", "subnet-2")
    form = admin.get(change(made)).context["adminform"].form
    shown = {
        name: form[name].value()
        for name in said
        if name not in ("name", "enabled", "public_ip", "containers", "disk_gb")
    }
    assert shown == {name: said[name] for name in shown}


@pytest.mark.parametrize(
    ("wrong", "field", "problem"),
    [
        ({"regions": []}, "regions", "at least one"),
        ({"other_regions": "Europe"}, "other_regions", "Europe"),
        ({"sign_in": "access_key_id"}, "access_key_id", "Required"),
        ({"sign_in": "access_key_id", "access_key_id": ACCESS_KEY}, "secret_access_key", "is missing: the secret of"),
        ({"sign_in": "access_key_id", "access_key_id": "my key"}, "access_key_id", "AKIAIOSFODNN7EXAMPLE"),
        ({"sign_in": "profile"}, "profile", "Required"),
        ({"role_arn": "dw"}, "role_arn", "arn:aws:iam"),
        ({"external_id": "x"}, "sign_in", "requires a role_arn"),
        ({"subnets": "us-east-1: subnet-1"}, "subnets", "us-east-1"),
        ({"ami": "ami-1 ami-2"}, "ami", "Enter one value"),
        ({"families": "g5.xlarge"}, "families", "g5.xlarge"),
        ({"tags": "vision"}, "tags", "name=value"),
        ({"disk_gb": "1"}, "disk_gb", "8"),
        ({"endpoint_url": "ftp://x"}, "endpoint_url", "URL"),
        ({"name": "aws 1"}, "name", "valid"),
    ],
)
def test_each_error_is_shown_at_its_field(admin: Client, wrong: dict[str, Any], field: str, problem: str) -> None:
    found = errors(submit(admin, reverse(ADD), {**FORM, **wrong}))
    assert list(found) == [field]
    assert problem in found[field]
    assert not Backend.objects.exists()


def test_a_secret_is_stored_and_in_no_page_or_log(
    admin: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(check, "check", lambda *_: [Finding("identity", FindingState.SKIPPED)])
    pages = [submit(admin, reverse(ADD), WITH_KEY, follow=True)]
    made = Backend.objects.get()
    assert secret_of(made) == SECRET
    form = open_form(admin, change(made))
    pages += [admin.get(change(made)), form.send({**KEY, "regions": []}), form.send(KEY, TEST)]
    assert all(SECRET not in page.content.decode() for page in pages)
    assert SECRET not in caplog.text
    assert all(SECRET not in f"{entry.change_message}{entry.object_repr}" for entry in LogEntry.objects.all())


def test_an_empty_secret_keeps_the_stored_one(admin: Client, aws: Backend) -> None:
    submit(admin, change(aws), {"families": "g5"})
    aws.refresh_from_db()
    assert (secret_of(aws), aws.config["families"], aws.version) == (SECRET, ["g5"], 2)
    submit(admin, change(aws))
    aws.refresh_from_db()
    assert aws.version == 2
    submit(admin, change(aws), {"sign_in": "default"})
    aws.refresh_from_db()
    assert (aws.secret, aws.version) == ("", 3)


def test_an_optional_secret_can_be_removed(admin: Client) -> None:
    form = {"name": "ray", "projects": "main", "address": "https://ray.test", "token": SECRET}
    page = reverse(ADD) + "?kind=ray"
    assert "Remove the stored one" not in admin.get(page).content.decode()
    submit(admin, page, form)
    ray = Backend.objects.get(name="ray")
    assert "Remove the stored one" in admin.get(change(ray)).content.decode()
    for changes, stored in ({}, SECRET), ({"token-remove": True}, None):
        assert submit(admin, change(ray), changes).status_code == 302
        ray.refresh_from_db()
        assert Kind.secrets_of(ray.secret).get("token") == stored


def test_two_admins_who_edit_a_backend_at_once_keep_each_others_settings(admin: Client, aws: Backend) -> None:
    opened = open_form(admin, change(aws))
    two = {"*": ["subnet-1"], "eu-west-1": ["subnet-2", "subnet-3"]}
    services.put("aws", "aws", {**aws.config, "subnets": two}, enabled=False)
    saved = opened.send({"families": "g5"})
    assert saved.status_code == 302, errors(saved)
    aws.refresh_from_db()
    assert (aws.enabled, aws.config["families"], secret_of(aws)) == (False, ["g5"], SECRET)
    assert {region: list(ids) for region, ids in aws.config["subnets"].items()} == two
    again = opened.send({"families": "g6"})
    assert "changed since you opened the page" in errors(again)["families"]


def test_settings_of_several_lines_are_not_taken_for_a_change_of_someone_else(admin: Client, aws: Backend) -> None:
    services.put("aws", "aws", {**aws.config, "tags": {"team": "vision", "cost": "4711"}})
    form = open_form(admin, change(aws))
    saved = form.send({"tags": f"{form.values['tags'][0]}\r\nowner=ada"})
    assert saved.status_code == 302, errors(saved)
    aws.refresh_from_db()
    assert aws.config["tags"] == {"team": "vision", "cost": "4711", "owner": "ada"}


@pytest.mark.parametrize("name", ["aws", "aws-2"])
def test_a_new_backend_is_saved_and_tested_as_a_browser_sends_its_form(admin: Client, name: str) -> None:
    """The form suggests a name, which no stored backend has."""
    form = open_form(admin, f"{reverse(ADD)}?kind=aws")
    tested = form.send({**WITH_KEY, "name": name, "secret_access_key": ""}, TEST)
    assert [label for label, _id, _errors in tested.context["wrong"]] == ["Secret access key"]
    saved = form.send({**WITH_KEY, "name": name})
    assert saved.status_code == 302, errors(saved)
    assert Backend.objects.get(name=name).config["regions"] == ["eu-west-1"]


def test_the_name_of_a_backend_is_unique_and_cannot_be_changed(admin: Client, aws: Backend) -> None:
    assert "exists already" in errors(submit(admin, reverse(ADD), FORM))["name"]
    forged = {**open_form(admin, change(aws)).values, "name": "other"}
    assert admin.post(change(aws), forged).status_code == 302
    aws.refresh_from_db()
    assert aws.name == "aws"


def test_the_first_one_has_a_name_already(admin: Client) -> None:
    assert admin.get(reverse(ADD)).context["adminform"].form["name"].value() == "aws"
    submit(admin, reverse(ADD), FORM)
    assert not admin.get(reverse(ADD)).context["adminform"].form["name"].value()


def test_own_hosts_can_be_disabled_and_cannot_be_tested_or_deleted(admin: Client) -> None:
    hosts = ensure_embedded_backend()
    page = admin.get(change(hosts)).content.decode()
    assert "Test connection" not in page
    # What no page sends:
    assert admin.post(reverse("admin:backends_backend_test", args=[hosts.pk])).status_code == 404
    assert admin.post(reverse("admin:backends_backend_delete", args=[hosts.pk]), {"post": "yes"}).status_code == 403
    chosen = {"action": "delete_selected", "_selected_action": [hosts.pk]}
    assert "would require deleting" in submit(admin, reverse(LIST), chosen).content.decode()
    assert Backend.objects.filter(pk=hosts.pk).exists()


def test_a_deleted_backend_is_not_listed_and_its_instances_keep_their_rows(admin: Client, aws: Backend) -> None:
    project = factories.make_project()
    machine = Instance.objects.create(backend=aws, project=project, region="eu-west-1", instance_type="g5.xlarge")
    assert "aws, with 1 instance" in admin.get(reverse("admin:backends_backend_delete", args=[aws.pk])).content.decode()
    submit(admin, reverse("admin:backends_backend_delete", args=[aws.pk]), having="post")
    assert not Backend.objects.exists()
    assert Backend.with_deleted.get().instances.get() == machine
    submit(admin, reverse(ADD), FORM)
    assert Backend.objects.get().pk != aws.pk


def test_several_backends_are_deleted_at_once(admin: Client, aws: Backend) -> None:
    asked = submit(admin, reverse(LIST), {"action": "delete_selected", "_selected_action": [aws.pk]})
    submit(admin, asked, having="post")
    assert not Backend.with_deleted.exists()


def test_the_form_lists_the_profiles_that_use_the_backend(admin: Client, aws: Backend) -> None:
    assert "none yet" in admin.get(change(aws)).content.decode()
    Profile.objects.create(name="cloudy", settings={"backends": ["aws"]})
    assert "cloudy" in admin.get(change(aws)).content.decode()


def test_instances_are_read_only(admin: Client, aws: Backend) -> None:
    project = factories.make_project()
    machine = Instance.objects.create(
        backend=aws, project=project, region="eu-west-1", instance_type="g5.xlarge", launched_at=timezone.now(),
        join_digest="d" * 64,
    )  # fmt: skip
    assert "g5.xlarge" in admin.get(reverse("admin:backends_instance_changelist"), {"q": "g5"}).content.decode()
    page = admin.get(reverse("admin:backends_instance_change", args=[machine.pk])).content.decode()
    assert "d" * 64 not in page
    assert admin.get(reverse("admin:backends_instance_add")).status_code == 403


# -- the connection test


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """What was tested, as config and secret, in place of the test."""
    calls: list[tuple[Any, str]] = []

    def instead(said: config.AwsConfig, secret: str, url: str) -> list[Finding]:
        assert not connection.in_atomic_block
        calls.append((said, secret))
        return [Finding("identity", FindingState.OK, detail={"account": "1", "arn": "arn:x"})]

    monkeypatch.setattr(check, "check", instead)
    return calls


FRAGMENT = {"X-Requested-With": "fetch"}


def test_the_connection_test_uses_the_form_before_it_is_saved(admin: Client, asked: list[Any]) -> None:
    answer = submit(admin, reverse(ADD), {**WITH_KEY, "name": ""}, button=TEST, headers=FRAGMENT)
    assert "account 1 as arn:x" in answer.content.decode()
    assert "<html" not in answer.content.decode()
    ((said, secret),) = asked
    assert (said.regions, secret) == (("eu-west-1",), SECRET)
    assert not Backend.objects.exists()


def test_a_saved_backend_is_tested_with_the_stored_secret(admin: Client, aws: Backend, asked: list[Any]) -> None:
    submit(admin, change(aws), {"regions": ["us-east-1"]}, button=TEST)
    ((said, secret),) = asked
    assert (said.regions, secret) == (("us-east-1",), SECRET)
    aws.refresh_from_db()
    assert (aws.config["regions"], aws.version) == (["eu-west-1"], 1)


def test_without_scripts_the_checklist_is_a_page(admin: Client, asked: list[Any]) -> None:
    answer = submit(admin, reverse(ADD), FORM, button=TEST)
    assert "<html" in answer.content.decode()
    assert "Everything works." in answer.content.decode()


def test_a_form_that_cannot_be_right_is_not_tested(admin: Client, asked: list[Any]) -> None:
    answer = submit(admin, reverse(ADD), {**FORM, "role_arn": "dw"}, button=TEST, headers=FRAGMENT)
    assert answer.status_code == 422
    assert 'href="#id_role_arn"' in answer.content.decode()
    assert not asked


def test_only_those_who_may_change_backends_test_them(client: Client, aws: Backend, asked: list[Any]) -> None:
    """No page of others has the button."""
    client.force_login(factories.make_user("guest", is_staff=True))
    for page in (
        reverse("admin:backends_backend_test_new"),
        reverse("admin:backends_backend_test", args=[aws.pk]),
    ):
        assert client.post(page, FORM).status_code == 403
    client.logout()
    assert client.post(reverse("admin:backends_backend_test_new"), FORM).status_code == 302
    assert not asked


def test_users_with_view_permission_see_the_settings_and_no_button(client: Client, aws: Backend) -> None:
    viewer = factories.make_user("viewer", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_backend"))
    client.force_login(viewer)
    page = client.get(change(aws)).content.decode()
    assert "eu-west-1" in page
    assert "Test connection" not in page
    assert ACCESS_KEY not in page
    by_hand = client.post(reverse("admin:backends_backend_test", args=[aws.pk]), WITH_KEY)
    assert by_hand.status_code == 403


def test_a_test_is_posted(admin: Client, asked: list[Any]) -> None:
    assert admin.get(reverse("admin:backends_backend_test_new")).status_code == 405


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "is not set"),
        ("http://127.0.0.1:8000", "not encrypted"),
        ("http://gpus.example.org", "not encrypted"),
        ("https://10.0.0.5", "reachable only from this network"),
    ],
)
def test_the_connection_test_reports_on_the_account_and_this_server(
    admin: Client, cloud: Cloud, settings: Any, url: str, problem: str
) -> None:
    settings.DSTACKWEB_PUBLIC_URL = url
    form = {**WITH_KEY, "secret_access_key": SECRET_KEY, "endpoint_url": cloud.url}
    page = submit(admin, reverse(ADD), form, button=TEST, headers=FRAGMENT).content.decode()
    assert "Signed in to account 123456789012" in page
    assert problem in page
    assert SECRET_KEY not in page
    assert "eu-west-1 · Europe (Ireland)" in page
