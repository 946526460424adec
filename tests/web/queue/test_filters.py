"""The queue page shows what many runs wait for, and only the runs that a reader looks for."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.runs.queue import listing
from dstackweb.web.queue import views
from tests.factories import join, make_host, make_run, make_user, place_all
from tests.forms import submit
from tests.web.conftest import HTMX
from tests.web.queue.rows import QUEUE, act

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]
SignIn = Callable[[User], Client]


def rows(page: str) -> list[tuple[str, str]]:
    """Position and name of each waiting run that is shown."""
    return re.findall(r'<td class="pos">(\d+)</td>.*?/runs/([\w-]+)/"', page)


def chips(page: str) -> dict[str, str]:
    """The groups' addresses by their text."""
    part = page.partition('aria-label="Reasons that many runs share"')[2].partition("</nav>")[0]
    links = re.findall(r'<a href="([^"]*)"[^>]*>(.*?)</a>', part)
    return {text: address.replace("&amp;", "&") for address, text in links}


def options(page: str, name: str) -> list[tuple[str, bool]]:
    """What a list of the form offers, and whether it is chosen."""
    fields = page.partition(f'name="{name}"')[2].partition("</select>")[0]
    return [(text, "selected" in marks) for marks, text in re.findall(r"<option([^>]*)>(.*?)</option>", fields)]


def chosen(page: str) -> dict[str, list[str]]:
    names = ("member", "needs", "reason", "group")
    return {name: [text for text, is_chosen in options(page, name) if is_chosen] for name in names}


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
def test_an_address_shows_the_same_runs_in_every_language(ann: User, as_user: SignIn) -> None:
    client = as_user(ann)
    chinese = {"accept-language": "zh-hans"}
    page = client.get(QUEUE, headers=chinese).text
    assert '<option value="2xCPU"' in page
    address = re.search(r'href="([^"]*needs=2xCPU[^"]*)"[^>]*>([^<]*)</a>', page)
    assert address
    assert "CPU" in address[2]
    assert "wait" not in address[2]
    for headers in ({}, chinese):
        shown = client.get(address[1].replace("&amp;", "&"), headers=headers).text
        assert [name for _position, name in rows(shown)] == ["train-3", "train-2", "train-1", "train-0"]


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
        ("needs=1xGPU", ["eval-1"]),
        ("needs=1+GPU", []),
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
    assert "To drag rows, clear filters" in page
    run = project.runs.get(name="large-2")
    answer = act(client, run, page=f"{QUEUE}?q=large", do="top")
    assert rows(answer.text) == [("1", "large-2"), ("6", "large-0"), ("7", "large-1")]


@pytest.mark.usefixtures("busy")
def test_the_form_offers_what_waits_and_shows_what_is_chosen(ann: User, as_user: SignIn) -> None:
    client = as_user(ann)
    offered = {
        "member": ["All members", "ann", "mia"],
        "needs": ["Any needs", "2 CPUs", "9 GPUs", "1 GPU"],
        "reason": ["Any reason", "capacity", "can never start"],
        "group": ["No groups", "By reason", "By member"],
    }
    page = client.get(QUEUE).text
    assert {name: [text for text, _chosen in options(page, name)] for name in offered} == offered
    assert chosen(page) == {name: texts[:1] for name, texts in offered.items()}
    page = client.get(f"{QUEUE}?q=l&member=zoe&needs=2xCPU&reason=impossible&priority=7&group=member").text
    assert chosen(page) == {
        "member": ["zoe"],
        "needs": ["2 CPUs"],
        "reason": ["can never start"],
        "group": ["By member"],
    }
    assert re.search(r'name="q"\s+value="l"', page)
    assert re.search(r'name="priority"[^>]*value="7"', page)
    assert f'<a class="btn btn-sm" href="{QUEUE}?view=all">Clear</a>' in page


def test_the_most_frequent_needs_are_offered_first_however_the_database_answers(
    project: Project, ann: User, as_user: SignIn
) -> None:
    make_run(project, ann, "eval-1", resources={"gpu": 1})
    for number in range(2):
        make_run(project, ann, f"train-{number}", resources={"cpu": 2})
    place_all()
    page = as_user(ann).get(QUEUE).text
    assert [text for text, _chosen in options(page, "needs")] == ["Any needs", "2 CPUs", "1 GPU"]


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(
    ("query", "shown"),
    [
        (
            "group=reason",
            [
                "4 runs wait for 2 CPUs",
                *("train-3", "train-2", "train-1", "train-0"),
                "3 runs with 9 GPUs cannot start",
                *("large-0", "large-1", "large-2"),
                "1 run waits for 1 GPU",
                "eval-1",
            ],
        ),
        (
            "group=member&q=a",
            [
                *("ann: 5 runs", "train-0", "large-0", "large-1", "large-2", "eval-1"),
                *("mia: 3 runs", "train-3", "train-2", "train-1"),
            ],
        ),
        ("group=colour", ["train-3", "train-2", "train-1", "train-0", "large-0", "large-1", "large-2", "eval-1"]),
    ],
)
def test_runs_are_grouped_largest_group_first_with_its_number(
    ann: User, as_user: SignIn, query: str, shown: list[str]
) -> None:
    page = as_user(ann).get(f"{QUEUE}?{query}").text
    found = re.findall(r'scope="rowgroup">(.*?)</th>|/runs/([\w-]+)/">', page.partition('id="waiting"')[2])
    assert [heading or name for heading, name in found][: len(shown)] == shown
    assert ("runs shown" in page) == ("q=" in query)


def test_a_group_that_goes_on_has_its_heading_on_the_next_page(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    for number in range(28):
        make_run(project, ann, f"a-{number}")
        make_run(project, mia, f"m-{number}")
    page = as_user(ann).get(f"{QUEUE}?group=member&page=2").text
    assert re.findall(r'scope="rowgroup">(.*?)</th>', page) == ["ann: 28 runs", "mia: 28 runs"]
    assert rows(page)[:4] == [("51", "a-25"), ("53", "a-26"), ("55", "a-27"), ("2", "m-0")]
    assert 'href="?group=member&amp;page=3"' in page


def heads(page: str) -> list[str]:
    """The headings of the columns beside position and actions."""
    head = page.partition("<thead>")[2].partition("</thead>")[0]
    texts = re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', head)
    return [text.strip() for text in texts if text.strip() not in ("", "#")]


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("", ["Run and wait reason", "Priority", "Needs", "Waiting", "Starts"]),
        ("?columns=nonsense", ["Run and wait reason", "Priority", "Needs", "Waiting", "Starts"]),
        ("?columns=name", ["Run"]),
        ("?columns=submitted&columns=needs&columns=name", ["Run", "Needs", "Submitted"]),
        ("?columns=reason&columns=starts", ["Run and wait reason", "Starts"]),
    ],
)
def test_the_columns_are_those_that_are_chosen(ann: User, as_user: SignIn, query: str, shown: list[str]) -> None:
    page = as_user(ann).get(QUEUE + query).text
    assert heads(page) == shown
    cells = page.partition('id="waiting"')[2].partition("</tr>")[0]
    assert cells.count("<td") == len(shown) + 3
    assert ('class="why' in cells) == ("reason" in shown[0])
    assert ("train-3" in cells, 'class="grip"' in cells) == (True, False)  # mia's; ann's rows have handles
    assert 'class="grip"' in page
    ticked = re.findall(r'value="(\w+)"\s+checked', page.partition("dw-columns")[2].partition("</details>")[0])
    assert len(ticked) == len(shown) - ("reason" not in shown[0])


@pytest.mark.usefixtures("busy")
def test_chosen_columns_stay_while_runs_are_filtered_and_what_is_usual_is_not_in_the_address(
    ann: User, as_user: SignIn
) -> None:
    client = as_user(ann)
    page = client.get(f"{QUEUE}?columns=name&columns=needs&group=member").text
    assert heads(page) == ["Run", "Needs"]
    assert '<th colspan="5" scope="rowgroup">' in page
    assert f'<a class="btn btn-sm" href="{QUEUE}?columns=name&amp;columns=needs">Clear</a>' in page
    addresses = list(chips(page).values())
    assert addresses
    assert all("columns=name&columns=needs" in address for address in addresses)
    every = "&".join(f"columns={name}" for name in ("name", "reason", "priority", "needs", "waiting", "starts"))
    page = client.get(f"{QUEUE}?{every}&q=large").text
    assert "columns=" not in page.partition('id="queue"')[2].partition(">")[2]


@pytest.mark.usefixtures("busy")
def test_a_poll_of_a_filtered_list_keeps_the_filter(ann: User, as_user: SignIn) -> None:
    answer = as_user(ann).get(f"{QUEUE}?q=large", headers=HTMX)
    assert [name for _position, name in rows(answer.text)] == ["large-0", "large-1", "large-2"]


def test_pages_of_a_filtered_list_keep_the_filter(project: Project, ann: User, as_user: SignIn) -> None:
    for number in range(27):
        make_run(project, ann, f"sweep-{number}")
        make_run(project, ann, f"other-{number}")
    client = as_user(ann)
    page = client.get(f"{QUEUE}?q=sweep").text
    assert "1–25 of 27" in page
    assert 'href="?q=sweep&amp;page=2"' in page
    page = client.get(f"{QUEUE}?q=sweep&page=9").text
    assert rows(page) == [("51", "sweep-25"), ("53", "sweep-26")]
    assert "26–27 of 27" in page


def test_a_long_queue_says_how_much_of_it_is_counted(
    project: Project, ann: User, as_user: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (listing, views):
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
    answer = submit(as_user(ann), f"{QUEUE}?q=on", having="run", button=f"raise={run.pk}", scripts=False)
    assert answer["Location"] == "/p/main/queue/?q=on"


def test_viewers_have_the_menu_and_no_moves(project: Project, ann: User, as_user: SignIn) -> None:
    make_run(project, ann, "one")
    page = as_user(join(project, make_user("vic"), "viewer")).get(QUEUE).text
    menu = page.partition('id="move-menu"')[2]
    assert "Copy link" in menu
    assert "data-change" not in menu
    assert 'data-do="stop"' in as_user(ann).get(QUEUE).text
