"""A backend kind from another package: found by its entry point, with its offers, instances, form and words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from dstackweb.accounts.models import Project, User
from dstackweb.backends import registry, services
from dstackweb.backends.contract import Cloud, InstanceOrder, SourceKey
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import Invalid
from dstackweb.lib.secrets import decrypt
from dstackweb.offers import sources
from tests.api.conftest import Api
from tests.backends.contract import portal
from tests.backends.contract.engine import Engine
from tests.backends.contract.suite import CloudContract
from tests.factories import join, make_project, make_user
from tests.forms import submit
from tests.web.checks import checks

PACKAGE = Path(__file__).parent / "example_kind"
SITES = {"portal": "http://portal.example", "sites": ["berlin", "oslo"]}
CONFIG = {**SITES, "api_key": portal.KEY}


@pytest.fixture
def rental(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is installed."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.setattr(registry, "BROKEN", {})
    monkeypatch.setattr(registry, "KINDS", registry._load())


@pytest.fixture
def company() -> Iterator[portal.Portal]:
    """The company, with three machines in Berlin and none in Oslo."""
    company = portal.Portal()
    yield company
    company.close()


@pytest.mark.slow
def test_a_new_process_finds_the_kind_by_its_entry_point() -> None:
    code = "import django; django.setup(); from dstackweb.backends import registry; print('rental' in registry.KINDS)"
    paths = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert ran.stdout.strip() == "True"


@pytest.mark.slow
@pytest.mark.django_db
def test_its_offers_are_listed_with_its_own_words(rental: None, company: portal.Portal, admin_client: Client) -> None:
    backend, _is_new = services.put("rented", "rental", CONFIG | {"portal": company.url, "api_key": "outdated"})
    project = _project_of(admin_client)
    sources.refresh(backend, SourceKey("stock", ""))
    assert "The portal refused the key." in admin_client.get(f"/p/{project}/offers/").content.decode()
    backend, _is_new = services.put("rented", "rental", CONFIG | {"portal": company.url})
    sources.refresh(backend, SourceKey("stock", ""))
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
    assert backend.config == SITES
    assert json.loads(decrypt(backend.secret)) == {"api_key": "hush-hush"}
    again, _is_new = services.put("rented", "rental", SITES)
    assert json.loads(decrypt(again.secret)) == {"api_key": "hush-hush"}, "a secret that is left out is kept"
    with pytest.raises(Invalid) as refused:
        services.put("other", "rental", {"portal": "http://portal.example", "sites": []})
    assert {error["loc"][1] for error in refused.value.errors} == {"sites", "api_key"}
    odd = root("PUT", "backends/other", {"type": "rental", "config": {**SITES, "api_key": [1]}})
    assert odd.status_code == 422
    assert "api_key" in odd.content.decode()
    assert not Backend.objects.filter(name="other").exists()


@pytest.mark.django_db
def test_its_admin_form_comes_from_its_settings(rental: None, admin_client: Client) -> None:
    add = reverse("admin:backends_backend_add") + "?kind=rental"
    page = admin_client.get(add).content.decode()
    assert "Machines rented by the hour." in page
    assert "USD per GPU and hour" in page
    assert 'type="password" name="api_key"' in page
    form = {"name": "rented", "portal": "http://portal.example", "sites": "", "price_per_gpu": "2"}
    wrong = submit(admin_client, add, form)
    assert "This field is required." in wrong.content.decode()
    form |= {"sites": "berlin, oslo", "api_key": "hush"}
    answer = submit(admin_client, add, form)
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    saved = Backend.objects.get(name="rented")
    assert (saved.kind, saved.config) == ("rental", {**SITES, "price_per_gpu": 2.0})
    change = admin_client.get(reverse("admin:backends_backend_change", args=[saved.pk])).content.decode()
    assert "berlin, oslo" in change
    assert "hush" not in change


@pytest.mark.django_db
def test_a_kind_costs_money_unless_it_declares_otherwise(rental: None) -> None:
    backend, _is_new = services.put("rented", "rental", CONFIG)
    assert registry.costs_money(backend)
    assert registry.costs_money(Backend(name="gone", kind="uninstalled"))


@pytest.mark.slow
@pytest.mark.django_db
def test_without_its_package_the_rest_works_and_health_names_it(admin_client: Client) -> None:
    backend = Backend.objects.create(name="rented", kind="rental", config={"sites": ["berlin"]})
    project = _project_of(admin_client)
    assert (
        "No installed package serves backend kind rental" in admin_client.get(f"/p/{project}/offers/").content.decode()
    )
    (line,) = [check for check in checks(Project.objects.get()) if check.name == "Backend rented"]
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
    (line,) = [check for check in checks(make_project()) if check.name == "Backend odd"]
    assert "No module named 'no_such_module'" in line.hint


class Rented(Engine):
    """The company with a driver of the example."""

    region = "berlin"
    instance_type = "octo"

    def __init__(self, company: portal.Portal) -> None:
        self.company = company
        self.backend, _is_new = services.put("rented", "rental", CONFIG | {"portal": company.url})

    def driver(self) -> Cloud:
        return registry.cloud(self.backend)

    def started(self) -> int:
        return len(self.company.machines)

    def end(self, cloud_id: str) -> None:
        self.company.cancel(cloud_id)

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        self.company.trouble, self.company.answers = 503, False
        yield
        self.company.trouble, self.company.answers = 0, True

    @contextmanager
    def losing_answers(self) -> Iterator[None]:
        self.company.answers = False
        yield
        self.company.answers = True

    @contextmanager
    def throttling(self) -> Iterator[None]:
        self.company.trouble = 429
        yield
        self.company.trouble = 0

    def refused(self) -> InstanceOrder:
        return self.order(region="oslo")


class TestContract(CloudContract):
    @pytest.fixture
    def engine(self, rental: None, company: portal.Portal, db: Any) -> Rented:
        return Rented(company)


def _project_of(client: Client) -> str:
    project = make_project("main")
    join(project, User.objects.get(username="admin"))
    return project.name
