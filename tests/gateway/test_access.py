"""Who may enter a run, by key and by visit; and which runners may connect."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.conf import LazySettings
from django.test import Client
from django.utils import timezone

from dstackweb.accounts import ssh_keys
from dstackweb.accounts.models import Membership, Project, SSHKey, TokenLimit, TokenScope, User
from dstackweb.accounts.services import create_token
from dstackweb.gateway import access
from dstackweb.gateway.answers import Denied
from dstackweb.lib.errors import Conflict, Forbidden, Invalid
from dstackweb.runs import connections, services
from dstackweb.runs.connections import Tickets, Visit
from dstackweb.runs.launch import job_token, runner_spec
from dstackweb.runs.models import Job, Run, RunActivity
from dstackweb.runs.service_codes import GatewayProblem
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start
from tests.forms import submit

ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGmqQSMV9DLyyOSFo3M8bQ9xZXuDkpuUUJ7n3N9mVtXo"
pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _gateway(settings: LazySettings) -> None:
    settings.DSTACKWEB_GATEWAY_PORT, settings.DSTACKWEB_SSH_PORT = 8001, 2222


def dev(project: Project, user: User, name: str = "dev", *, starts: bool = True, **keys: Any) -> Run:
    make_host(f"box-{name}-{project.pk}")
    config = {"type": "dev-environment", "name": name, **keys}
    run, _made = services.submit(project, user, "member", services.Submission(config))
    if starts:
        place_all()
        start(placed_job(run))
        run.refresh_from_db()
    return run


@pytest.fixture
def run(project: Project, member: User) -> Run:
    return dev(project, member)


@pytest.fixture
def key(member: User) -> SSHKey:
    return ssh_keys.add(member, f"{ED25519} mia@laptop")


def refused(problem: GatewayProblem, admit: Callable[..., access.Admission], *args: object) -> None:
    with pytest.raises(Denied) as caught:
        admit(*args)
    assert caught.value.problem == problem


def test_a_key_leads_its_user_to_their_runs_by_name_project_and_id(run: Run, key: SSHKey) -> None:
    for name in ("dev", "main/dev", str(run.uid)):
        entry = access.by_key(name, key.fingerprint)
        assert entry is not None
        assert (entry.user_id, entry.run_id) == (run.user_id, run.pk)
    key.refresh_from_db()
    assert key.last_used_at is not None
    for name in ("other", "elsewhere/dev", "", str(uuid.uuid4())):
        assert access.by_key(name, key.fingerprint) is None
    assert access.by_key("dev", "SHA256:of-nobody") is None


def test_others_enter_only_as_managers_and_nobody_after_they_have_left(run: Run, project: Project) -> None:
    colleague = join(project, make_user("colleague"), "member")
    own = ssh_keys.add(colleague, ED25519)
    assert access.by_key("dev", own.fingerprint) is None
    Membership.objects.filter(user=colleague).update(role="manager")
    assert access.by_key("dev", own.fingerprint) is not None
    assert connections.may_enter(colleague.pk, run.pk)
    Membership.objects.filter(user=colleague).delete()
    assert access.by_key("dev", own.fingerprint) is None
    assert access.may_still_enter([(colleague.pk, run.pk), (run.user_id, run.pk)]) == {(run.user_id, run.pk)}
    User.objects.filter(pk=run.user_id).update(is_active=False)
    assert not connections.may_enter(run.user_id, run.pk)


def test_a_name_of_two_projects_needs_the_project(run: Run, member: User, key: SSHKey) -> None:
    other = make_project("research")
    join(other, member)
    second = dev(other, member)
    assert access.by_key("dev", key.fingerprint) is None
    entry = access.by_key("research/dev", key.fingerprint)
    assert entry is not None
    assert entry.run_id == second.pk
    assert connections.ssh_user(run) == str(run.uid)


def test_nobody_enters_tasks(project: Project, member: User, key: SSHKey) -> None:
    make_run(project, member, "task")
    assert access.by_key("task", key.fingerprint) is None


def test_only_the_runner_of_a_job_that_people_enter_connects(run: Run, project: Project, member: User) -> None:
    job = Job.objects.get(run=run)
    token, nonce = job_token(job.pk), job.claim_nonce
    found = access.runner_of(job.pk, token, nonce)
    assert found is not None
    assert (found.run_id, found.attempt) == (run.pk, 1)
    assert access.runner_of(job.pk, token, "another") is None
    assert access.runner_of(job.pk, "no token", nonce) is None
    make_host("box-task")
    task = make_run(project, member, "task")
    place_all()
    of_task = start(placed_job(task))
    assert access.runner_of(of_task.pk, job_token(of_task.pk), of_task.claim_nonce) is None


def test_a_runner_learns_of_the_gateway_and_what_to_run(run: Run) -> None:
    spec = runner_spec(Job.objects.get(run=run))
    assert spec["gateway"] == {"url": "", "port": 8001}
    assert "sleep" in spec["commands"][-1]


def test_jupyter_is_the_last_command_and_init_comes_before(project: Project, member: User) -> None:
    run = dev(project, member, "lab", ide="jupyter", init=["echo first"])
    commands = runner_spec(Job.objects.get(run=run))["commands"]
    assert commands[0] == "echo first"
    assert "exec jupyter-lab" in commands[1]


def test_jupyter_asks_for_a_token_that_no_argument_and_no_log_has(project: Project, member: User) -> None:
    specs = [runner_spec(Job.objects.get(run=dev(project, member, name, ide="jupyter"))) for name in ("lab", "other")]
    tokens = [spec["env"]["JUPYTER_TOKEN"] for spec in specs]
    assert tokens[0] != tokens[1]
    for spec, token in zip(specs, tokens, strict=True):
        assert token in spec["redact"]
        assert not any("token" in command for command in spec["commands"])


def test_without_a_gateway_dev_environments_are_refused(project: Project, member: User, settings: LazySettings) -> None:
    settings.DSTACKWEB_GATEWAY_PORT = 0
    with pytest.raises(Conflict, match="no gateway"):
        dev(project, member, starts=False)


def test_how_to_connect_is_known_once_it_runs(run: Run, settings: LazySettings) -> None:
    found = connections.connection_to(run)
    assert found is not None
    assert (found.ssh, found.ready, found.stops_s) == ("ssh -p 2222 dev@127.0.0.1", False, None)
    RunActivity.objects.create(run=run, attempt=1, connected_at=timezone.now(), idle_s=5)
    settings.DSTACKWEB_GATEWAY_URL = "https://dev.example.org"
    run.spec["ide"], run.spec["inactivity_duration_s"] = "vscode", 60
    found = connections.connection_to(run)
    assert found is not None
    assert (found.ssh, found.ready, found.stops_s) == ("ssh -p 2222 dev@dev.example.org", True, 55)
    assert found.vscode.startswith("vscode://vscode-remote/ssh-remote+dev%40dev.example.org%3A2222/")
    assert connections.origin_of(run) == f"https://{run.uid}.dev.example.org"


def test_a_visit_ends_with_the_password_and_is_for_one_run(run: Run, member: User) -> None:
    visit = Tickets().take(connections.ticket(member, run))
    assert visit is not None
    assert connections.read_cookie(connections.cookie(visit)) == visit
    assert connections.read_cookie(connections.ticket(member, run)) is None, "a ticket is no cookie"
    assert access.by_visit(visit, str(run.uid)) == access.Admission(member.username, run.pk, "dev", None)
    refused(GatewayProblem.SIGN_IN, access.by_visit, visit, str(uuid.uuid4()))
    refused(GatewayProblem.SIGN_IN, access.by_visit, Visit(visit.user_id, visit.run_id, "x" * 32), str(run.uid))
    member.set_password("another one, long")
    member.save()
    refused(GatewayProblem.SIGN_IN, access.by_visit, visit, str(run.uid))


def test_a_ticket_counts_once_and_not_from_before_this_gateway(run: Run, member: User) -> None:
    before, tickets = connections.ticket(member, run), Tickets()
    assert tickets.take(before) is None
    text = connections.ticket(member, run)
    assert tickets.take(text) is not None
    assert tickets.take(text) is None
    assert tickets.take(connections.cookie(Visit(member.pk, run.pk, "x"))) is None


def test_the_dashboard_gives_tickets_to_those_who_may_enter(project: Project, member: User) -> None:
    run = dev(project, member, "lab", ide="jupyter")
    client = Client()
    client.force_login(join(project, make_user("colleague"), "member"))
    assert client.get(f"/p/main/runs/{run.uid}/open/").status_code == 403
    assert b"Open JupyterLab" not in client.get(f"/p/main/runs/{run.uid}/").content
    client.force_login(member)
    page = client.get(f"/p/main/runs/{run.uid}/").content.decode()
    assert "Open JupyterLab" in page
    assert "ssh -p 2222 lab@" in page
    opened = client.get(f"/p/main/runs/{run.uid}/open/")
    assert opened.status_code == 302
    assert opened["Location"].startswith(f"http://{run.uid}.localhost:8001/.dstackweb/enter?ticket=")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a public key"),
        ("ssh-ed25519", "not a public key"),
        ("ssh-dss AAAAB3NzaC1kc3MAAACBAP", "not a public key"),
        ("ssh-ed25519 AAAA", "damaged"),
        (ED25519.replace("ssh-ed25519", "ssh-rsa"), "damaged"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA", "not a public key"),
    ],
)
def test_what_is_no_public_key_is_refused(member: User, text: str, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        ssh_keys.add(member, text)


def test_keys_are_added_once_named_by_their_comment_and_removed_by_their_user(member: User, key: SSHKey) -> None:
    assert (key.name, key.public_key) == ("mia@laptop", ED25519)
    assert key.fingerprint.startswith("SHA256:")
    with pytest.raises(Conflict):
        ssh_keys.add(member, ED25519)
    other = make_user("other")
    assert ssh_keys.add(other, ED25519, "desk").name == "desk"
    client = Client()
    client.force_login(member)
    page = "/account/ssh-keys/"
    assert "mia@laptop" in client.get(page).content.decode()
    theirs = client.post(f"{page}{other.ssh_keys.get().pk}/remove/")  # which the page doesn't name
    assert theirs.status_code == 404
    assert submit(client, page, to=f"/{key.pk}/remove/").status_code == 302
    assert submit(client, page, {"public_key": "x", "name": ""}).status_code == 422
    assert submit(client, page, {"public_key": ED25519, "name": "new"}).status_code == 302
    assert member.ssh_keys.get().name == "new"


def test_a_limited_token_adds_no_key(member: User) -> None:
    limited = Client(headers={"Authorization": f"Bearer {create_token(member, 'ci', scope='submit')[1]}"})
    body = {"public_key": ED25519}
    assert limited.post("/api/v1/user/ssh-keys", body, content_type="application/json").status_code == 403
    member.token_limit = TokenLimit(TokenScope.READ, None)
    with pytest.raises(Forbidden):
        ssh_keys.add(member, ED25519)
    whole = Client(headers={"Authorization": f"Bearer {create_token(member, 'laptop')[1]}"})
    added = whole.post("/api/v1/user/ssh-keys", body, content_type="application/json")
    assert added.status_code == 201
    listed = whole.get("/api/v1/user/ssh-keys").json()
    assert [one["id"] for one in listed["items"]] == [added.json()["id"]]
    assert listed["gateway"]["port"] == 2222
    assert whole.delete(f"/api/v1/user/ssh-keys/{added.json()['id']}").status_code == 204
