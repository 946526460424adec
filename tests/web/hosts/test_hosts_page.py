"""Looking after hosts on their page: for admins of the deployment alone, one machine's token shown once (R13)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.hosts import inventory
from dstackweb.backends.hosts.joining import of_token
from dstackweb.backends.models import Host, HostEvent, HostInvite
from dstackweb.runs.models import Run
from dstackweb.scheduler.models import Reservation
from tests.factories import make_host, make_run, make_user, place_all, placed_job, start
from tests.forms import open_form, submit
from tests.web.conftest import HTMX

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]


@pytest.fixture
def root(project: Project, as_user: SignIn) -> Client:
    return as_user(make_user("root", is_superuser=True, is_staff=True))


HOSTS = "/p/main/hosts/"


def page(client: Client) -> str:
    return client.get(HOSTS).content.decode()


def press(client: Client, action: str, shown_at: str = HOSTS, **request: Any) -> Any:
    """Press the button that posts to an address with this end, on a page without scripts."""
    return submit(client, shown_at, to=action, scripts=False, **request)


@pytest.mark.parametrize(
    "action", ["box-1/drain/", "box-1/leave/", "box-1/clear/", "box-1/gone/", "invite/", "invite/1/withdraw/"]
)
def test_only_admins_of_the_deployment_manage_hosts(project: Project, ann: User, as_user: SignIn, action: str) -> None:
    """Others' pages don't have these buttons."""
    make_host("box-1")
    client = as_user(ann)
    assert client.post(f"/p/main/hosts/{action}").status_code == 403
    assert client.get(f"/p/main/hosts/{action}").status_code in (403, 405)
    assert "Drain" not in page(client)
    assert "Add a host" not in page(client)


def test_a_host_is_drained_and_takes_jobs_again(root: Client) -> None:
    host = make_host("box-1")
    assert press(root, "box-1/drain/", button="Drain").status_code == 302
    assert "draining: no new jobs" in page(root)
    press(root, "box-1/drain/", button="Undrain")
    host.refresh_from_db()
    assert not host.draining
    assert [event.kind for event in HostEvent.objects.all()] == ["undrained", "drained"]
    assert "takes jobs again (root)" in page(root)


def test_a_leaving_host_shows_its_remaining_jobs_and_can_be_kept(root: Client, project: Project, ann: User) -> None:
    make_host("box-1")
    make_run(project, ann)
    place_all()
    press(root, "box-1/leave/")
    assert "will be removed after 1 job has ended" in page(root)
    press(root, "box-1/drain/", button="Cancel removal")
    assert Host.objects.filter(leaving=False, draining=False).exists()


def test_the_servers_own_machine_cannot_be_removed(root: Client) -> None:
    make_host("box-1", cluster="dstackweb-box-1")
    assert 'id="leave-' not in page(root)
    assert root.post("/p/main/hosts/box-1/leave/").status_code == 409, "which no page sends"


def test_reserved_gpus_are_shown_on_their_host(root: Client, project: Project, ann: User) -> None:
    host = make_host("box-1", gpus=2)
    run = make_run(project, ann, "patient", resources={"gpu": 1})
    node = {"host_id": host.pk, "host": "box-1", "cpus": 2, "memory_mib": 2048, "gpus": ["GPU-box-1-1"]}
    Reservation.objects.create(run=Run.objects.get(pk=run.pk), nodes=[node])
    text = page(root)
    assert re.search(r"Reserved for</div><a [^>]*>patient</a><div class=\"why\">1 GPU, 2 CPUs, 2 GB", text)
    assert text.count(">reserved<") == 1


def test_labels_and_events_are_shown_and_polled(root: Client) -> None:
    host = make_host("box-1", labels={"disk": "nvme"})
    assert "disk=nvme" in page(root)
    poll = {**HTMX, "HX-PTag": root.get("/p/main/hosts/")["HX-PTag"]}
    assert root.get("/p/main/hosts/", headers=poll).status_code == 204
    HostEvent.objects.create(host=host, kind="offline")
    assert "went offline" in root.get("/p/main/hosts/", headers=poll).content.decode()


@pytest.mark.parametrize(
    ("cgroups", "words"),
    [
        ({"version": "v2", "memory": True, "cpu": True, "code": "", "error": ""}, "memory and CPUs, by cgroups v2"),
        ({"version": "v1", "memory": True, "cpu": False, "code": "no_controllers", "error": ""}, "controllers"),
        ({"version": "", "memory": False, "cpu": False, "code": "read_only", "error": "EROFS"}, "read-only"),
        ({}, "not known"),
    ],
)
def test_whether_jobs_are_limited_is_shown(root: Client, cgroups: dict[str, Any], words: str) -> None:
    make_host("box-7", cgroups=cgroups)
    assert words in root.get("/p/main/hosts/box-7/").content.decode()
    assert ("can use more memory" in root.get("/p/main/health/").content.decode()) == bool(cgroups.get("code"))


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"name": "docker", "version": "20.10.24", "code": "", "error": ""}, "Docker 20.10.24"),
        ({"name": "docker", "version": "", "code": "away", "error": "Cannot connect"}, "its daemon gives no answer"),
        ({"name": "", "version": "", "code": "not_found", "error": ""}, "neither Docker nor Podman is installed"),
    ],
)
def test_what_a_host_runs_containers_with_is_shown(root: Client, engine: dict[str, Any], words: str) -> None:
    make_host("box-7", engine=engine)
    assert words in root.get("/p/main/hosts/box-7/").content.decode()


def test_a_join_command_is_shown_once_and_can_be_withdrawn(root: Client) -> None:
    made = press(root, "/hosts/invite/").content.decode()
    command = re.search(r'value="(dstackweb host join http://testserver --token (dwj_[\w-]+) --insecure)"', made)
    assert command
    row = HostInvite.objects.get()
    assert of_token(command[2]) == row
    assert command[2] not in page(root)
    assert f'id="host-invite-{row.pk}"' in page(root)
    press(root, f"/{row.pk}/withdraw/")
    assert not HostInvite.objects.exists()


def test_the_page_with_a_join_command_polls_the_list_of_hosts(root: Client) -> None:
    made = press(root, "/hosts/invite/").content.decode()
    assert re.findall(r'id="hosts" hx-get="([^"]+)"', made) == [HOSTS]


def test_a_host_whose_container_engine_fails_says_that_its_containers_are_held_back(root: Client) -> None:
    engine = {"name": "docker", "version": "", "code": "failed", "error": "no space left on device", "volumes": []}
    make_host("box-1", engine=engine)
    assert '<span class="dw-tag dw-tag-bad" title="no space left on device">containers held back</span>' in page(root)


def test_a_host_that_is_held_back_shows_why_and_admins_may_end_it(root: Client, ann: User, as_user: SignIn) -> None:
    host = make_host("box-1")
    for _ in range(inventory.HOLD_BACK_AFTER):
        inventory.count_failed_start(host.pk, "No space left on device", timezone.now())
    assert "No space left on device" in page(root)
    assert "Place jobs again" not in page(as_user(ann))
    assert press(root, "/clear/", button="Place jobs again")["Location"] == "/p/main/hosts/box-1/"
    assert Host.objects.filter(held_back_at=None, start_failures=0).exists()
    assert "no longer held back: takes jobs again (root)" in page(root)


def test_the_token_of_a_host_can_be_revoked_on_its_page(root: Client, ann: User, as_user: SignIn) -> None:
    make_host("box-1", token_digest="d")
    assert 'id="revoke-' not in as_user(ann).get("/p/main/hosts/box-1/").content.decode()
    assert 'id="revoke-' in root.get("/p/main/hosts/box-1/").content.decode()
    assert press(root, "/revoke/", "/p/main/hosts/box-1/")["Location"] == "/p/main/hosts/box-1/"
    assert Host.objects.get().token_digest == ""
    assert "oken was revoked" in root.get("/p/main/hosts/box-1/").content.decode()
    assert 'id="revoke-' not in root.get("/p/main/hosts/box-1/").content.decode()


def test_a_silent_host_with_jobs_can_be_declared_gone_on_its_page(root: Client, project: Project, ann: User) -> None:
    make_host("box-1")
    run = make_run(project, ann)
    place_all()
    start(placed_job(run))
    own = "/p/main/hosts/box-1/"
    assert "host-gone" not in root.get(own).content.decode()
    Host.objects.update(silent_s=1e6)
    form = open_form(root, own, to="/gone/")
    assert form.send({"reason": ""}, scripts=False).status_code == 422
    assert "No heartbeat from box-1" in root.get(f"/p/main/runs/{run.name}/").content.decode()
    assert form.send({"reason": "stolen"}, scripts=False)["Location"] == own
    assert "Declared gone, and its jobs ended: stolen" in root.get(own).content.decode()
    assert Run.objects.get(pk=run.pk).status == "failed"
