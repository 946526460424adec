"""Filters of the queue page are saved under a name: a person's own, and those that managers share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from dstackweb.accounts import saved_views
from dstackweb.accounts.models import Project, SavedView, User
from dstackweb.audit.models import AuditEntry
from tests.factories import join, make_project, make_run, make_user
from tests.forms import open_form, submit
from tests.web.conftest import HTMX

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]
SignIn = Callable[[User], Client]
QUEUE = "/p/main/queue/"
EVERY = f"{QUEUE}?view=all"
SAVE = "/p/main/queues/default/views/"


def views(client: Client, at: str = QUEUE) -> dict[str, str]:
    """The addresses of the offered views by their names."""
    menu = client.get(at).text.partition('class="dw-menu dw-views"')[2].partition("</details>")[0]
    found = re.findall(r'href="([^"]*)"[^>]*>\s*([^<\s]+)', menu)
    return {name: address.replace("&amp;", "&") for address, name in found}


def save(client: Client, name: str, query: str = "q=sweep&group=member", **more: bool) -> Any:
    return submit(client, f"{QUEUE}?{query}", {"name": name, **more}, to=SAVE)


def make_default(client: Client, view: SavedView, button: str = "Make default") -> Any:
    """Press the button of this view, whose text has the view's name for screen readers."""
    return submit(client, EVERY, to=f"/{view.pk}/default/", button=f"{button} {view.name}")


def delete(client: Client, view: SavedView) -> Any:
    return submit(client, EVERY, to=f"/{view.pk}/delete/")


def test_a_saved_view_shows_its_filters_again_to_its_owner_alone(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    make_run(project, ann, "sweep-1")
    make_run(project, ann, "other")
    client = as_user(ann)
    assert "Filter or group the list, or choose columns, to save" in client.get(QUEUE).text
    answer = save(client, " sweeps ", "q=sweep&page=7&group=member&member=")
    assert answer["Location"] == f"{QUEUE}?q=sweep&group=member"
    assert views(client) == {"sweeps": f"{QUEUE}?q=sweep&group=member"}
    page = client.get(views(client)["sweeps"]).text
    assert "1 of 2 runs shown" in page
    assert re.search(r'group=member"\s+aria-current="true"', page)
    assert views(as_user(mia)) == {}
    assert not AuditEntry.objects.filter(kind="view").exists()


def test_a_view_can_be_of_columns_alone(project: Project, ann: User, as_user: SignIn) -> None:
    client = as_user(ann)
    make_run(project, ann, "one")
    assert save(client, "short", "columns=name&columns=starts").status_code == 302
    assert views(client) == {"short": f"{QUEUE}?columns=name&columns=starts"}
    page = client.get(views(client)["short"]).text
    assert re.search("<th[^>]*>Starts<", page)
    assert not re.search("<th[^>]*>Priority<", page)


def test_saving_under_the_same_name_replaces_the_filters(project: Project, ann: User, as_user: SignIn) -> None:
    client = as_user(ann)
    for text in ("one", "two"):
        save(client, "mine", f"q={text}")
    assert views(client) == {"mine": f"{QUEUE}?q=two"}


def test_managers_share_views_and_that_is_audited(project: Project, ann: User, mia: User, as_user: SignIn) -> None:
    client = as_user(ann)
    by_hand = client.post(SAVE, {"name": "all", "query": "q=sweep", "shared": "yes"})
    assert by_hand.status_code == 403, "no page offers it to members"
    assert save(as_user(mia), "all", shared=True).status_code == 302
    assert save(client, "all", "q=own").status_code == 302  # a name of one's own may be the same
    assert client.get(QUEUE).text.count("shared</span>") == 1
    shared = SavedView.objects.get(user=None)
    assert client.post(f"{SAVE}{shared.pk}/delete/").status_code == 404, "nor this"
    assert delete(as_user(mia), shared).status_code == 302
    assert list(views(client).values()) == [f"{QUEUE}?q=own"]
    entries = AuditEntry.objects.filter(kind="view").order_by("pk")
    found = entries.values_list("action", "name", "actor_name", "project_name")
    assert list(found) == [(action, "all", "mia", "main") for action in ("created", "deleted")]


def test_nobody_deletes_a_view_of_another(project: Project, ann: User, mia: User, as_user: SignIn) -> None:
    """No page sends it."""
    save(as_user(ann), "mine")
    view = SavedView.objects.get()
    assert as_user(mia).post(f"{SAVE}{view.pk}/delete/").status_code == 404
    assert delete(as_user(ann), view).status_code == 302
    assert not SavedView.objects.exists()


@pytest.mark.parametrize("name", ["", "x" * 41])
def test_a_view_needs_a_name(project: Project, ann: User, as_user: SignIn, name: str) -> None:
    assert save(as_user(ann), name, "q=a").status_code == 422
    assert not SavedView.objects.exists()


@pytest.mark.parametrize("query", ["", "colour=red"])
def test_a_view_without_filters_which_no_page_sends_is_refused(
    project: Project, ann: User, as_user: SignIn, query: str
) -> None:
    client = as_user(ann)
    assert "dw-view-save" not in client.get(f"{QUEUE}?{query}").text
    assert client.post(SAVE, {"name": "empty", "query": query}).status_code == 422
    assert not SavedView.objects.exists()


def test_views_are_of_one_project_and_not_without_number(
    project: Project, ann: User, as_user: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_views, "VIEWS_MOST", 2)
    client = as_user(ann)
    join(make_project("other"), ann, "member")
    assert [save(client, name).status_code for name in "abcb"] == [302, 302, 409, 302]
    assert list(views(client)) == ["a", "b"]
    assert views(client, "/p/other/queue/") == {}


def test_a_person_has_the_queue_open_with_a_view_until_they_say_otherwise(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    make_run(project, ann, "sweep-1")
    make_run(project, ann, "other")
    client = as_user(ann)
    save(client, "sweeps")
    save(as_user(mia), "shared", "q=other", shared=True)
    mine, shared = SavedView.objects.get(user=ann), SavedView.objects.get(user=None)
    assert make_default(client, mine)["Location"] == f"{QUEUE}?{mine.query}"

    assert client.get(QUEUE)["Location"] == f"{QUEUE}?{mine.query}"
    page = client.get(QUEUE, follow=True).text
    assert re.search(r"View: sweeps\s+· <a href=\"/p/main/queue/\?view=all\"", page)
    every = client.get(f"{QUEUE}?view=all")
    assert every.status_code == 200
    assert "View: sweeps" not in every.text
    assert "other" in every.text
    for address in (f"{QUEUE}?q=other", f"{QUEUE}?page=2"):
        assert client.get(address).status_code == 200
    assert client.get(QUEUE, headers=HTMX).status_code == 200
    assert as_user(mia).get(QUEUE).status_code == 200, "another person's"

    client = as_user(ann)
    opened = open_form(client, EVERY, to=f"/{mine.pk}/default/")
    assert make_default(client, shared).status_code == 302
    assert client.get(QUEUE)["Location"] == f"{QUEUE}?q=other"
    assert opened.values["default"] == ["no"]
    assert opened.send().status_code == 302, "it is no longer"
    assert client.get(QUEUE)["Location"] == f"{QUEUE}?q=other"
    make_default(client, shared, "Default ✓")
    assert client.get(QUEUE).status_code == 200
    make_default(client, mine)
    delete(client, mine)
    assert client.get(QUEUE).status_code == 200


def test_without_scripts_an_action_does_not_lead_from_all_runs_to_the_default_view(
    project: Project, ann: User, as_user: SignIn
) -> None:
    run = make_run(project, ann, "other")
    client = as_user(ann)
    save(client, "sweeps")
    make_default(client, SavedView.objects.get())
    answer = submit(client, EVERY, having="run", button=f"raise={run.pk}", scripts=False)
    page = client.get(answer["Location"], follow=True).text
    assert "Priority of other set to 51" in page
    assert "/runs/other/" in page


def test_nobody_makes_the_view_of_another_their_default(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    """No page sends it, nor the request that does not say which it wants."""
    save(as_user(ann), "mine")
    view = SavedView.objects.get()
    assert as_user(mia).post(f"{SAVE}{view.pk}/default/", {"default": "yes"}).status_code == 404
    assert as_user(ann).post(f"{SAVE}{view.pk}/default/").status_code == 422


def test_viewers_save_views_too(project: Project, as_user: SignIn) -> None:
    client = as_user(join(project, make_user("vic"), "viewer"))
    assert save(client, "mine").status_code == 302
    assert list(views(client)) == ["mine"]
