"""Project secrets: written, used by runs, never read again by people."""

from __future__ import annotations

import pytest
from django.test import override_settings

from dstackweb.accounts import services
from dstackweb.accounts.models import Project, ProjectSecret, User
from dstackweb.lib.errors import Conflict, Invalid, NotFound
from tests.factories import make_user, project_of

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]
VALUE = "hf_abcdefghij"


@pytest.fixture
def ada() -> User:
    return make_user("ada")


@pytest.fixture
def project(ada: User) -> Project:
    return project_of(ada, "vision")


def test_runs_get_the_value_and_lists_get_the_names(project: Project, ada: User) -> None:
    services.set_secret(project, "WANDB_KEY", "wb_abcdefghij", by=ada)
    services.set_secret(project, "HF_TOKEN", VALUE, by=ada)
    assert services.secret_names(project) == ["HF_TOKEN", "WANDB_KEY"]
    assert services.secret_values(project) == {"HF_TOKEN": VALUE, "WANDB_KEY": "wb_abcdefghij"}


def test_a_value_is_stored_encrypted_and_in_no_repr(project: Project, ada: User) -> None:
    row = services.set_secret(project, "HF_TOKEN", VALUE, by=ada)
    assert not any(VALUE in str(value) for value in ProjectSecret.objects.values().get().values())
    assert VALUE not in repr(row)


def test_setting_a_secret_again_replaces_its_value(project: Project, ada: User) -> None:
    services.set_secret(project, "HF_TOKEN", "the-old-one", by=ada)
    bob = make_user("bob")
    row = services.set_secret(project, "HF_TOKEN", VALUE, by=bob)
    assert services.secret_values(project) == {"HF_TOKEN": VALUE}
    assert row.updated_by == bob


def test_a_deleted_secret_is_gone(project: Project, ada: User) -> None:
    services.set_secret(project, "HF_TOKEN", VALUE, by=ada)
    services.delete_secret(project, "HF_TOKEN")
    assert services.secret_values(project) == {}
    with pytest.raises(NotFound):
        services.delete_secret(project, "HF_TOKEN")


def test_secrets_stay_within_their_project(project: Project, ada: User) -> None:
    services.set_secret(project, "HF_TOKEN", VALUE, by=ada)
    other = project_of(ada, "speech")
    assert services.secret_values(other) == {}
    with pytest.raises(NotFound):
        services.delete_secret(other, "HF_TOKEN")


@pytest.mark.parametrize("name", ["", "1ST", "A-B", "A B", "A\n", "é", "x" * 121])
def test_a_secret_name_must_be_usable_in_a_run_file(project: Project, ada: User, name: str) -> None:
    with pytest.raises(Invalid) as refused:
        services.set_secret(project, name, VALUE, by=ada)
    assert refused.value.errors[0]["loc"] == ["name"]


@pytest.mark.parametrize("value", ["", "a\0b", "é" * (32 * 1024 + 1)])
def test_a_value_must_be_valid_in_an_environment_variable(project: Project, ada: User, value: str) -> None:
    with pytest.raises(Invalid) as refused:
        services.set_secret(project, "HF_TOKEN", value, by=ada)
    assert refused.value.errors[0]["loc"] == ["value"]


@pytest.mark.parametrize("value", ["hunter2", " hunter2 ", "aaaaaaaaaa", "Password", "localhost\n", "12345678"])
def test_a_value_that_logs_cannot_hide_is_refused(project: Project, ada: User, value: str) -> None:
    with pytest.raises(Invalid, match="can't be hidden in logs") as refused:
        services.set_secret(project, "HF_TOKEN", value, by=ada)
    assert refused.value.errors[0]["loc"] == ["value"]
    assert services.secret_names(project) == []


def test_a_changed_secret_key_is_an_error_that_names_the_secret(project: Project, ada: User) -> None:
    services.set_secret(project, "HF_TOKEN", VALUE, by=ada)
    with override_settings(SECRET_KEY="another"), pytest.raises(Conflict, match="HF_TOKEN of vision"):
        services.secret_values(project)
