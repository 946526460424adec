"""Who may call a service: members of its project, in a browser or with an API token."""

from __future__ import annotations

import datetime as dt

import pytest
from django.conf import LazySettings
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import create_token, revoke_token
from dstackweb.gateway import access
from dstackweb.gateway.answers import Denied, answer
from dstackweb.lib.errors import Conflict
from dstackweb.runs import connections, services
from dstackweb.runs.connections import Visit
from dstackweb.runs.launch import job_token, runner_spec
from dstackweb.runs.models import Job, Run
from dstackweb.runs.service_codes import GatewayProblem
from dstackweb.spec.effective import HealthCheck
from tests.factories import join, make_host, make_project, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db
CONFIG = {"type": "service", "name": "llm", "commands": ["serve"], "port": 8000, "health_check": "/health"}


@pytest.fixture(autouse=True)
def _gateway(settings: LazySettings) -> None:
    settings.DSTACKWEB_GATEWAY_PORT, settings.DSTACKWEB_SSH_PORT = 8001, 2222


@pytest.fixture
def run(project: Project, member: User) -> Run:
    make_host("box")
    run, _made = services.submit(project, member, "member", services.Submission(CONFIG))
    place_all()
    start(placed_job(run))
    run.refresh_from_db()
    return run


def problem(proof: Visit | str, run: Run) -> GatewayProblem | None:
    """Why somebody is not let in; None if they are."""
    try:
        if isinstance(proof, str):
            access.by_token(proof, str(run.uid), "192.0.2.1")
        else:
            access.by_visit(proof, str(run.uid))
    except Denied as denied:
        return denied.problem
    return None


def visit_of(user: User, run: Run) -> Visit:
    return Visit(user.pk, run.pk, connections.proof_of(user))


def test_all_members_of_the_project_may_call_a_service_and_nobody_else(run: Run, project: Project) -> None:
    colleague, viewer = join(project, make_user("ann"), "member"), join(project, make_user("vic"), "viewer")
    stranger = join(make_project("research"), make_user("bob"), "admin")
    expected = [(colleague, None), (viewer, GatewayProblem.NO_ACCESS), (stranger, GatewayProblem.NO_RUN)]
    for user, refusal in expected:
        assert problem(visit_of(user, run), run) == refusal
        assert problem(create_token(user, "laptop")[1], run) == refusal
    assert access.by_visit(visit_of(colleague, run), str(run.uid)) == access.Admission("ann", run.pk, "llm", 8000)


def test_a_token_opens_what_its_scope_and_project_allow(run: Run, project: Project, member: User) -> None:
    other = make_project("research")
    join(other, member)
    assert problem(create_token(member, "ci", scope="submit", project=project)[1], run) is None
    assert problem(create_token(member, "read", scope="read")[1], run) == GatewayProblem.NO_ACCESS
    assert problem(create_token(member, "there", project=other)[1], run) == GatewayProblem.NO_RUN
    old = timezone.now() - dt.timedelta(days=1)
    assert problem(create_token(member, "old", expires_at=old)[1], run) == GatewayProblem.BAD_TOKEN
    row, token = create_token(member, "revoked")
    revoke_token(member, row.pk)
    assert problem(token, run) == GatewayProblem.BAD_TOKEN


def test_wrong_tokens_from_one_address_are_limited_and_valid_ones_still_work(run: Run, member: User) -> None:
    found = [problem(f"dw_{n}", run) for n in range(61)]
    assert found == [GatewayProblem.BAD_TOKEN] * 60 + [GatewayProblem.TOO_MANY_FAILURES]
    assert problem(create_token(member, "laptop")[1], run) is None


def test_a_token_opens_no_dev_environment_and_a_key_no_service(run: Run, project: Project, member: User) -> None:
    make_host("box-2")
    config = {"type": "dev-environment", "name": "dev"}
    dev, _made = services.submit(project, member, "member", services.Submission(config))
    assert problem(create_token(member, "laptop")[1], dev) == GatewayProblem.TOKENS_NOT_TAKEN
    assert access._run_called(member, "dev") == dev
    assert access._run_called(member, "llm") is None


def test_a_service_that_has_ended_says_so_to_its_members_alone(run: Run, member: User) -> None:
    Run.objects.filter(pk=run.pk).update(status="terminated")
    token = create_token(member, "laptop")[1]
    assert problem(token, run) == GatewayProblem.ENDED
    stranger = make_user("bob")
    assert problem(create_token(stranger, "laptop")[1], run) == GatewayProblem.NO_RUN


def test_its_runner_connects_and_its_commands_know_the_port(run: Run) -> None:
    job = Job.objects.get(run=run)
    found = access.runner_of(job.pk, job_token(job.pk), job.claim_nonce)
    assert found is not None
    assert found.service == access.CheckedPort(8000, HealthCheck(path="/health"))
    spec = runner_spec(job)
    assert (spec["service_port"], spec["gateway"]["port"], list(spec["commands"])) == (8000, 8001, ["serve"])


def test_without_a_gateway_services_are_refused(project: Project, member: User, settings: LazySettings) -> None:
    settings.DSTACKWEB_GATEWAY_PORT = 0
    with pytest.raises(Conflict, match="no gateway"):
        services.submit(project, member, "member", services.Submission(CONFIG))


def test_the_gateways_own_answers_are_a_page_or_json_in_the_callers_language() -> None:
    denied = Denied(GatewayProblem.NOT_STARTED, name="<llm>", status="submitted", port=8000)
    page = answer(denied, {"Accept": "text/html,*/*", "Accept-Language": "fr, zh-CN;q=0.5"}, repeats=True)
    assert (page.status, page.content_type, page.headers["Retry-After"]) == (503, "text/html", "5")
    assert page.text is not None
    assert "<llm>" not in page.text
    assert 'lang="zh-hans"' in page.text
    assert "http-equiv" in page.text
    plain = answer(denied, {"Accept": "*/*"})
    assert plain.headers["X-Dstackweb-Problem"] == "not_started"
    assert plain.text is not None
    assert "The request was not passed on." in plain.text
    assert answer(Denied(GatewayProblem.BAD_TOKEN), {}).headers["WWW-Authenticate"] == "Bearer"


def test_members_open_a_service_from_its_page_and_viewers_do_not(run: Run, project: Project) -> None:
    client = Client()
    client.force_login(join(project, make_user("vic"), "viewer"))
    assert client.get(f"/p/main/runs/{run.uid}/open/").status_code == 403
    assert b'id="open-service"' not in client.get(f"/p/main/runs/{run.uid}/").content
    client.force_login(join(project, make_user("ann"), "member"))
    page = client.get(f"/p/main/runs/{run.uid}/").content.decode()
    assert 'id="open-service"' in page
    assert f"http://{run.uid}.localhost:8001" in page
    opened = client.get(f"/p/main/runs/{run.uid}/open/")
    assert opened["Location"].startswith(f"http://{run.uid}.localhost:8001/.dstackweb/enter?ticket=")


def test_the_api_says_where_a_service_is_and_how(run: Run, member: User) -> None:
    client = Client(headers={"Authorization": f"Bearer {create_token(member, 'laptop')[1]}"})
    found = client.get("/api/v1/projects/main/runs/llm").json()
    assert found["connect"] is None
    service = found["service"]
    assert (service["url"], service["port"]) == (f"http://{run.uid}.localhost:8001", 8000)
    assert service["open_url"].endswith(f"/p/main/runs/{run.uid}/open/")
    assert (service["ready"], service["health"]["state"], service["health"]["detail"]) == (False, "starting", "")
    assert client.get("/api/v1/projects/main/runs").json()["items"][0]["health"] == "starting"
    plan = client.post("/api/v1/projects/main/runs/plan", {"config": CONFIG}, content_type="application/json").json()
    assert plan["settings"]["health_check"]["interval"] == "10s"
