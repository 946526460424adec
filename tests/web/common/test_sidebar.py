"""The sidebar: pages in groups that stay as the reader left them, and the projects to switch to."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from tests.factories import join, make_project, make_user

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]


def sidebar(client: Client, path: str) -> str:
    return client.get(path).text.partition("<aside")[2].partition("</aside>")[0]


def open_groups(page: str) -> list[str]:
    return re.findall(r'<details class="dw-group" open>\s*<summary data-group="(\w+)">', page)


def pages(page: str) -> list[str]:
    return re.findall(r'class="nav-link-title">([^<]+)<', page.partition("<nav")[2].partition("</nav>")[0])


def current(page: str) -> list[str]:
    return re.findall(r'href="([^"]+)" aria-current="page"', page)


def test_the_sidebar_has_the_pages_that_the_reader_may_open(project: Project, ann: User, as_user: SignIn) -> None:
    viewer, admin = join(project, make_user("vic"), "viewer"), join(project, make_user("adam"), "admin")
    assert "Members" in pages(sidebar(as_user(viewer), "/p/main/queue/"))
    assert "Secrets" not in pages(sidebar(as_user(viewer), "/p/main/queue/"))
    assert "Secrets" in pages(sidebar(as_user(ann), "/p/main/queue/"))
    assert "Audit log" not in pages(sidebar(as_user(ann), "/p/main/queue/"))
    assert "Audit log" in pages(sidebar(as_user(admin), "/p/main/queue/"))


def test_groups_stay_closed_but_the_one_of_the_open_page(project: Project, ann: User, as_user: SignIn) -> None:
    client = as_user(ann)
    assert open_groups(sidebar(client, "/p/main/queue/")) == ["work", "capacity", "team", "system"]
    client.cookies["closed"] = "work.team.nonsense"
    assert open_groups(sidebar(client, "/p/main/queue/")) == ["work", "capacity", "system"]
    assert open_groups(sidebar(client, "/account/tokens/")) == ["capacity", "system"]


@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("/p/main/queues/default/", "/p/main/queue/"),
        ("/p/main/queues/default/settings/", "/p/main/queue/"),
        ("/p/main/queues/default/history/", "/p/main/history/"),
        ("/p/main/compare/", "/p/main/runs/"),
        ("/p/main/runs/none/", "/p/main/runs/"),
        ("/account/tokens/", None),
    ],
)
def test_the_page_that_is_open_is_marked(ann: User, as_user: SignIn, path: str, page: str | None) -> None:
    assert current(sidebar(as_user(ann), path)) == ([page] if page else [])


def test_another_projects_link_leads_to_the_same_page_if_anyone_may_open_it(ann: User, as_user: SignIn) -> None:
    join(make_project("other"), ann, "viewer")
    client = as_user(ann)
    assert 'href="/p/other/gpus/"' in sidebar(client, "/p/main/gpus/")
    assert 'href="/p/other/history/"' in sidebar(client, "/p/main/queues/default/history/")
    assert 'href="/p/other/runs/"' in sidebar(client, "/p/main/runs/none/")
    for path in ("/p/main/secrets/", "/account/tokens/"):
        assert 'href="/p/other/queue/"' in sidebar(client, path)


def test_many_projects_can_be_searched(ann: User, as_user: SignIn) -> None:
    client = as_user(ann)
    assert "dw-project-one" in sidebar(client, "/p/main/queue/")
    for number in range(6):
        join(make_project(f"team-{number}"), ann)
    assert "data-search" not in sidebar(client, "/p/main/queue/")
    join(make_project("team-6"), ann)
    assert "data-search" in sidebar(client, "/p/main/queue/")
