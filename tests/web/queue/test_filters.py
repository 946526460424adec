"""The queue page shows what many runs wait for, and only the runs that a reader looks for."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.runs.queue import search
from dstackweb.web.queue import views
from tests.factories import join, make_host, make_run, make_user, place_all
from tests.web.conftest import HTMX

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]
SignIn = Callable[[User], Client]
QUEUE = "/p/main/queue/"


def rows(page: str) -> list[tuple[str, str]]:
    """Position and name of each waiting run that is shown."""
    return re.findall(r'<td class="pos">(\d+)</td>.*?/runs/([\w-]+)/"', page)


def chips(page: str) -> dict[str, str]:
    """The groups' addresses by their text."""
    part = page.partition('aria-label="Reasons that many runs share"')[2].partition("</nav>")[0]
    links = re.findall(r'<a href="([^"]*)"[^>]*>(.*?)</a>', part)
    return {text: address.replace("&amp;", "&") for address, text in links}


@pytest.fixture
def busy(project: Project, ann: User, mia: User) -> None:
    """Four runs wait for 2 CPUs, three can never start, and one waits for a GPU."""
    make_host("box-1", cpus=2, gpus=1)
    make_run(project, ann, "holder", resources={"cpu": 2, "gpu": 1})
    place_all()
    for number in range(4):
        make_run(project, mia if number else ann, f"train-{number}", priority=50 + number, resources={"cpu": 2})
    for number in range(3):
        make_run(project, ann, f"large-{number}", resources={"gpu": 9})
    make_run(project, ann, "eval-1", resources={"cpu": 1, "gpu": 1})
    place_all()


@pytest.mark.usefixtures("busy")
def test_what_many_runs_wait_for_is_said_once_with_their_number_and_leads_to_them(ann: User, as_user: SignIn) -> None:
    client = as_user(ann)
    found = chips(client.get(QUEUE).text)
    assert list(found) == ["4 runs wait for 2 CPUs", "3 runs with 9 GPUs cannot start"]
    page = client.get(found["4 runs wait for 2 CPUs"]).text
    assert rows(page) == [("1", "train-3"), ("2", "train-2"), ("3", "train-1"), ("4", "train-0")]
    assert "4 of 8 runs shown." in page
    page = client.get(found["3 runs with 9 GPUs cannot start"]).text
    assert rows(page) == [("5", "large-0"), ("6", "large-1"), ("7", "large-2")]
    assert 'aria-current="true"' in page


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("q=TRAIN-1", ["train-1"]),
        ("q=l_1", []),
        ("q=l-1", ["eval-1"]),
        ("q=%25", []),
        ("member=mia", ["train-3", "train-2", "train-1"]),
        ("member=nobody", []),
        ("priority=52", ["train-3", "train-2"]),
        ("needs=1+GPU", ["eval-1"]),
        ("reason=impossible", ["large-0", "large-1", "large-2"]),
        ("reason=no_such_reason", []),
        ("reason=waiting_for_capacity&member=ann", ["train-0", "eval-1"]),
    ],
)
def test_only_the_runs_that_match_are_shown_in_true_order(
    ann: User, as_user: SignIn, query: str, names: list[str]
) -> None:
    page = as_user(ann).get(f"{QUEUE}?{query}").text
    assert [name for _position, name in rows(page)] == names
    assert ("No waiting run matches." in page) == (not names)


@pytest.mark.usefixtures("busy")
def test_a_filtered_list_has_no_handles_and_its_moves_count_all_runs(
    project: Project, mia: User, as_user: SignIn
) -> None:
    client = as_user(mia)
    assert 'class="grip"' in client.get(QUEUE).text
    page = client.get(f"{QUEUE}?q=large").text
    assert 'class="grip"' not in page
    assert "to drag rows, show all" in page
    run = project.runs.get(name="large-2")
    answer = client.post("/p/main/queues/default/change/?q=large&page=1", {"run": run.pk, "do": "top"}, headers=HTMX)
    assert rows(answer.text) == [("1", "large-2"), ("6", "large-0"), ("7", "large-1")]


@pytest.mark.usefixtures("busy")
def test_a_poll_of_a_filtered_list_keeps_the_filter(ann: User, as_user: SignIn) -> None:
    answer = as_user(ann).get(f"{QUEUE}?q=large", headers=HTMX)
    assert [name for _position, name in rows(answer.text)] == ["large-0", "large-1", "large-2"]


def test_pages_of_a_filtered_list_keep_the_filter(project: Project, ann: User, as_user: SignIn) -> None:
    for number in range(42):
        make_run(project, ann, f"sweep-{number}")
        make_run(project, ann, f"other-{number}")
    client = as_user(ann)
    page = client.get(f"{QUEUE}?q=sweep").text
    assert "1–40 of 42" in page
    assert 'href="?q=sweep&amp;page=2"' in page
    page = client.get(f"{QUEUE}?q=sweep&page=9").text
    assert rows(page) == [("81", "sweep-40"), ("83", "sweep-41")]
    assert "41–42 of 42" in page


def test_a_long_queue_says_how_much_of_it_is_counted(
    project: Project, ann: User, as_user: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (search, views):
        monkeypatch.setattr(module, "FRONT", 3)
    make_host("box-1", cpus=1)
    for number in range(5):
        make_run(project, ann, f"large-{number}", resources={"cpu": 2})
    place_all()
    page = as_user(ann).get(QUEUE).text
    assert list(chips(page)) == ["3 runs with 2 CPUs cannot start"]
    assert "Counts and filters cover the first 3 runs." in page


def test_without_scripts_an_action_returns_to_the_filtered_page(project: Project, ann: User, as_user: SignIn) -> None:
    run = make_run(project, ann, "one")
    answer = as_user(ann).post("/p/main/queues/default/change/?q=on&page=1", {"raise": run.pk})
    assert answer["Location"] == "/p/main/queue/?q=on"


def test_viewers_have_the_menu_and_no_moves(project: Project, ann: User, as_user: SignIn) -> None:
    make_run(project, ann, "one")
    page = as_user(join(project, make_user("vic"), "viewer")).get(QUEUE).text
    menu = page.partition('id="move-menu"')[2]
    assert "Copy link" in menu
    assert "data-change" not in menu
    assert 'data-do="stop"' in as_user(ann).get(QUEUE).text
