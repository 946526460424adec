"""A backend kind from another package: found by its entry point, with its offers, form and words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.test import Client
from django.urls import reverse

from dstackweb.accounts.models import Project, User
from dstackweb.backends import registry, services
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import Invalid
from dstackweb.lib.secrets import decrypt
from dstackweb.web import health
from tests.api.conftest import Api
from tests.factories import join, make_project, make_user

PACKAGE = Path(__file__).parent / "example_kind"
CONFIG = {"sites": ["berlin", "oslo"], "api_key": "hush-hush"}


@pytest.fixture
def rental(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is installed."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.setattr(registry, "BROKEN", {})
    monkeypatch.setattr(registry, "KINDS", registry._load())


def test_a_new_process_finds_the_kind_by_its_entry_point() -> None:
    code = "import django; django.setup(); from dstackweb.backends import registry; print(sorted(registry.KINDS))"
    paths = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert ran.stdout.strip() == "['aws', 'hosts', 'rental']"


@pytest.mark.django_db
def test_its_offers_are_listed_with_its_own_words(rental: None, admin_client: Client) -> None:
    services.put("rented", "rental", CONFIG)
    project = _project_of(admin_client)
    page = admin_client.get(f"/p/{project}/offers/").content.decode()
    assert "octo" in page
    assert "Sold out in oslo." in page
    assert "$12.00" in page


@pytest.mark.django_db
def test_the_api_sets_it_up_and_never_shows_its_secret(rental: None, admin_client: Client) -> None:
    root = Api(make_user("root", is_superuser=True))
    made = root("PUT", "backends/rented", {"type": "rental", "config": CONFIG})
    assert (made.status_code, made.json()["has_secret"]) == (201, True)
    assert "hush" not in made.content.decode()
    backend = Backend.objects.get(name="rented")
    assert backend.config == {"sites": ["berlin", "oslo"]}
    assert json.loads(decrypt(backend.secret)) == {"api_key": "hush-hush"}
    again, _is_new = services.put("rented", "rental", {"sites": ["berlin"]})
    assert json.loads(decrypt(again.secret)) == {"api_key": "hush-hush"}, "a secret that is left out is kept"
    with pytest.raises(Invalid) as refused:
        services.put("other", "rental", {"sites": []})
    assert {error["loc"][1] for error in refused.value.errors} == {"sites", "api_key"}
    odd = root("PUT", "backends/other", {"type": "rental", "config": {"sites": ["berlin"], "api_key": [1]}})
    assert odd.status_code == 422
    assert "api_key" in odd.content.decode()
    assert not Backend.objects.filter(name="other").exists()


@pytest.mark.django_db
def test_its_admin_form_comes_from_its_settings(rental: None, admin_client: Client) -> None:
    add = reverse("admin:backends_backend_add") + "?kind=rental"
    page = admin_client.get(add).content.decode()
    assert "Machines rented by the month." in page
    assert "USD per GPU and hour" in page
    assert 'type="password" name="api_key"' in page
    wrong = admin_client.post(add, {"name": "rented", "enabled": "on", "sites": "", "price_per_gpu": "2"})
    assert "This field is required." in wrong.content.decode()
    form = {"name": "rented", "enabled": "on", "sites": "berlin, oslo", "price_per_gpu": "2", "api_key": "hush"}
    answer = admin_client.post(add, form)
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    saved = Backend.objects.get(name="rented")
    assert (saved.kind, saved.config) == ("rental", {"sites": ["berlin", "oslo"], "price_per_gpu": 2.0})
    change = admin_client.get(reverse("admin:backends_backend_change", args=[saved.pk])).content.decode()
    assert "berlin, oslo" in change
    assert "hush" not in change


@pytest.mark.django_db
def test_a_kind_costs_money_unless_it_declares_otherwise(rental: None) -> None:
    backend, _is_new = services.put("rented", "rental", CONFIG)
    assert registry.costs_money(backend)
    assert registry.costs_money(Backend(name="gone", kind="uninstalled"))


@pytest.mark.django_db
def test_without_its_package_the_rest_works_and_health_names_it(admin_client: Client) -> None:
    backend = Backend.objects.create(name="rented", kind="rental", config={"sites": ["berlin"]})
    project = _project_of(admin_client)
    assert (
        "No installed package serves backend kind rental" in admin_client.get(f"/p/{project}/offers/").content.decode()
    )
    (line,) = [check for check in health.checks(Project.objects.get()) if check.name == "Backend rented"]
    assert line.tone == "bad"
    assert "Install it, or delete the backend" in line.hint
    assert admin_client.get(reverse("admin:backends_backend_changelist")).status_code == 200
    assert admin_client.get(reverse("admin:backends_backend_change", args=[backend.pk])).status_code == 200


@pytest.mark.django_db
def test_a_package_that_cannot_be_loaded_leaves_the_other_kinds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, admin_client: Client
) -> None:
    info = tmp_path / "broken_kind-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-kind\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dstackweb.backends]\nbroken = no_such_module:Kind\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "BROKEN", {})
    monkeypatch.setattr(registry, "KINDS", registry._load())
    assert set(registry.KINDS) >= {"aws", "hosts"}
    Backend.objects.create(name="odd", kind="broken")
    (line,) = [check for check in health.checks(make_project()) if check.name == "Backend odd"]
    assert "No module named 'no_such_module'" in line.hint


def _project_of(client: Client) -> str:
    project = make_project("main")
    join(project, User.objects.get(username="admin"))
    return project.name
