"""A queue's settings page: managers change, all members read, changes are shown with who made them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.runs.models import Queue
from dstackweb.web.queue.settings_views import QueueForm
from dstackweb.wording import queue as queue_words
from tests.factories import join, make_host, make_run, make_user, place_all
from tests.forms import open_form, submit
from tests.web.conftest import HTMX

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]
URL = "/p/main/queues/default/settings/"
CHANGES = {
    "ageing_minutes": "60",
    "draining": True,
    "max_running": "3",
    "max_running_per_user": "1",
    "max_gpus_per_user": "0",
}
COHORT = {"ageing_minutes": "60", "max_gpus": "2", "cohort": "team"}


def save(client: Client, changes: dict[str, Any], url: str = URL) -> Any:
    return submit(client, url, changes, to=url)


def create(client: Client, name: str) -> Any:
    """Fill in the card of a new queue, beside a queue's settings."""
    return submit(client, URL, {"name": name}, to="/p/main/queues/")


def test_a_manager_turns_preemption_on_and_the_page_says_what_it_does(
    project: Project, mia: User, ann: User, as_user: SignIn
) -> None:
    assert "no running run is stopped for a waiting one" in as_user(ann).get(URL).content.decode()
    refused = save(as_user(mia), CHANGES | {"preempt_points": "0"})
    assert (refused.status_code, Queue.objects.get(project=project).preempt_points) == (422, None)
    assert save(as_user(mia), CHANGES | {"preempt_points": "20"}).status_code == 302
    assert Queue.objects.get(project=project).preempt_points == 20
    page = as_user(ann).get(URL).content.decode()
    assert "may stop preemptible runs behind it whose priority is at least 20 lower" in page
    assert "preemption, points of priority: off → 20" in page


def test_a_manager_saves_settings_and_the_page_shows_who_did(
    project: Project, mia: User, ann: User, as_user: SignIn
) -> None:
    client = as_user(mia)
    answer = save(client, CHANGES)
    assert (answer.status_code, answer["Location"]) == (302, "/p/main/queue/")
    queue = Queue.objects.get(project=project)
    assert (queue.ageing_minutes, queue.draining, queue.paused) == (60, True, False)
    assert (queue.max_running, queue.max_gpus, queue.max_gpus_per_user) == (3, None, 0)
    page = as_user(ann).get(URL).content.decode()
    assert "ageing: 30 min per point → 60 min per point" in page
    assert "draining: takes no new runs" in page
    assert "· mia" in page
    assert "ranks like a new run with +1 priority point." in page
    strict = save(client, {"ageing_minutes": ""})
    assert strict.status_code == 302
    assert Queue.objects.get(project=project).ageing_minutes is None


@pytest.mark.parametrize("missing", QueueForm.base_fields)
def test_a_form_that_lacks_a_field_changes_nothing(project: Project, mia: User, as_user: SignIn, missing: str) -> None:
    """No page sends it."""
    client = as_user(mia)
    save(client, CHANGES | {"paused": True, "max_gpus": "7"})
    before = Queue.objects.values().get(project=project)
    answer = client.post(URL, {name: "" for name in QueueForm.base_fields if name != missing})
    assert answer.status_code == 422
    assert "The form lacks this field." in str(answer.context["form"].errors[missing])
    assert Queue.objects.values().get(project=project) == before


def test_what_others_changed_while_the_settings_were_open_stays_as_it_is(
    project: Project, mia: User, as_user: SignIn
) -> None:
    client = as_user(mia)
    opened = open_form(client, URL, having="max_gpus")
    Queue.objects.update(paused=True, max_running=4, ageing_minutes=60)  # by another manager, meanwhile
    assert opened.send({"max_gpus": "8"}).status_code == 302
    queue = Queue.objects.get(project=project)
    assert (queue.paused, queue.max_running, queue.ageing_minutes, queue.max_gpus) == (True, 4, 60, 8)


def test_a_setting_that_two_managers_change_at_once_is_refused(project: Project, mia: User, as_user: SignIn) -> None:
    client = as_user(mia)
    opened = open_form(client, URL, having="max_gpus")
    Queue.objects.update(ageing_minutes=60)
    answer = opened.send({"ageing_minutes": "5", "max_gpus": "8"})
    assert answer.status_code == 422
    assert "changed since you opened the page" in str(answer.context["form"].errors["ageing_minutes"])
    assert opened.send({"ageing_minutes": "60"}).status_code == 302, "both want the same"
    assert Queue.objects.get(project=project).max_gpus is None


def test_fair_share_is_set_by_managers_and_read_by_all(project: Project, mia: User, ann: User, as_user: SignIn) -> None:
    assert "Off: runs rank by priority and time alone" in as_user(ann).get(URL).content.decode()
    save(as_user(mia), CHANGES | {"fair_share_minutes": "90", "fair_share_half_life_days": "14"})
    queue = Queue.objects.get(project=project)
    assert (queue.fair_share_minutes, queue.fair_share_half_life_days) == (90, 14)
    for reader in (ann, mia):
        page = as_user(reader).get(URL).content.decode()
        assert "load rank up to 1 h 30 min lower. Past usage halves every 14 d." in page
        for change in ("fair share: off → at most 1 h 30 min", "half-life of fair share: 7 d → 14 d"):
            assert change in page
    for wrong in ({"fair_share_minutes": "0"}, {"fair_share_half_life_days": ""}, {"fair_share_half_life_days": "91"}):
        assert save(as_user(mia), wrong).status_code == 422


def test_a_switch_on_the_page_is_sent_whether_it_is_on_or_off(project: Project, mia: User, as_user: SignIn) -> None:
    client = as_user(mia)
    assert open_form(client, URL, to=URL).values["paused"] == ["false"]
    save(client, {"paused": True})
    assert Queue.objects.get(project=project).paused
    assert open_form(client, URL, to=URL).values["paused"] == ["false", "on"]
    page = client.get(URL).content.decode()
    assert page.index('type="hidden" name="paused" value="false"') < page.index('type="checkbox" name="paused"')
    save(client, {"paused": False})
    assert not Queue.objects.get(project=project).paused


def test_members_read_the_settings_and_cannot_save_them(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    """No page sends these requests for them: they are a manager's."""
    client = as_user(ann)
    page = client.get(URL).content.decode()
    assert "No limit" in page
    assert 'name="max_running"' not in page
    assert client.post(URL, open_form(as_user(mia), URL, to=URL).filled(CHANGES)).status_code == 403
    assert client.post("/p/main/queues/", {"name": "night"}).status_code == 403
    assert Queue.objects.get(project=project).max_running is None


@pytest.mark.parametrize(
    ("name", "value"), [("ageing_minutes", "0"), ("max_running", "-1"), ("max_gpus", "many"), ("max_gpus", "9999999")]
)
def test_invalid_values_are_reported_at_their_fields(
    project: Project, mia: User, as_user: SignIn, name: str, value: str
) -> None:
    answer = save(as_user(mia), CHANGES | {name: value})
    assert answer.status_code == 422
    assert "invalid-feedback" in answer.content.decode()
    assert Queue.objects.get(project=project).max_running is None


def test_minutes_that_are_being_typed_are_explained(project: Project, mia: User, as_user: SignIn) -> None:
    client = as_user(mia)

    def shown(minutes: str) -> str:
        return client.get(URL, {"ageing_minutes": minutes}, headers=HTMX).content.decode()

    assert "waiting 1 h, a run ranks like a new run with +4 priority points" in shown("15")
    assert shown("").startswith("Strict")
    assert shown("-3") == ""


@pytest.mark.parametrize(("minutes", "words"), [(40, "1 h, a run ranks like a new run with +1.5"), (720, "1 d,")])
def test_ageing_is_explained_with_a_readable_wait(minutes: int, words: str) -> None:
    assert words in queue_words.ageing(minutes)


def test_a_manager_makes_another_queue(project: Project, mia: User, as_user: SignIn) -> None:
    client = as_user(mia)
    made = create(client, "night")
    assert made["Location"] == "/p/main/queues/night/settings/"
    assert client.get(made["Location"]).status_code == 200
    for name in ("night", "", "two words"):
        assert create(client, name).status_code == 422
    assert Queue.objects.filter(project=project).count() == 2


def test_the_address_of_all_queues_leads_to_a_queue(project: Project, ann: User, as_user: SignIn) -> None:
    answer = as_user(ann).get("/p/main/queues/")
    assert (answer.status_code, answer["Location"]) == (302, "/p/main/queue/")
    assert as_user(make_user("stranger")).get("/p/main/queues/").status_code == 404


def test_a_refused_name_of_a_new_queue_does_not_change_the_settings_form(
    project: Project, mia: User, ann: User, as_user: SignIn
) -> None:
    """The last request, a member's, comes from no page."""
    client = as_user(mia)
    save(client, CHANGES)
    refused = create(client, "two words")
    settings = open_form(client, refused, to=URL)
    assert {name: settings.values[name] for name in ("max_running", "draining", "paused")} == {
        "max_running": ["3"],
        "draining": ["false", "on"],
        "paused": ["false"],
    }
    assert as_user(ann).post("/p/main/queues/", {"name": "two words"}).status_code == 403


def test_all_members_see_why_the_queue_is_held_up(project: Project, ann: User, mia: User, as_user: SignIn) -> None:
    make_host("box", gpus=4)
    make_run(project, ann, "runs", resources={"gpu": 2})
    place_all()
    save(as_user(mia), CHANGES | {"max_gpus": "4", "max_gpus_per_user": "2", "max_running_per_user": ""})
    page = as_user(join(project, make_user("vic"), "viewer")).get("/p/main/queue/").content.decode()
    assert "1 of 3 running" in page
    assert "2 of 4 GPUs" in page
    assert "is draining" in page
    own = as_user(ann).get("/p/main/queue/").content.decode()
    assert "you: 2 of 2 GPUs" in own


def test_a_manager_has_a_queue_take_back_what_it_lends(project: Project, mia: User, ann: User, as_user: SignIn) -> None:
    client = as_user(mia)
    opened = open_form(client, URL, to=URL)
    by_hand = client.post(URL, opened.filled(COHORT) | {"reclaim": "always"})
    assert by_hand.status_code == 422, "no page offers it"
    assert opened.send(COHORT | {"reclaim": "any"}).status_code == 302
    assert Queue.objects.get(project=project).reclaim == "any"
    page = client.get(URL).content.decode()
    assert "lent GPUs: wait until they are free → take back from preemptible runs of any priority" in page
    read = as_user(ann).get(URL).content.decode()
    assert "When its own runs need lent GPUs: take back from preemptible runs of any priority" in read


def test_a_queue_in_a_cohort_shows_what_it_borrows_from_whom(
    project: Project, mia: User, ann: User, as_user: SignIn
) -> None:
    make_host(gpus=4)
    make_run(project, ann, "first")
    client = as_user(mia)
    create(client, "eval")
    for name in ("default", "eval"):
        saved = save(client, COHORT, f"/p/main/queues/{name}/settings/")
        assert saved.status_code == 302
    assert "1 GPU borrowed" not in client.get("/p/main/queue/").content.decode()
    for n in range(3):
        make_run(project, ann, f"gpu-{n}", resources={"gpu": 1})
    place_all()
    page = client.get("/p/main/queue/").content.decode()
    assert "1 GPU borrowed from eval" in page
    assert "3 of 2 GPUs" in page
    assert "cohort: none → team" in client.get(URL).content.decode()
    Queue.objects.filter(name="default").update(borrow_gpus=0)
    make_run(project, ann, "late", resources={"gpu": 1})
    place_all()
    assert "the queue&#x27;s runs hold 3 of at most 2" in client.get("/p/main/runs/late/").content.decode()
