"""A server without the extra `dask-backend`: Dask backends say what to install, and nothing else misses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from django.test import Client

from dstackweb.accounts.models import Project
from dstackweb.accounts.services import create_token
from dstackweb.backends import registry, services
from dstackweb.backends.contract import SourceFailed, SourceKey
from dstackweb.backends.dask import scheduler
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import Invalid
from dstackweb.offers import catalog, sources
from tests.factories import join, make_user
from tests.forms import submit
from tests.offers.cloud_stub import ANY
from tests.support import REPO

CONFIG = {"projects": ["main"], "scheduler": "tcp://dask.test:8786"}
INSTALL = "install dstackweb[dask-backend]"
SERVER = """
import sys
sys.modules["msgpack"] = None
import django
from django.core.management import call_command
django.setup()
import dstackweb.wsgi
call_command("check")
from dstackweb.backends import registry
assert not registry.BROKEN, registry.BROKEN
assert {"hosts", "aws", "slurm", "dask", "ray"} <= {*registry.KINDS}
"""


def test_the_program_loads_and_has_all_kinds(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "DSTACKWEB_HOME": str(tmp_path), "DJANGO_SETTINGS_MODULE": "dstackweb.settings"}
    done = subprocess.run([sys.executable, "-c", SERVER], cwd=REPO, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def cluster(db: None, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """One that was added while the package was there."""
    made, _is_new = services.put("cluster", "dask", CONFIG)
    monkeypatch.setattr(scheduler, "msgpack", None)
    return made


def test_a_backend_that_is_there_has_failed_and_is_not_empty(cluster: Backend, project: Project) -> None:
    sources.refresh(cluster, SourceKey("workers", ""))
    _row, token = create_token(join(project, make_user("mia")), "ci")
    answer = (
        Client().get(f"/api/v1/projects/{project.name}/offers", headers={"Authorization": f"Bearer {token}"}).json()
    )
    (source,) = answer["sources"]
    assert (source["backend"], source["state"]) == ("cluster", "failed")
    assert INSTALL in source["error"]["message"]
    with pytest.raises(SourceFailed, match=scheduler.NOT_INSTALLED):
        catalog.CachedDriver(cluster).read(ANY)


def test_a_connection_test_says_what_to_install(cluster: Backend) -> None:
    report = registry.kind_of(cluster).test_connection(cluster.config, "")
    assert report.state == "failed"
    assert INSTALL in report.parts[0].lines[0].found


def test_one_is_not_added_and_form_and_service_say_what_to_install(cluster: Backend) -> None:
    with pytest.raises(Invalid, match="dask-backend"):
        services.put("other", "dask", CONFIG)
    client = Client()
    client.force_login(make_user("root", is_superuser=True, is_staff=True))
    typed = {"name": "other", "projects": "main", "scheduler": CONFIG["scheduler"], "gpus": "GPU"}
    page = submit(client, "/admin/backends/backend/add/?kind=dask", typed)
    assert INSTALL in page.text
    assert [*Backend.objects.values_list("name", flat=True)] == ["cluster"]
    services.put("ray", "ray", {"projects": ["main"], "address": "https://ray.test:8265"})


def test_one_that_is_there_can_be_deleted(cluster: Backend) -> None:
    services.delete("cluster")
    assert not Backend.objects.exists()
