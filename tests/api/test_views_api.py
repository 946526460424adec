"""Saved views of the queues through the API: one's own, those that managers share, and a queue seen through one."""

from __future__ import annotations

from typing import Any

import pytest

from dstackweb.accounts import saved_views
from dstackweb.accounts.models import Project, SavedView, User
from dstackweb.accounts.services import create_token
from tests.api.conftest import Api
from tests.factories import join, make_project, make_run, make_user

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]
VIEWS = "projects/main/views"


def test_a_view_is_saved_changed_made_default_and_deleted(api: Api, project: Project, member: User) -> None:
    saved = api("POST", VIEWS, {"name": " sweeps ", "query": "q=sweep&page=3&group=member"})
    assert saved.status_code == 201
    view = saved.json()
    assert view == {
        "id": view["id"], "name": "sweeps", "query": "q=sweep&group=member", "shared": False, "default": False,
    }  # fmt: skip
    own = f"{VIEWS}/{view['id']}"
    assert api("PATCH", own, {"name": "mine", "query": "priority=80"}).json() | {"id": 0} == {
        "id": 0, "name": "mine", "query": "priority=80", "shared": False, "default": False,
    }  # fmt: skip
    assert api("PATCH", own, {"default": True}).json()["default"] is True
    assert [one["default"] for one in api("GET", VIEWS).json()["items"]] == [True]
    assert api("PATCH", own, {"default": False}).json()["default"] is False
    assert api("DELETE", own).status_code == 204
    assert api("GET", VIEWS).json() == {"items": [], "next": None}
    assert api("DELETE", own).status_code == 404


def test_only_managers_share_views_and_change_shared_ones(
    api: Api, manager: Api, project: Project, member: User
) -> None:
    assert api("POST", VIEWS, {"name": "all", "query": "q=a", "shared": True}).status_code == 403
    shared = saved_views.save(project, None, "all", "q=a")
    other = saved_views.save(project, join(project, make_user("other")), "theirs", "q=a")
    assert [one["name"] for one in api("GET", VIEWS).json()["items"]] == ["all"]
    assert api("PATCH", f"{VIEWS}/{shared.pk}", {"default": True}).json()["default"] is True, "of one's own pages"
    for view in (shared, other):
        assert api("PATCH", f"{VIEWS}/{view.pk}", {"name": "b"}).status_code == 404
        assert api("DELETE", f"{VIEWS}/{view.pk}").status_code == 404
    assert manager("PATCH", f"{VIEWS}/{shared.pk}", {"name": "b"}).json()["name"] == "b"
    assert manager("POST", VIEWS, {"name": "c", "query": "q=a", "shared": True}).json()["shared"] is True
    assert SavedView.objects.filter(user=None).count() == 2


@pytest.mark.parametrize(
    ("body", "status"),
    [({"query": "q=b"}, 200), ({"query": "colour=red"}, 422), ({"name": ""}, 422), ({"name": "taken"}, 409),
     ({"name": "x" * 41}, 422), ({"user": "bo"}, 422)],
)  # fmt: skip
def test_a_change_keeps_a_view_with_a_name_of_its_own_and_filters(
    api: Api, project: Project, member: User, body: dict[str, Any], status: int
) -> None:
    view = saved_views.save(project, member, "mine", "q=a")
    saved_views.save(project, member, "taken", "q=a")
    assert api("PATCH", f"{VIEWS}/{view.pk}", body).status_code == status


def test_a_queue_is_seen_through_a_view_in_its_groups_and_page_by_page(
    api: Api, project: Project, member: User
) -> None:
    other = join(project, make_user("other"))
    for number, user in enumerate((other, member, other, other)):
        make_run(project, user, f"sweep-{number}")
    make_run(project, member, "eval")
    saved_views.save(project, None, "sweeps", "q=eval")
    saved_views.save(project, member, "sweeps", "q=sweep&group=member")
    found = api("GET", "projects/main/queues/default?view=sweeps").json()
    assert [(run["name"], run["position"]) for run in found["items"]] == [
        ("sweep-0", 1), ("sweep-2", 3), ("sweep-3", 4), ("sweep-1", 2),
    ]  # fmt: skip
    page = api("GET", "projects/main/queues/default?view=sweeps&limit=2&cursor=2&folded=true").json()
    assert [(run["name"], run["folded"]) for run in page["items"]] == [("sweep-3", None), ("sweep-1", None)]
    assert page["next"] is None
    assert api("GET", "projects/main/queues/default?view=none").status_code == 404


def test_a_token_that_only_reads_saves_nothing_and_other_projects_have_their_own_views(
    api: Api, project: Project, member: User
) -> None:
    read_only = {"Authorization": f"Bearer {create_token(member, 'reads', scope='read')[1]}"}
    view = saved_views.save(project, member, "mine", "q=a")
    assert api("GET", VIEWS, **read_only).json()["items"][0]["id"] == view.pk
    assert api("POST", VIEWS, {"name": "b", "query": "q=a"}, **read_only).status_code == 403
    assert api("PATCH", f"{VIEWS}/{view.pk}", {"default": True}, **read_only).status_code == 403
    assert api("DELETE", f"{VIEWS}/{view.pk}", **read_only).status_code == 403
    join(make_project("elsewhere"), member)
    assert api("GET", "projects/elsewhere/views").json()["items"] == []
