"""The page that moves runs to another queue."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.runs import services
from dstackweb.runs.concurrency import etag
from dstackweb.runs.models import Queue, Run
from tests.factories import make_run
from tests.forms import open_form, submit
from tests.web.conftest import HTMX

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]
PAGE = "/p/main/queues/default/transfer/"


@pytest.fixture
def night(project: Project) -> Queue:
    return services.ensure_queue(project, "night")


def queues() -> dict[str, str]:
    return dict(Run.objects.values_list("name", "queue__name"))


def test_the_page_shows_the_effect_and_the_button_moves_the_runs(
    project: Project, ann: User, mia: User, night: Queue, as_user: SignIn
) -> None:
    runs = [make_run(project, ann, name) for name in ("a", "b")]
    make_run(project, mia, "first", queue="night", role="manager", priority=60)
    make_run(project, mia, "last", queue="night")
    client = as_user(ann)
    tokens = ",".join(f"{run.pk}.{etag(run)}" for run in runs)
    page = client.get(PAGE, {"run": tokens})
    assert "2 runs from queue default" in page.text
    assert "1 run there moves back" in page.text
    assert "Expected start of last, which waits there now" in page.text
    assert queues()["a"] == "default"
    answer = submit(client, page, button="Move to night")
    assert (answer.status_code, answer["Location"]) == (302, "/p/main/queues/night/")
    assert queues() == {"a": "night", "b": "night", "first": "night", "last": "night"}
    assert "2 runs moved to night" in client.get(answer["Location"]).content.decode()


def test_what_refuses_it_is_shown_and_no_button_is_there(
    project: Project, ann: User, night: Queue, as_user: SignIn
) -> None:
    """No page sends the last two requests."""
    run = make_run(project, ann, "a")
    Queue.objects.filter(pk=night.pk).update(draining=True)
    page = as_user(ann).get(PAGE, {"run": run.pk, "to": "night"}, headers=HTMX).content.decode()
    assert "Queue night is draining" in page
    assert "Move to night" not in page
    assert as_user(ann).post(PAGE, {"run": run.pk, "to": "night"}).status_code == 409
    assert as_user(ann).post(PAGE, {"run": run.pk}).status_code == 422
    assert queues() == {"a": "default"}


def test_all_runs_of_the_member_can_go_along(
    project: Project, ann: User, mia: User, night: Queue, as_user: SignIn
) -> None:
    runs = {name: make_run(project, mia if name == "c" else ann, name) for name in "abc"}
    client = as_user(mia)
    page = client.get(PAGE, {"run": runs["a"].pk, "all": "yes"})
    assert "All waiting runs of ann in default" in page.text
    assert "2 runs from queue default" in page.text
    submit(client, page)
    assert queues() == {"a": "night", "b": "night", "c": "default"}


def test_a_stale_page_moves_nothing(project: Project, ann: User, mia: User, night: Queue, as_user: SignIn) -> None:
    run = make_run(project, ann, "a")
    opened = open_form(as_user(ann), f"{PAGE}?run={run.pk}.{etag(run)}")
    services.set_priority(run, mia, "manager", 20)
    assert opened.send().status_code == 412
    assert queues() == {"a": "default"}


def test_the_queue_and_the_run_page_lead_there_where_there_is_another_queue(
    project: Project, ann: User, as_user: SignIn
) -> None:
    run = make_run(project, ann, "a")
    client = as_user(ann)
    for path in ("/p/main/queue/", "/p/main/runs/a/"):
        assert "o another queue…" not in client.get(path).content.decode()
        assert "To queue…" not in client.get(path).content.decode()
    services.ensure_queue(project, "night")
    page = client.get("/p/main/queue/").content.decode()
    assert 'data-do="queue"' in page
    assert 'value="queue"' in page
    assert f"{PAGE}?run={run.pk}." in client.get("/p/main/runs/a/").content.decode()
    assert client.get(PAGE)["Location"] == "/p/main/queue/"
