"""The bell, the list of notifications and the form of their rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.notifications import services
from dstackweb.notifications.models import Delivery
from dstackweb.runs.models import Run
from dstackweb.runs.removal import delete
from dstackweb.runs.services import ensure_queue
from dstackweb.runs.states import RunStatus
from dstackweb.runs.transitions import move_run
from tests.factories import make_run
from tests.forms import open_form, submit
from tests.web.conftest import HTMX

SignIn = Callable[[User], Client]


@pytest.fixture
def failed(project: Project, ann: User) -> Run:
    run = make_run(project, ann, "train")
    assert move_run(run, RunStatus.FAILED, now=timezone.now(), status_message="it broke")
    return run


def bell(client: Client, project: Project, **more: str) -> str:
    """What the bell of a page, or of a poll's answer, says."""
    page = client.get(f"/p/{project}/queue/", headers=more).content.decode()
    return page.partition('id="bell"')[2].partition("</a>")[0]


def test_the_bell_counts_unread_ones_on_each_page_and_with_each_poll(
    project: Project, ann: User, as_user: SignIn, failed: Run
) -> None:
    client = as_user(ann)
    assert ">1<" in bell(client, project)
    assert ">1<" in bell(client, project, **HTMX)
    row = {"channel": services.bell_of(ann), "event": "test", "data": {"by": "ann"}, "unread": True}
    Delivery.objects.bulk_create(Delivery(key=str(number), **row) for number in range(20))
    assert ">9+<" in bell(client, project)
    submit(client, "/account/notifications/", button="Mark all as read")
    assert "unread" not in bell(client, project)


def test_opening_one_leads_to_its_run_and_marks_it_read(ann: User, as_user: SignIn, failed: Run) -> None:
    client = as_user(ann)
    page = client.get("/account/notifications/").content.decode()
    assert "train: failed" in page
    assert "it broke" in page
    row = Delivery.objects.get()
    answer = client.get(reverse("notification-open", args=[row.uid]))
    assert answer["Location"] == f"/p/main/runs/{failed.uid}/"
    assert client.get(answer["Location"]).status_code == 200
    assert services.unread(ann) == 0


def test_one_about_a_deleted_run_says_so(ann: User, as_user: SignIn, failed: Run) -> None:
    delete(failed, ann, "member")
    answer = as_user(ann).get(reverse("notification-open", args=[Delivery.objects.get().uid]), follow=True)
    assert "no longer there" in answer.content.decode()


def test_one_about_a_deleted_queue_says_so(project: Project, ann: User, as_user: SignIn) -> None:
    queue = ensure_queue(project, "night")
    data = {"queue": queue.name, "code": "paused", "waiting": 1}
    bell = services.bell_of(ann)
    one = Delivery.objects.create(channel=bell, key="k", event="queue_stuck", project=project, data=data)
    client, address = as_user(ann), reverse("notification-open", args=[one.uid])
    assert client.get(client.get(address)["Location"]).status_code == 200
    queue.delete()
    assert "no longer there" in client.get(address, follow=True).content.decode()


def test_those_of_others_are_not_there(ann: User, mia: User, as_user: SignIn, failed: Run) -> None:
    client = as_user(mia)
    bell, theirs = services.bell_of(mia), Delivery.objects.get()
    Delivery.objects.create(channel=bell, key="k", event="test", data={"by": "mia"}, unread=True)
    assert "train" not in client.get("/account/notifications/").content.decode()
    assert client.get(reverse("notification-open", args=[theirs.uid])).status_code == 404
    submit(client, "/account/notifications/", button="Mark all as read")
    assert services.unread(mia) == 0
    assert services.unread(ann) == 1


def test_older_ones_are_on_further_pages(project: Project, ann: User, as_user: SignIn) -> None:
    rows = [{"key": str(number), "event": f"old_event_{number:02}"} for number in range(51)]
    channel = services.bell_of(ann)
    Delivery.objects.bulk_create([Delivery(channel=channel, project=project, **row) for row in rows])
    client = as_user(ann)
    page = client.get("/account/notifications/")
    assert "old event 50" in page.content.decode()
    assert "old event 00" not in page.content.decode()
    following = page.context["following"]
    assert "old event 00" in client.get(f"/account/notifications/?before={following}").content.decode()


def test_rules_are_chosen_per_event(project: Project, ann: User, as_user: SignIn) -> None:
    channel = services.bell_of(ann)
    url, client = "/account/notifications/settings/", as_user(ann)
    form = open_form(client, url, having="run_ended")
    offered = [control.name for control in form.controls if control.kind == "select"]
    chosen = {"run_ended": "own", "run_failed": "all", "run_stops_soon": f"project:{project.pk}"}
    assert form.send(dict.fromkeys(offered, "off") | chosen).status_code == 302
    found = {rule.event: (rule.own, rule.project_id) for rule in channel.rules.all()}
    assert found == {"run_ended": (True, None), "run_failed": (False, None), "run_stops_soon": (False, project.pk)}
    page = client.get(url).content.decode()
    assert f'<option value="project:{project.pk}" selected>' in page
    served = open_form(client, url, having="run_ended").values
    assert client.post(url, served | {"run_ended": "project:99"}).status_code == 422, "the page doesn't offer it"
    del served["run_started"]
    assert client.post(url, served).status_code == 422, "the page leaves no field out"
    assert channel.rules.count() == 3
