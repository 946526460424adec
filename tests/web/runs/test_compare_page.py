"""The page that compares two runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.lib.text import without_escapes
from dstackweb.runs import attempts, logs, services
from dstackweb.runs.models import Job
from dstackweb.web.runs.compare_views import LOG_BYTES
from tests.factories import make_host, make_project, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]
PAGE = "/p/main/compare/"


def found(client: Client, *runs: object, page: str = PAGE) -> str:
    answer = client.get(page, {"run": [str(run) for run in runs]})
    assert answer.status_code == 200
    return " ".join(answer.content.decode().split())


def test_settings_that_differ_are_apart_from_those_that_are_the_same(
    project: Project, ann: User, as_user: SignIn
) -> None:
    left = make_run(project, ann, "a", commands=["prepare", "train 1"], priority=60)
    right = make_run(project, ann, "b", commands=["prepare", "train <2>"])
    page = found(as_user(ann), right.uid, left.uid)
    different, _summary, equal = page.partition('<details class="dw-equal">')
    assert "- train 1</del>" in different
    assert "+ train &lt;2&gt;</ins>" in different
    assert '<th scope="row">priority</th><td class="mono">60</td><td class="mono">50</td>' in different
    assert '<th scope="row">queue</th>' not in different
    assert '<th scope="row">queue</th>' in equal
    assert page.index(f"/runs/{left.uid}/") < page.index(f"/runs/{right.uid}/")


def test_times_outcomes_and_the_ends_of_the_logs_are_side_by_side(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run, waits = make_run(project, ann, "a"), make_run(project, ann, "b", resources={"cpu": 999})
    place_all()
    job = start(placed_job(run))
    logs.append_log(job.pk, 0, b"".join(b"line %d\n" % number for number in range(100)) + b"\x1b[31m<red>\x1b[0m\n")
    services.stop(waits, ann, "member")
    page = found(as_user(ann), run.uid, waits.uid)
    assert "line 99 &lt;red&gt;" in page
    assert "line 50 " not in page
    assert "No output." in page
    assert "Stopped by a member." in page
    assert '<tr class="differs"><th scope="row">Ran</th>' in page


def test_very_long_lines_show_their_end(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run = make_run(project, ann, "a")
    place_all()
    logs.append_log(start(placed_job(run)).pk, 0, b"first" + b"x" * 3 * LOG_BYTES + b"last\n")
    page = found(as_user(ann), run.uid, make_run(project, ann, "b").uid)
    assert "xlast" in page
    assert "firstx" not in page


def test_the_log_of_the_node_that_failed_is_shown(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    left, right = make_run(project, ann, "left"), make_run(project, ann, "right", nodes=2)
    place_all()
    for node in (0, 1):
        job = start(placed_job(right, node))
        logs.append_log(job.pk, 0, b"this is node %d" % node)
    attempts.end_job(job.pk, "container_exited_with_error", exit_code=3)
    page = found(as_user(ann), left.uid, right.uid)
    assert "this is node 1" in page
    assert "this is node 0" not in page
    assert page.count(">node 1<") == 1


def test_a_run_alone_is_compared_with_the_one_before_of_its_name(project: Project, ann: User, as_user: SignIn) -> None:
    old = make_run(project, ann, "again")
    services.stop(old, ann, "member")
    new = make_run(project, ann, "again")
    client = as_user(ann)
    page = found(client, new.uid)
    assert f"/runs/{old.uid}/" in page
    assert f'value="{old.uid}" selected' in page
    assert "Choose a second run." in found(client, old.uid)
    assert "Settings that differ" not in found(client)
    assert "these two are compared" in found(client, new.uid, old.uid, "third")


def test_a_removed_log_says_so_and_the_rest_is_compared(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run, other = make_run(project, ann, "a"), make_run(project, ann, "b", resources={"cpu": 999})
    place_all()
    Job.objects.update(log_removed_at=run.submitted_at)
    page = found(as_user(ann), run.uid, other.uid)
    assert "was removed on" in page
    assert "Settings that differ" in page


def test_runs_of_other_projects_and_unknown_ones_are_not_found(project: Project, ann: User, as_user: SignIn) -> None:
    other = make_run(make_project("other"), make_user("eve"), "secret")
    client, mine = as_user(ann), make_run(project, ann, "a")
    for names in ([mine.uid, other.uid], [other.uid], ["nope", mine.uid]):
        assert client.get(PAGE, {"run": [str(name) for name in names]}).status_code == 404


def test_two_runs_are_chosen_in_the_list_and_one_on_its_page(project: Project, ann: User, as_user: SignIn) -> None:
    run, client = make_run(project, ann, "a"), as_user(ann)
    listed = " ".join(client.get("/p/main/runs/").content.decode().split())
    assert f'<form id="compare" action="{PAGE}">' in listed
    assert f'type="checkbox" name="run" value="{run.uid}" form="compare" aria-label="Compare a"' in listed
    assert f'href="{PAGE}?run={run.uid}"' in client.get("/p/main/runs/a/").content.decode()


@pytest.mark.parametrize(
    ("log", "shown"),
    [("\x1b[1;31mred\x1b[0m\n", "red\n"), ("10%\r20%\r\n", "20%\n"), ("a\x1b]0;title\x07b", "ab"), ("50%\r", "50%")],
)
def test_a_log_is_shown_as_a_terminal_shows_it(log: str, shown: str) -> None:
    assert without_escapes(log) == shown
