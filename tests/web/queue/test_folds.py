"""A sweep's waiting runs are one line of the queue page, which moves and changes all of them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, SavedView, User
from dstackweb.runs.models import Run, Sweep
from dstackweb.runs.queue.queues import create_queue
from dstackweb.runs.recount import differences
from tests.factories import join, make_run, make_user
from tests.forms import submit
from tests.runs.sweeps.test_sweeps import fresh, make_sweep
from tests.web.conftest import HTMX
from tests.web.queue.rows import QUEUE, act

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]


@pytest.fixture
def browser(ann: User, as_user: SignIn) -> Client:
    return as_user(ann)


@pytest.fixture
def sweep(project: Project, ann: User) -> Sweep:
    make_run(project, ann, "first")
    made = make_sweep(project, ann, 500)
    make_run(project, ann, "last")
    return made


def shown(browser: Client, query: str = "") -> str:
    return str(browser.get(f"/p/main/queue/{query}").content.decode())


def lines(page: str) -> list[tuple[str, str]]:
    """The position and the name of each line."""
    waiting = page[page.index('<tbody id="waiting"') : page.index("</tbody>", page.index('<tbody id="waiting"'))]
    return re.findall(r'class="pos">(\d+)</td>.*?<a id="n[^"]*"[^>]*>([^<]+)</a>', waiting, re.S)


def do(browser: Client, verb: str, *rows: Run | str, query: str = "", **values: str) -> str:
    answer = act(browser, *rows, page=QUEUE + query, do=verb, **values)
    assert answer.status_code == 200, answer.content
    return str(answer.headers["HX-Trigger"])


def key(sweep: Sweep) -> str:
    return f"s{sweep.pk}p{sweep.priority}"


def test_a_sweep_is_one_line_with_its_bar_and_opens_on_demand(project: Project, sweep: Sweep, browser: Client) -> None:
    page = shown(browser)
    assert lines(page) == [("1", "first"), ("2", "lr"), ("102", "last")]
    assert f'id="run-{key(sweep)}"' in page
    assert "100 waiting · 400 to come" in page
    assert "Show 100 runs" in page
    assert f'href="/p/main/sweeps/{sweep.uid}/"' in page
    opened = lines(shown(browser, f"?expand={sweep.pk}"))
    assert opened[:3] == [("1", "first"), ("2", "lr-0"), ("3", "lr-1")]
    assert len(opened) == 25
    assert "Fold lr" in shown(browser, f"?expand={sweep.pk}")
    folded = re.search(r'href="([^"]*)">\s*Fold lr', shown(browser, f"?expand={sweep.pk}"))
    assert folded is not None
    assert folded[1] == "/p/main/queue/?view=all", "not to the reader's default view"
    assert lines(shown(browser, "?expand=all&page=5"))[-1] == ("102", "last")


def test_pages_count_lines(project: Project, ann: User, sweep: Sweep, browser: Client) -> None:
    for number in range(30):
        make_run(project, ann, f"more-{number}")
    page = shown(browser, "?page=2")
    assert lines(page)[0] == ("125", "more-22")
    assert "26–33 of 33" in page


def test_filters_and_groups_fold_but_a_search_by_name_finds_single_runs(
    project: Project, sweep: Sweep, browser: Client, ann: User
) -> None:
    page = shown(browser, f"?member={ann}")
    assert lines(page) == [("1", "first"), ("2", "lr"), ("102", "last")]
    assert "102 of 102 runs shown." in page
    grouped = shown(browser, "?group=member")
    assert lines(grouped) == [("1", "first"), ("2", "lr"), ("102", "last")]
    assert f"{ann}: 102 runs" in grouped
    assert lines(shown(browser, "?q=lr-9"))[:2] == [("11", "lr-9"), ("92", "lr-90")]
    assert lines(shown(browser, f"?group=member&expand={sweep.pk}"))[1] == ("2", "lr-0")


def test_a_line_moves_with_all_its_runs_and_back(project: Project, sweep: Sweep, browser: Client) -> None:
    preview = browser.get(
        "/p/main/queues/default/preview/",
        {"do": "before", "anchor": str(Run.objects.get(name="first").pk), "run": key(sweep)},
    ).json()
    assert preview["places"][key(sweep)] == 1
    do(browser, "top", key(sweep))
    page = shown(browser)
    assert lines(page) == [("1", "lr"), ("101", "first"), ("102", "last")]
    moved = Run.objects.get(name="lr-0")
    assert moved.moved_at is not None
    token = re.search(rf'id="run-(s{sweep.pk}m\d+)"', page)
    assert token is not None
    do(browser, "down", token[1])
    assert lines(shown(browser)) == [("1", "first"), ("2", "lr"), ("102", "last")]
    assert list(differences()) == []


def test_a_run_passes_a_whole_line(project: Project, sweep: Sweep, browser: Client) -> None:
    last = Run.objects.get(name="last")
    do(browser, "up", last)
    assert lines(shown(browser)) == [("1", "first"), ("2", "last"), ("3", "lr")]
    do(browser, "after", last, anchor=key(sweep))
    assert lines(shown(browser))[-1] == ("102", "last")
    do(browser, "before", last, name="lr")
    assert lines(shown(browser))[1] == ("2", "last")
    opened = f"?expand={sweep.pk}"
    do(browser, "down", last, query=opened)
    assert lines(shown(browser, opened))[1:3] == [("2", "lr-0"), ("3", "last")]


def test_the_priority_of_a_line_is_that_of_the_sweep(project: Project, sweep: Sweep, browser: Client) -> None:
    assert "Priority of all runs of lr set to 70" in do(browser, "priority", key(sweep), priority="70")
    assert fresh(sweep).priority == 70
    assert set(Run.objects.filter(sweep=sweep).values_list("priority", flat=True)) == {70}
    both = (key(fresh(sweep)), Run.objects.get(name="last"))
    assert "Priority of 101 runs set to 20" in do(browser, "priority", *both, priority="20")
    assert list(differences()) == []


def test_stopping_a_line_stops_the_sweep_and_says_so_before(project: Project, sweep: Sweep, browser: Client) -> None:
    assert 'data-stop="100 active runs are stopped, 400 never start."' in shown(browser)
    do(browser, "stop", key(sweep))
    assert fresh(sweep).ended_at is not None
    assert lines(shown(browser)) == [("1", "first"), ("2", "last")]


def test_others_may_not_change_a_line(project: Project, sweep: Sweep, as_user: SignIn) -> None:
    """No page sends it for them."""
    eve = make_user("eve")
    join(project, eve, "member")
    other = as_user(eve)
    assert f'value="{key(sweep)}"' not in shown(other)
    for verb in ("stop", "priority", "top"):
        answer = other.post(
            "/p/main/queues/default/change/", {"do": verb, "run": key(sweep), "priority": "10"}, headers=HTMX
        )
        assert answer.status_code == 403
    assert fresh(sweep).priority == 50


def test_a_line_moves_to_another_queue(project: Project, ann: User, sweep: Sweep, browser: Client) -> None:
    create_queue(project, ann, "manager", "night")
    page = browser.get("/p/main/queues/default/transfer/", {"run": key(sweep), "to": "night"})
    assert f'name="run" value="{key(sweep)}"' in page.text
    submit(browser, page)
    assert Run.objects.filter(sweep=sweep, queue__name="night").count() == 100
    assert lines(str(browser.get("/p/main/queues/night/").content.decode())) == [("1", "lr")]


def test_a_saved_view_has_no_opened_sweeps(project: Project, sweep: Sweep, browser: Client) -> None:
    submit(browser, f"{QUEUE}?member=ann&expand={sweep.pk}", {"name": "mine"})
    assert SavedView.objects.get().query == "member=ann"


@pytest.mark.parametrize("expand", ["x", "-1", "9" * 40, "٣", "1,2"])
def test_any_text_may_be_in_the_address(project: Project, sweep: Sweep, browser: Client, expand: str) -> None:
    assert len(lines(shown(browser, f"?expand={expand}"))) == 3
