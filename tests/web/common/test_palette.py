"""The command palette offers runs by name, and to a command only those that the reader may change by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.runs import services
from tests.factories import join, make_host, make_run, make_user, place_all

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]
SignIn = Callable[[User], Client]


def found(client: Client, query: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = client.get(f"/p/main/palette/runs/?{query}").json()["runs"]
    return runs


def names(client: Client, query: str) -> list[str]:
    return [run["name"] for run in found(client, query)]


@pytest.fixture
def three(project: Project, ann: User, mia: User) -> None:
    """One that runs, one that waits, and one that ended."""
    make_host(gpus=1)
    make_run(project, ann, "train-1", resources={"gpu": 1})
    place_all()
    make_run(project, mia, "train-2", resources={"gpu": 1})
    services.stop(make_run(project, ann, "train-3", resources={"gpu": 1}), mia, "manager")


@pytest.mark.usefixtures("three")
def test_each_command_offers_the_runs_that_it_can_change(ann: User, mia: User, as_user: SignIn) -> None:
    member, manager = as_user(ann), as_user(mia)
    assert names(member, "q=TRAIN") == ["train-3", "train-2", "train-1"]
    assert names(member, "q=train-1&verb=again") == ["train-1"]
    assert names(member, "q=&verb=why") == ["train-2"]
    for verb in ("stop", "priority"):
        assert names(member, f"q=train&verb={verb}") == ["train-1"]
        assert names(manager, f"q=train&verb={verb}") == ["train-2", "train-1"]
    assert names(member, "q=nothing") == []


@pytest.mark.usefixtures("three")
def test_a_run_is_offered_with_its_status_and_the_question_before_it_is_stopped(ann: User, as_user: SignIn) -> None:
    _ended, waiting, starting = found(as_user(ann), "q=train")
    assert waiting["about"] == "submitted · mia · 1 GPU"
    assert (waiting["question"], waiting["yes"]) == ("Cancel train-2? It will be marked terminated.", "Cancel run")
    assert starting["question"] == "Stop train-1? Its processes can exit first."
    assert starting["priority"] == 50


def test_at_most_eight_runs_are_offered_the_newest_first(project: Project, ann: User, as_user: SignIn) -> None:
    for number in range(9):
        make_run(project, ann, f"sweep-{number}")
    assert names(as_user(ann), "q=sweep") == [f"sweep-{number}" for number in range(8, 0, -1)]


def test_commands_that_change_runs_are_offered_to_members(project: Project, ann: User, as_user: SignIn) -> None:
    page = as_user(ann).get("/p/main/palette/").text
    assert all(f'data-verb="{verb}"' in page for verb in ("why", "stop", "priority", "again"))
    assert "Undo the last change" in page
    viewer = as_user(join(project, make_user("vic"), "viewer")).get("/p/main/palette/").text
    assert 'data-verb="why"' in viewer
    assert 'data-verb="stop"' not in viewer


def test_pages_of_a_project_say_where_the_palette_is(project: Project, ann: User, as_user: SignIn) -> None:
    assert 'data-palette="/p/main/palette/"' in as_user(ann).get("/account/tokens/").text
