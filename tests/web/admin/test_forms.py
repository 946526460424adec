"""Each form of the admin site as a browser opens, changes and saves it."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import Group, Permission
from django.db.models import Model
from django.test import Client, RequestFactory
from django.urls import reverse

from dstackweb.accounts.models import User
from dstackweb.accounts.services import set_secret
from dstackweb.audit.models import AuditEntry
from dstackweb.backends import services as backends
from dstackweb.backends.models import Host
from dstackweb.gpus.models import ProjectPolicies
from dstackweb.profiles.models import Profile
from dstackweb.runs.queue import queues
from dstackweb.urls import admin  # with all models registered
from tests.factories import join, make_host, make_project, make_run, make_user
from tests.forms import forms_of, open_form, submit

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]

CHANGED: dict[str, dict[str, Any]] = {
    "accounts.project": {"weight": "3"},
    "accounts.projectsecret": {"value": "a new value"},
    "accounts.user": {"first_name": "Ada"},
    "auth.group": {"name": "ops-2"},
    "backends.backend": {"enabled": False},
    "backends.host": {"setup": "module load cuda"},
    "gpus.projectpolicies": {"max_exemptions": "7"},
    "profiles.profile": {"max_duration": "4h"},
    "runs.queue": {"max_running": "3"},
    "runs.run": {"priority": "66"},
}
"""A field of each model that can be changed."""
PASSWORD = "correct horse battery"
ADDED: dict[str, dict[str, Any]] = {
    "accounts.apitoken": {"name": "laptop", "user": "{user}"},
    "accounts.project": {"name": "speech", "memberships-0-user": "{user}", "memberships-0-role": "admin"},
    "accounts.projectsecret": {"project": "{project}", "name": "WANDB_KEY", "value": "a secret value"},
    "accounts.user": {"username": "eve", "usable_password": "true", "password1": PASSWORD, "password2": PASSWORD},
    "auth.group": {"name": "night-shift"},
    "backends.backend": {"regions": ["us-east-1"], "name": "aws-2"},
    "gpus.projectpolicies": {"project": "{other}"},
    "profiles.profile": {"name": "weekly", "max_duration": "2h"},
    "runs.queue": {"project": "{project}", "name": "night"},
}
"""What is typed to make one of each model that can be added."""
OF_SECRETS = {"accounts.projectsecret"}
"""Whose only field is a secret, which is never shown: saving the form as it is served sends nothing to save."""


@pytest.fixture
def root(client: Client) -> User:
    user = make_user("root", is_staff=True, is_superuser=True, time_zone="Asia/Tokyo")
    client.force_login(user)
    return user


@pytest.fixture
def rows(root: User) -> dict[str, Model]:
    """An existing row of each model that can be changed."""
    project = make_project("vision")
    join(project, root, "admin")
    group = Group.objects.create(name="ops")
    policy = {"min_gpu_utilization": 30, "time_window": "20m"}
    settings = {"max_duration": "8h", "backends": ["hosts"], "utilization_policy": policy}
    made: list[Model] = [
        project,
        group,
        set_secret(project, "HF_TOKEN", "an old value", by=root),
        make_user("mia", email="mia@example.org", is_staff=True),
        backends.put("aws", "aws", {"regions": ["eu-west-1"], "tags": {"team": "vision", "cost": "4711"}})[0],
        make_host(labels={"disk": "nvme"}, setup="export A=1\nexport B=2", gpus=2),
        ProjectPolicies.objects.create(project=project),
        Profile.objects.create(name="nightly", description="At night", settings=settings),
        queues.create_queue(project, root, "admin", "short", max_gpus=8, ageing_minutes=None),
        make_run(project, root, "train", env={"LR": "1e-4"}),
    ]
    return {row._meta.label_lower: row for row in made}


def labels(permission: str) -> set[str]:
    """The models that the pages of a deployment admin let them `add` or `change`."""
    request = RequestFactory().get("/")
    request.user = User(is_superuser=True, is_staff=True, is_active=True)
    return {
        model._meta.label_lower
        for model, options in admin.site._registry.items()
        if getattr(options, f"has_{permission}_permission")(request)
    }


def address(row: Model) -> str:
    return reverse(f"admin:{row._meta.app_label}_{row._meta.model_name}_change", args=[row.pk])


def stored(row: Model) -> list[Any]:
    """All rows of a model and of those that its page has inline, and the length of the audit log."""
    inlines = [inline.model for inline in admin.site._registry[type(row)].inlines]
    models = [type(row), *inlines]
    return [AuditEntry.objects.count(), *(list(model._base_manager.order_by("pk").values()) for model in models)]


def save(client: Client, page: str, values: dict[str, Any]) -> None:
    """Raises for a form that comes back with errors, and for a refusal on the page that follows."""
    answer = submit(client, page, values, button="_save", follow=True)
    assert answer.redirect_chain, (page, answer.status_code, answer.context and answer.context["errors"])
    assert [str(message) for message in answer.context["messages"] if message.level_tag == "error"] == [], page


def test_each_model_that_can_be_changed_or_added_is_tried_below(rows: dict[str, Model]) -> None:
    assert labels("change") == set(rows) == set(CHANGED)
    assert labels("add") == set(ADDED)


def test_a_form_that_is_saved_as_it_was_served_changes_nothing(client: Client, rows: dict[str, Model]) -> None:
    for label in set(rows) - OF_SECRETS:
        before = stored(rows[label])
        save(client, address(rows[label]), {})
        assert stored(rows[label]) == before, label


def test_one_changed_field_is_saved_and_shown_again(client: Client, rows: dict[str, Model]) -> None:
    for label, row in rows.items():
        (name, value), before = *CHANGED[label].items(), stored(row)
        save(client, address(row), CHANGED[label])
        assert stored(row)[1] != before[1], label
        if label not in OF_SECRETS:
            shown = open_form(client, address(row), having=name).values
            assert shown.get(name, []) == ([value] if value else []), label


def test_one_of_each_model_is_added(client: Client, root: User, rows: dict[str, Model]) -> None:
    ids = {"user": root.pk, "project": rows["accounts.project"].pk, "other": make_project("other").pk}
    for label, typed in ADDED.items():
        model = apps.get_model(label)
        values = {name: value.format(**ids) if isinstance(value, str) else value for name, value in typed.items()}
        count = model._default_manager.count()
        save(client, reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_add"), values)
        assert model._default_manager.count() == count + 1, label


def test_admins_who_change_different_fields_of_a_host_or_of_policies_keep_each_others(
    client: Client, rows: dict[str, Model]
) -> None:
    host = open_form(client, address(rows["backends.host"]))
    policies = open_form(client, address(rows["gpus.projectpolicies"]))
    Host.objects.update(labels={"disk": "ssd"}, draining=True)
    ProjectPolicies.objects.update(observe_only=True)
    assert host.send({"setup": "module load cuda"}).status_code == 302
    assert policies.send({"max_exemptions": 9}).status_code == 302
    assert Host.objects.values_list("labels", "draining", "setup").get() == ({"disk": "ssd"}, True, "module load cuda")
    assert ProjectPolicies.objects.values_list("observe_only", "max_exemptions").get() == (True, 9)


def test_pages_without_permission_to_change_have_nothing_to_save(client: Client, rows: dict[str, Model]) -> None:
    viewer = make_user("viewer", is_staff=True)
    viewer.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
    client.force_login(viewer)
    for row in rows.values():
        answer = client.get(address(row))
        assert answer.status_code == 200
        buttons = [one.name for form in forms_of(client, answer) for one in form.controls if one.kind == "submit"]
        assert "_save" not in buttons, row
