"""The machines of clouds, what they and runs have cost so far, and the warning of a budget that is nearly spent."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.runs import attempts
from dstackweb.runs.models import BudgetMark, Job
from dstackweb.runs.states import Reason
from dstackweb.runs.transitions import record
from dstackweb.web.cloud import instance_views
from dstackweb.wording import statuses
from tests.factories import cloud_job, join, make_host, make_project, make_run, make_user, place_all, placed_job
from tests.forms import open_form
from tests.web.conftest import HTMX

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]
URL = "/p/main/machines/"


@pytest.fixture
def backend(db: None) -> Backend:
    return Backend.objects.create(name="aws", kind="aws", config={"regions": ["us-east-1"]})


def machine(backend: Backend, project: Project, **fields: Any) -> Instance:
    """One that has run for two hours at $3."""
    began = timezone.now() - dt.timedelta(hours=2)
    values: dict[str, Any] = {
        "region": "us-east-1", "instance_type": "g6.xlarge", "price": Decimal(3), "status": InstanceStatus.RUNNING,
        "created_at": began, "launched_at": began, "cloud_id": "i-1",
    }  # fmt: skip
    return Instance.objects.create(backend=backend, project=project, **{**values, **fields})


def page(client: Client, path: str = URL) -> str:
    response = client.get(path)
    assert response.status_code == 200
    return re.sub(r"\s+", " ", response.content.decode())


@pytest.fixture
def admin(project: Project, as_user: SignIn) -> Client:
    return as_user(join(project, make_user("ada"), "admin"))


def test_an_instance_shows_its_run_and_its_cost(backend: Backend, project: Project, ann: User, as_user: SignIn) -> None:
    make_host("box-1")
    run = make_run(project, ann, "train")
    place_all()
    job = placed_job(run)
    found = machine(backend, project, holder=job.pk)
    Job.objects.filter(pk=job.pk).update(
        instance=found, price=found.price, placed_at=timezone.now() - dt.timedelta(hours=1)
    )
    text = page(as_user(ann))
    assert re.search(r'data-cost="6\.\d+" data-rate="3\.0000"', text)
    assert ">train</a>" in text
    assert "Terminate" not in text
    text = page(as_user(ann), "/p/main/runs/train/")
    assert re.search(r'Cost so far <b><span class="dw-cost" data-cost="3\.\d+" data-rate="3\.0000"', text)
    assert "now $3.00/h" in text


def test_a_run_on_own_hosts_shows_no_cost(project: Project, ann: User, as_user: SignIn) -> None:
    make_host("box-1")
    make_run(project, ann, "train")
    place_all()
    assert "Cost so far" not in page(as_user(ann), "/p/main/runs/train/")


def test_instances_of_other_projects_are_not_shown_and_cannot_be_terminated(
    backend: Backend, project: Project, admin: Client
) -> None:
    """Not even by a request that no page sends."""
    other = machine(backend, make_project("other"), instance_type="p5.48xlarge")
    assert "p5.48xlarge" not in page(admin)
    assert admin.post(f"{URL}{other.pk}/stop/").status_code == 404


def test_only_admins_terminate_an_idle_instance(
    backend: Backend, project: Project, admin: Client, mia: User, as_user: SignIn
) -> None:
    idle = machine(backend, project, idle_until=timezone.now() + dt.timedelta(minutes=5))
    manager = as_user(mia)
    assert "Terminate" not in page(manager)
    assert manager.post(f"{URL}{idle.pk}/stop/").status_code == 403, "which no page of a manager sends"
    terminate = open_form(admin, URL, to=f"/{idle.pk}/stop/")
    assert re.search(r"terminates <time [^>]*data-when=\"?in", page(admin))
    assert terminate.send().status_code == 302
    idle.refresh_from_db()
    assert (idle.status, idle.why, idle.idle_until) == (InstanceStatus.STOPPING, "stopped", None)
    assert "Terminating g6.xlarge" in page(admin)
    assert terminate.send().status_code == 409


def test_an_instance_in_use_cannot_be_terminated(backend: Backend, project: Project, admin: Client) -> None:
    busy = machine(backend, project, idle_until=timezone.now() + dt.timedelta(minutes=5))
    terminate = open_form(admin, URL, to=f"/{busy.pk}/stop/")
    Instance.objects.update(idle_until=None, holder=uuid4())
    assert terminate.send().status_code == 409
    busy.refresh_from_db()
    assert busy.status == InstanceStatus.RUNNING


def test_ended_instances_are_listed_for_a_day(backend: Backend, project: Project, admin: Client) -> None:
    now = timezone.now()
    machine(
        backend, project, status=InstanceStatus.GONE, why="no_capacity", launched_at=None, error="none in us-east-1a"
    )
    machine(backend, project, status=InstanceStatus.GONE, why="interrupted", ended_at=now, instance_type="g5.xlarge")
    machine(
        backend, project, status=InstanceStatus.GONE, ended_at=now - dt.timedelta(days=2),
        created_at=now - dt.timedelta(days=2), instance_type="p4d.24xlarge",
    )  # fmt: skip
    text = page(admin)
    assert "The cloud has no capacity now" in text
    assert "none in us-east-1a" in text
    assert "The cloud reclaimed it" in text
    assert "p4d.24xlarge" not in text
    assert "No cloud instances" in text


def test_a_poll_is_answered_after_an_instance_changed(backend: Backend, project: Project, admin: Client) -> None:
    found = machine(backend, project)
    poll = {**HTMX, "HX-PTag": admin.get(URL)["HX-PTag"]}
    assert admin.get(URL, headers=poll).status_code == 204
    Instance.objects.filter(pk=found.pk).update(status=InstanceStatus.STOPPING)
    assert "terminating" in admin.get(URL, headers=poll).content.decode()


@pytest.mark.parametrize(
    ("hours", "percent", "shown"),
    [(1, 50, None), (9, 80, "used over 80 %"), (11, 100, "Runs on paid backends wait"), (2, 80, None)],
)
def test_a_nearly_spent_budget_is_shown_on_every_page(
    backend: Backend,
    project: Project,
    admin: Client,
    monkeypatch: pytest.MonkeyPatch,
    hours: int,
    percent: int,
    shown: str | None,
) -> None:
    """Of a mark that a raised budget has taken back, nothing is shown."""
    now = timezone.now().replace(day=15)
    monkeypatch.setattr(timezone, "now", lambda: now)
    Project.objects.filter(pk=project.pk).update(monthly_budget=Decimal(30))
    began = now - dt.timedelta(hours=hours)
    machine(backend, project, launched_at=began, ended_at=now, status=InstanceStatus.GONE)
    BudgetMark.objects.create(
        project=project, month=now.date().replace(day=1), percent=percent, spent=Decimal(1), budget=Decimal(30)
    )
    for path in ("/p/main/queue/", "/p/main/hosts/"):
        text = page(admin, path)
        assert ("dw-budget" in text) == (shown is not None)
        if shown:
            assert shown in text
    assert "of $30" in page(admin, "/p/main/queue/")


def test_only_marks_of_the_current_budget_are_shown(backend: Backend, project: Project, admin: Client) -> None:
    now = timezone.now()
    month = now.date().replace(day=1)
    Project.objects.filter(pk=project.pk).update(monthly_budget=Decimal(30))
    for percent, of in ((50, 30), (80, 20)):
        BudgetMark.objects.create(
            project=project, month=month, percent=percent, spent=Decimal(16), budget=Decimal(of), at=now
        )
    text = page(admin, "/p/main/machines/")
    assert "50 % used" in text
    assert "80 % used" not in text


def test_without_a_budget_no_page_queries_the_spending(
    project: Project, admin: Client, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(0):
        assert instance_views.budget_warning(project, timezone.now()) is None


def test_a_run_shows_its_instance_and_why_that_is_not_up_yet(project: Project, ann: User, as_user: SignIn) -> None:
    job = cloud_job(make_run(project, ann, "train"), cloud_id="i-0abc")
    Job.objects.filter(pk=job.pk).update(region="us-east-1", instance_type="g6.xlarge", price=Decimal("0.8"))
    client = as_user(ann)
    first = client.get("/p/main/runs/train/")
    text = first.content.decode()
    assert "on aws us-east-1 g6.xlarge ·" in " ".join(text.split())
    assert '<div class="why">on aws us-east-1 g6.xlarge</div>' in page(client, "/p/main/runs/")
    assert f'/p/main/machines/#instance-{job.instance_id}">i-0abc</a>' in text
    poll = {**HTMX, "HX-PTag": first["HX-PTag"]}
    assert client.get("/p/main/runs/train/", headers=poll).status_code == 204
    Job.objects.filter(pk=job.pk).update(message="AWS said that it is asked too often.")
    again = client.get("/p/main/runs/train/", headers=poll)
    assert again.status_code == 200
    assert "AWS said that it is asked too often." in again.content.decode()


def test_a_run_without_cloud_capacity_shows_that_before_the_last_refusal(
    project: Project, ann: User, as_user: SignIn
) -> None:
    run = make_run(project, ann, "train")
    attempts.end_job(cloud_job(run).pk, Reason.OUT_OF_CAPACITY, message="None in eu-west-1.")
    run.refresh_from_db()
    assert (run.status, statuses.run_message(run)) == ("pending", "No cloud had an instance for it. None in eu-west-1.")
    text = page(as_user(ann), "/p/main/runs/train/")
    assert "<b>No cloud had an instance for it.</b> It will be retried" in text
    assert '<div class="mono">None in eu-west-1.</div>' in text


def test_offers_that_were_refused_one_after_the_other_are_one_row_of_the_timeline(
    project: Project, ann: User, as_user: SignIn
) -> None:
    run = make_run(project, ann, "train")
    cloud_job(run)
    for region, spot, code in (("eu", True, "no_capacity"), ("us", False, "no_capacity"), ("us", False, "error")):
        data = {"backend": "aws", "region": region, "instance_type": "g5.xlarge", "spot": spot, "code": code}
        record(run, "offer_failed", {**data, "text": "Our system is working on it."}, node=0, attempt=1)
    text = page(as_user(ann), "/p/main/runs/train/")
    assert "2 offers: the cloud has no capacity now: eu g5.xlarge (spot), us g5.xlarge" in text
    assert text.count("Our system is working on it.") == 1


def test_failed_launches_are_counted_and_do_not_displace_ended_instances(
    backend: Backend, project: Project, ann: User, as_user: SignIn
) -> None:
    now = timezone.now()
    gone = {"status": InstanceStatus.GONE, "ended_at": now}
    for number in range(13):
        machine(
            backend, project, **gone, cloud_id="", launched_at=None, why="no_capacity", instance_type=f"failed-{number}"
        )
    machine(backend, project, **gone, why="idle", instance_type="g6.2xlarge")
    machine(backend, project, holder=None, price=Decimal("0.1"))
    text = page(as_user(ann))
    assert "13 more launches failed" in text
    assert "g6.2xlarge" in text
    assert "failed-12" not in text
    assert "1 idle" in text


def test_health_says_of_instances_what_this_page_says(backend: Backend, project: Project, admin: Client) -> None:
    for status, holder in (("requested", uuid4()), ("running", uuid4()), ("running", None), ("running", None)):
        machine(backend, project, status=status, holder=holder)
    assert "1 requested, 1 running, 2 idle" in page(admin, "/p/main/health/")
    assert all(f"{n} {word}" in page(admin) for n, word in ((1, "requested"), (1, "running"), (2, "idle")))
