"""Permissions of staff are those that pages of the admin site ask for, in the reader's language."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth.models import Group, Permission
from django.test import Client

from dstackweb.accounts.models import User
from dstackweb.urls import admin  # with all models registered
from dstackweb.web.admin import areas
from tests.factories import make_user
from tests.forms import submit

pytestmark = pytest.mark.django_db


@pytest.fixture
def client(client: Client) -> Client:
    client.force_login(make_user("root", is_staff=True, is_superuser=True))
    return client


def boxes(page: str) -> dict[str, list[str]]:
    """The actions that are offered, by the model's name."""
    found = re.findall(r"<div><label>([^<]+)</label>(.*?)\n  </div>", page, re.DOTALL)
    actions = r"\s*([^<>\s]+)<span class=\"visually-hidden\">"
    return {name: re.findall(actions, lines) for name, lines in found}


def test_each_model_is_offered_with_what_its_pages_let_people_do(client: Client) -> None:
    offered = boxes(client.get("/admin/auth/group/add/").text)
    assert list(offered) == [line.name for line in areas.lines()]
    assert len(offered) == len(admin.site._registry)
    assert offered["Projects"] == ["View", "Add", "Change", "Delete"]
    assert offered["Memberships"] == ["View", "Add", "Change", "Delete"], "a project's page changes them"
    assert offered["Failed sign-ins"] == ["View", "Delete"]
    assert offered["Audit log"] == ["View"]


def test_a_group_is_saved_with_what_is_ticked(client: Client) -> None:
    wanted = {"view_run", "change_queue"}
    ticked = Permission.objects.filter(codename__in=wanted).values_list("pk", flat=True)
    answer = submit(client, "/admin/auth/group/add/", {"name": "ops", "permissions": list(ticked)})
    assert answer.status_code == 302
    group = Group.objects.get()
    assert {*group.permissions.values_list("codename", flat=True)} == wanted
    page = client.get(f"/admin/auth/group/{group.pk}/change/").text
    assert len(re.findall(r"<input[^>]* checked", page)) == 2
    foreign = Permission.objects.get(codename="add_contenttype")
    forged = client.post("/admin/auth/group/add/", {"name": "two", "permissions": [foreign.pk]})
    assert forged.status_code == 200, "no page asks for it"


def test_pages_about_people_are_all_in_the_readers_language(client: Client) -> None:
    mia = User.objects.create(username="mia", password="md5$a$b")
    pages = {
        name: client.get(f"/admin/{path}", headers={"accept-language": "zh-hans"}).text
        for name, path in {
            "group": "auth/group/add/",
            "user": f"accounts/user/{mia.pk}/change/",
            "password": f"accounts/user/{mia.pk}/password/",
            "attempts": "accounts/passwordfailures/",
        }.items()
    }
    assert boxes(pages["group"])["项目"] == ["查看", "添加", "更改", "删除"]
    for page in pages.values():
        assert not re.search("Can (add|view)|Whether the user|will be lost|access attempt|Hold down", page, re.I)
    assert "此用户当前的密码将丢失" in pages["password"]
