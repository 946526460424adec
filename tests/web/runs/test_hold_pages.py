"""Holding GPUs on the pages: the form, the way in, more time; and when a run recurs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Gpu
from dstackweb.runs import attempts, holds, recurrence, services
from dstackweb.runs.models import Run
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start
from tests.forms import open_form, submit
from tests.web.conftest import HTMX

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]
FORM = "/p/main/hold/"


def begun(project: Project, user: User, **wanted: Any) -> Run:
    run = holds.submit_hold(
        project, user, "member", holds.HoldRequest(**{"duration": "3h", "gpu": "1", "name": "mine", **wanted})
    )
    place_all()
    start(placed_job(run))
    return Run.objects.get(pk=run.pk)


def hold(client: Client, **changes: str) -> Any:
    """Send the form, which begins with one GPU for three hours."""
    return submit(client, FORM, {"name": "mine", **changes})


def extend(client: Client, more: str, **request: Any) -> Any:
    return submit(client, "/p/main/runs/mine/", {"for": more}, to="/extend/", **request)


def page(client: Client, path: str) -> str:
    answer = client.get(f"/p/main/{path}")
    assert answer.status_code == 200
    return answer.content.decode()


def test_the_form_shows_free_resources_and_puts_a_hold_in_its_queue(
    project: Project, ann: User, as_user: SignIn
) -> None:
    make_host(gpus=2)
    make_run(project, ann, resources={"gpu": 1})
    place_all()
    client = as_user(ann)
    assert "1 of 2" in page(client, "hold/")
    answer = hold(client, gpu="A100:1", priority="60")
    assert (answer.status_code, answer["Location"]) == (302, "/p/main/runs/mine/")
    run = Run.objects.get(name="mine")
    assert (run.is_hold, run.priority, run.spec["max_duration_s"]) == (True, 60, 10800)


def test_a_hold_that_no_host_can_ever_satisfy_needs_confirmation(project: Project, ann: User, as_user: SignIn) -> None:
    make_host(gpus=2)
    client = as_user(ann)
    answer = hold(client, gpu="99")
    assert answer.status_code == 422
    assert "No host has enough: 99 GPUs required" in answer.content.decode()
    assert not Run.objects.exists()
    assert submit(client, answer, {"anyway": True}).status_code == 302
    assert Run.objects.get().is_hold


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"gpu": "A100:2:2:2:2"}, "id_gpu"), ({"cpu": "many"}, "id_cpu"), ({"name": "Not A Name"}, "id_name")],
)
def test_errors_are_shown_at_their_fields(
    project: Project, ann: User, as_user: SignIn, wrong: dict[str, str], field: str
) -> None:
    answer = hold(as_user(ann), **wrong)
    assert answer.status_code == 422
    assert f'id="{field}_error"' in answer.content.decode()
    assert not Run.objects.exists()


def test_a_taken_name_is_an_error_in_the_form(project: Project, ann: User, as_user: SignIn) -> None:
    make_run(project, ann, "mine")
    answer = hold(as_user(ann))
    assert answer.status_code == 422
    assert "a run named &#x27;mine&#x27; is already submitted" in answer.content.decode()


def test_viewers_have_no_form_and_no_button(project: Project, as_user: SignIn) -> None:
    client = as_user(join(project, make_user("vera"), "viewer"))
    assert client.get("/p/main/hold/").status_code == 403
    for path in ("queue/", "hosts/"):
        assert "/p/main/hold/" not in page(client, path)


def test_the_page_of_a_hold_shows_how_to_connect_and_extends_it(project: Project, ann: User, as_user: SignIn) -> None:
    make_host(gpus=1, address="10.0.0.5")
    begun(project, ann)
    client = as_user(ann)
    shown = page(client, "runs/mine/")
    assert "ssh 10.0.0.5\nexport CUDA_VISIBLE_DEVICES=GPU-box-1-0" in shown
    assert "Release" in shown
    assert "the hold" in shown
    answer = extend(client, "1h")
    assert (answer.status_code, "extended by 1 h" in answer["HX-Trigger"]) == (204, True)
    assert Run.objects.get().extended_s == 3600
    assert extend(client, "1h", scripts=False).status_code == 302
    shown = page(client, "runs/mine/")
    assert "5 h in total" in shown
    assert "changed since" in shown


def test_a_hold_is_released_and_then_aborted_from_its_page(project: Project, ann: User, as_user: SignIn) -> None:
    make_host(gpus=1)
    begun(project, ann)
    client = as_user(ann)
    for button, reason in (("Release", "stopped_by_user"), ("Abort", "aborted_by_user")):
        assert submit(client, "/p/main/runs/mine/", to="/stop/", button=button).status_code == 204
        assert Run.objects.get().stop_reason == reason


def test_more_time_than_the_page_offers_is_refused(project: Project, ann: User, as_user: SignIn) -> None:
    """No page sends it."""
    make_host(gpus=1)
    run = begun(project, ann)
    refused = as_user(ann).post(f"/p/main/runs/{run.uid}/extend/", {"for": "8d"}, headers=HTMX)
    assert (refused.status_code, "7 days in all" in refused["HX-Trigger"]) == (422, True)
    assert Run.objects.get().extended_s == 0


def test_other_members_see_how_to_connect_and_cannot_extend_the_hold(
    project: Project, ann: User, as_user: SignIn
) -> None:
    """No page sends the request for them."""
    make_host(gpus=1)
    run = begun(project, ann)
    client = as_user(join(project, make_user("bob")))
    assert "/extend/" not in page(client, "runs/mine/")
    assert client.post(f"/p/main/runs/{run.uid}/extend/", {"for": "1h"}, headers=HTMX).status_code == 403


def test_lists_show_the_owner_and_the_end_of_holds(project: Project, ann: User, as_user: SignIn) -> None:
    make_host(gpus=1)
    run = begun(project, ann)
    Gpu.objects.update(stranger={"user": "ann", "pid": 4711})
    assert run.held_until is not None
    until = f"{run.held_until:%Y-%m-%dT%H:%M:%SZ}"
    client = as_user(ann)
    assert f"Held until <time datetime={until} " in page(client, "queue/")
    hosts = page(client, "hosts/")
    assert "held by ann until" in hosts.replace("\n", "")
    assert "used by ann, pid 4711" in hosts
    elsewhere = as_user(join(make_project("other"), make_user("olga")))
    assert "held by" not in elsewhere.get("/p/other/hosts/").content.decode()


def test_extending_a_hold_changes_the_version_of_the_hosts_page(project: Project, ann: User, as_user: SignIn) -> None:
    make_host(gpus=1)
    run = begun(project, ann)
    client = as_user(ann)
    version = client.get("/p/main/hosts/")["HX-PTag"]
    holds.extend(run, ann, "member", "1h")
    assert client.get("/p/main/hosts/")["HX-PTag"] != version


def test_an_ended_hold_shows_its_reason_and_can_be_requested_again(
    project: Project, ann: User, as_user: SignIn
) -> None:
    make_host(gpus=1)
    run = begun(project, ann, gpu="A100:1", memory="8GB")
    attempts.end_job(placed_job(run).pk, "max_duration_exceeded", exit_code=0)
    client = as_user(ann)
    assert "Its hold ended on time." in page(client, "runs/mine/")
    again = open_form(client, f"{FORM}?from={run.uid}")
    assert (again.values["gpu"], again.values["memory"]) == (["A100:1"], ["8GB"])
    assert again.send({"name": "again"})["Location"] == "/p/main/runs/again/"


def test_the_page_of_the_last_run_ends_a_schedule_that_waits_and_shows_that(
    project: Project, ann: User, as_user: SignIn
) -> None:
    run = make_run(project, ann, "nightly")
    services.stop(run, ann, "member")
    schedule = {**run.spec, "schedule": {"cron": ["0 2 * * *"]}}
    Run.objects.update(spec=schedule, retry_at=timezone.now())
    client, address = as_user(ann), f"/p/main/runs/{run.uid}/"
    assert submit(client, address, to="/stop/", having="End schedule").headers["HX-Redirect"] == address
    shown = client.get(address).content.decode()
    assert "Its schedule has ended" in shown
    assert 'id="end-schedule"' not in shown


def test_a_scheduled_run_shows_when_it_recurs(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    first = make_run(project, ann, "nightly", schedule={"cron": "0 2 * * *"})
    client = as_user(ann)
    assert "Next at" in page(client, "runs/nightly/")
    assert "Enters queue at" in page(client, "queue/")
    Run.objects.update(retry_at=timezone.now())
    attempts.requeue_due(timezone.now())
    place_all()
    job = start(placed_job(first))
    assert "Its next run is created when this one ends" in page(client, "runs/nightly/")
    attempts.end_job(job.pk, "done_by_runner", exit_code=0)
    assert "Next at" in page(client, "runs/nightly/")
    recurrence.create_occurrences(timezone.now())
    following = Run.objects.select_related("queue", "project", "user").latest("id")
    assert f"/p/main/runs/{following.uid}/" in page(client, f"runs/{first.uid}/")
    shown = page(client, "runs/nightly/")
    assert f"/p/main/runs/{first.uid}/" in shown
    assert "This also ends its schedule." in shown
    services.stop(following, ann, "member")
    assert "Its schedule has ended" in page(client, "runs/nightly/")
