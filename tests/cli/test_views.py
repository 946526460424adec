"""dstackweb view: filters of queues under a name, and a queue seen through one."""

from __future__ import annotations

import json

from dstackweb.accounts import saved_views
from dstackweb.accounts.models import Project, SavedView, User
from tests.cli.conftest import Cli
from tests.factories import join, make_run, make_user


def test_a_view_is_saved_listed_renamed_made_default_and_removed(cli: Cli, project: Project, ada: User) -> None:
    assert "No views" in cli("view", "list").stderr
    assert cli.ok("view", "save", "sweeps", "--search", "sweep", "--group", "reason") == "View sweeps saved\n"
    assert cli.ok("view", "rename", "sweeps", "lr") == "View sweeps renamed to lr\n"
    assert cli.ok("view", "default", "lr") == "The queue opens with lr\n"
    assert cli.ok("view", "list").splitlines()[1].split() == ["lr", "q=sweep&group=reason", "default"]
    assert cli.ok("view", "default", "lr", "--off") == "The queue no longer opens with lr\n"
    assert [view["default"] for view in json.loads(cli.ok("view", "list", "--json"))["items"]] == [False]
    assert cli.ok("view", "remove", "lr") == "View lr deleted\n"
    assert not SavedView.objects.exists()
    assert cli("view", "save", "empty").exit_code == 2
    assert cli("view", "remove", "lr").exit_code == 1


def test_a_view_can_be_of_what_runs_need(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "small", resources={"cpu": 1})
    make_run(project, ada, "large", resources={"gpu": "A100:2"})
    cli.ok("view", "save", "large", "--needs", "2xA100")
    items = json.loads(cli.ok("queue", "--view", "large", "--json"))["items"]
    assert [item["name"] for item in items] == ["large"]


def test_ones_own_view_is_meant_before_a_shared_one(cli: Cli, project: Project, ada: User) -> None:
    saved_views.save(project, None, "same", "q=eval")
    own = saved_views.save(project, ada, "same", "q=sweep")
    make_run(project, join(project, make_user("bob")), "sweep-1")
    make_run(project, ada, "eval-1")
    assert cli.ok("view", "list", "-q") == "same\nsame\n"
    assert [run["name"] for run in json.loads(cli.ok("queue", "--view", "same", "--json"))["items"]] == ["sweep-1"]
    assert "eval-1" not in cli.ok("queue", "--view", "same")
    cli.ok("view", "remove", "same")
    assert not SavedView.objects.filter(pk=own.pk).exists()
    assert "eval-1" in cli.ok("queue", "--view", "same")
    assert cli("view", "remove", "same", "--shared").exit_code == 1, "only managers"
    assert cli("queue", "--view", "same", "--pause").exit_code == 2
    assert cli("queue", "--view", "none").exit_code == 1
