"""Sweeps on pages: one line with a bar above lists, and a page with parameters and outcomes."""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.runs.models import Run, Sweep
from tests.factories import join, make_host, make_run, make_user, place_all
from tests.forms import submit
from tests.runs.sweeps.test_sweeps import end, fresh, settle
from tests.web.conftest import HTMX
from tests.web.runs.actions import show_plan, submit_file

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]
FILE = """type: task
name: lr
commands: [python train.py]
array:
  matrix: {LR: [0.1, 0.01], SEED: [1, 2]}
  max_parallel: 2
"""


@pytest.fixture
def browser(ann: User, as_user: SignIn) -> Client:
    return as_user(ann)


@pytest.fixture
def sweep(project: Project, browser: Client) -> Sweep:
    answer = submit_file(browser, FILE, scripts=False)
    assert answer["Location"] == "/p/main/sweeps/lr/"
    return Sweep.objects.get()


def press(browser: Client, action: str, scripts: bool = True, **changes: str) -> Any:
    """Press the button of the sweep's page that stops, retries or releases it, or sets the priority of its runs."""
    return submit(browser, "/p/main/sweeps/lr/", changes, to=f"/{action}/", scripts=scripts)


def read(browser: Client, path: str) -> str:
    answer = browser.get(f"/p/main/{path}")
    assert answer.status_code == 200
    return str(answer.content.decode())


def test_the_plan_says_how_many_runs_a_file_makes(project: Project, browser: Client) -> None:
    make_host()
    plan = show_plan(browser, FILE, scripts=False).content.decode()
    assert "Sweep of 4 runs, at most 2 at once." in plan


def test_a_sweep_shows_its_runs_with_parameters_and_outcome(sweep: Sweep, browser: Client) -> None:
    make_host()
    place_all()
    end("lr-0", code=1)
    settle()
    page = read(browser, "sweeps/lr/")
    assert "1 running · 1 waiting · 1 failed · 1 to come" in page
    assert ">LR</th>" in page
    row = page[page.index('id="index-0"') : page.index('id="index-1"')]
    assert all(text in row for text in (">0.1</td>", ">1</td>", "st-failed", "Exit code 1."))
    assert "to come" in page[page.index('id="index-3"') :]
    failed = read(browser, "sweeps/lr/?status=failed")
    assert 'id="index-0"' in failed
    assert 'id="index-1"' not in failed
    assert 'id="index-2"' in read(browser, "sweeps/lr/?from=2")
    assert 'id="index-1"' not in read(browser, "sweeps/lr/?from=2")
    assert "sweep lr" in read(browser, f"runs/{Run.objects.get(name='lr-1').uid}/")


def test_an_active_sweep_is_one_line_above_the_queue_and_the_runs(sweep: Sweep, browser: Client) -> None:
    for path in ("queue/", "runs/", "sweeps/"):
        page = read(browser, path)
        assert 'class="dw-bar dw-sweep-bar"' in page
        assert "2 waiting · 2 to come" in page
    press(browser, "stop", scripts=False)
    settle()
    assert "dw-sweep-bar" not in read(browser, "queue/")
    assert "2 terminated · 2 never started" in read(browser, "sweeps/")


def test_a_poll_gets_nothing_until_something_of_the_sweep_changes(sweep: Sweep, browser: Client) -> None:
    version = browser.get("/p/main/sweeps/lr/")["HX-PTag"]
    headers = {**HTMX, "HX-PTag": version}
    assert browser.get("/p/main/sweeps/lr/", headers=headers).status_code == 204
    press(browser, "priority", scripts=False, priority="70")
    poll = browser.get("/p/main/sweeps/lr/", headers=headers)
    assert poll.status_code == 200
    assert 'value="70"' in poll.content.decode()
    assert 'id="sweep-actions"' in poll.content.decode()


def test_buttons_stop_raise_and_retry_the_sweep(sweep: Sweep, browser: Client) -> None:
    make_host()
    assert press(browser, "priority", priority="x").status_code == 422
    assert press(browser, "priority", priority="60").status_code == 204
    assert set(Run.objects.values_list("priority", flat=True)) == {60}
    place_all()
    end("lr-0", code=1)
    settle()
    assert "Retry failed" in read(browser, "sweeps/lr/")
    assert press(browser, "stop").status_code == 204
    assert fresh(sweep).stopped_at is not None
    settle()
    assert press(browser, "retry").status_code == 204
    page = read(browser, "sweeps/lr/")
    assert "Stopped by ann." in page
    assert "Stop sweep" not in page, "it was stopped"


def test_another_member_sees_no_buttons_and_is_refused(sweep: Sweep, project: Project, as_user: SignIn) -> None:
    """No page sends these requests for them."""
    other = as_user(join(project, make_user("bo")))
    page = other.get("/p/main/sweeps/lr/").content.decode()
    assert "sweeps/lr" in page or "lr-0" in page
    assert "Stop sweep" not in page
    assert "Priority of all runs" not in page
    for action in ("stop", "retry", "priority"):
        assert other.post(f"/p/main/sweeps/lr/{action}/", {"priority": "60"}, headers=HTMX).status_code == 403


def test_the_table_is_exported(sweep: Sweep, browser: Client) -> None:
    answer = browser.get("/p/main/sweeps/lr/sweep.csv")
    rows = list(csv.DictReader(answer.getvalue().decode().splitlines()))
    assert [(row["name"], row["LR"], row["SEED"]) for row in rows][1] == ("lr-1", "0.1", "2")
    assert browser.get("/p/main/sweeps/lr/sweep.xls").status_code == 404


def test_a_sweep_says_what_it_waits_for(project: Project, ann: User, browser: Client) -> None:
    make_run(project, ann, "lr-0")
    submit_file(browser, FILE)
    assert "Waits until the other run called lr-0 has ended." in read(browser, "sweeps/lr/")
    assert "No sweeps" not in read(browser, "sweeps/")


def test_without_sweeps_the_list_says_how_to_make_one(project: Project, browser: Client) -> None:
    assert "<code>array</code>" in read(browser, "sweeps/")


def test_a_waiting_sweep_shows_its_graph_and_is_released_from_its_page(project: Project, browser: Client) -> None:
    pipeline = "type: task\nname: prepare\ncommands: [x]\n---\n" + FILE.replace("name: lr", "name: lr\nafter: prepare")
    plan = show_plan(browser, pipeline, scripts=False).content.decode()
    assert "Sweep of 4 runs, at most 2 at once." in plan
    assert "Enters its queue after: prepare is done." in plan
    assert submit_file(browser, pipeline, scripts=False)["Location"] == "/p/main/runs/prepare/"
    page = read(browser, "sweeps/lr/")
    assert page.count("Enters its queue after: prepare is done.") == 1
    assert 'id="run-dependencies"' in page
    assert ">lr</a>" in read(browser, "runs/prepare/"), "the run's graph has what follows it"
    assert "Enters its queue after: prepare is done." in read(browser, "sweeps/")
    released = press(browser, "release")
    assert released.status_code in (200, 204)
    assert Run.objects.filter(sweep__name="lr").count() == 2
    assert "/release/" not in read(browser, "sweeps/lr/")
