from __future__ import annotations

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from dstackweb.accounts.models import Project, User
from dstackweb.runs import admin, selectors, services
from dstackweb.runs.models import Queue, QueueEvent, Run
from dstackweb.runs.rows import queue_rows
from tests.factories import make_host, make_project, make_run, place_all
from tests.forms import forms_of, open_form, submit

pytestmark = pytest.mark.django_db


def change(row: Run | Queue) -> str:
    return reverse(f"admin:runs_{row._meta.model_name}_change", args=[row.pk])


def test_a_queue_that_is_paused_in_the_admin_shows_as_paused_in_every_open_list(
    project: Project, admin_client: Client
) -> None:
    queue = services.ensure_queue(project)
    shown = selectors.list_version(project)
    assert submit(admin_client, change(queue), {"paused": True}).status_code == 302
    queue.refresh_from_db()
    assert queue.paused
    assert selectors.list_version(project) != shown


def test_saving_a_queue_in_the_admin_writes_only_the_changed_fields(
    project: Project, member: User, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is submitted while the form is saved keeps its place before the next one."""
    queue = services.ensure_queue(project)
    save = admin.QueueAdmin.save_model

    def while_saving(self: admin.QueueAdmin, *args: object, **kwargs: object) -> None:
        make_run(project, member)
        save(self, *args, **kwargs)

    monkeypatch.setattr(admin.QueueAdmin, "save_model", while_saving)
    submit(admin_client, change(queue), {"paused": True})
    assert Queue.objects.get(pk=queue.pk).last_seniority_us > queue.last_seniority_us
    make_host()
    assert place_all() == 0


def test_a_queue_that_was_paused_while_its_form_was_open_in_the_admin_stays_paused(
    project: Project, admin_client: Client
) -> None:
    queue = services.ensure_queue(project)
    opened = open_form(admin_client, change(queue))
    Queue.objects.update(paused=True)
    assert opened.send({"max_gpus": 8}).status_code == 302
    queue.refresh_from_db()
    assert (queue.paused, queue.max_gpus) == (True, 8)


def test_a_new_ageing_step_in_the_admin_reranks_the_queue_and_is_recorded(
    project: Project, member: User, admin_client: Client
) -> None:
    old, urgent = make_run(project, member), make_run(project, member, priority=51)
    queue = services.ensure_queue(project)
    assert submit(admin_client, change(queue), {"ageing_minutes": "", "max_running": 3}).status_code == 302
    queue.refresh_from_db()
    assert (queue.ageing_minutes, queue.max_running) == (None, 3)
    for run in (old, urgent):
        run = Run.objects.get(pk=run.pk)
        assert run.rank == run.seniority_us - run.priority * queue.step_us
    event = QueueEvent.objects.get(queue=queue)
    assert (event.data, event.actor and event.actor.username) == (
        {"ageing_minutes": [30, None], "max_running": [None, 3]},
        "admin",
    )


def test_a_queue_is_made_in_the_admin_with_its_counters(project: Project, admin_client: Client) -> None:
    made = {"project": project.pk, "name": "night", "ageing_minutes": 5, "draining": True}
    assert submit(admin_client, reverse("admin:runs_queue_add"), made).status_code == 302
    queue = Queue.objects.get(name="night")
    assert (queue.ageing_minutes, queue.draining, queue.count.version) == (5, True, 0)


def test_an_active_runs_priority_is_changed_in_the_admin_and_recorded_on_its_timeline(
    project: Project, member: User, admin_client: Client
) -> None:
    first, second = make_run(project, member), make_run(project, member)
    assert submit(admin_client, change(second), {"priority": 70}).status_code == 302
    assert [row.name for row in queue_rows(services.ensure_queue(project))] == [second.name, first.name]
    event = second.events.get(kind="priority")
    assert (event.data, event.actor and event.actor.username) == ({"from": 50, "to": 70}, "admin")


def test_the_queue_and_the_priority_of_a_waiting_run_are_changed_at_once_in_the_admin(
    project: Project, member: User, admin_client: Client
) -> None:
    run, night = make_run(project, member), services.ensure_queue(project, "night")
    elsewhere = services.ensure_queue(make_project("other"))
    form = open_form(admin_client, change(run))
    with pytest.raises(LookupError, match="offers"):
        form.send({"queue": elsewhere.pk})
    assert form.send({"queue": night.pk, "priority": 80}).status_code == 302
    assert [(row.name, row.priority) for row in queue_rows(night)] == [(run.name, 80)]
    assert [event.kind for event in run.events.filter(actor__username="admin")] == ["queue", "priority"]


def test_what_is_refused_in_the_admin_changes_nothing_of_a_run(
    project: Project, member: User, admin_client: Client
) -> None:
    run, night = make_run(project, member), services.ensure_queue(project, "night")
    Queue.objects.filter(pk=night.pk).update(draining=True)
    page = submit(admin_client, change(run), {"queue": night.pk, "priority": 80}, follow=True).content.decode()
    assert "draining" in page
    assert "changed successfully" not in page
    run.refresh_from_db()
    assert (run.queue.name, run.priority) == ("default", 50)


def test_the_queue_of_a_run_that_has_its_place_is_read_only_in_the_admin(
    project: Project, member: User, admin_client: Client
) -> None:
    make_host()
    run = make_run(project, member)
    assert place_all() == 1
    form = open_form(admin_client, change(run))
    assert "queue" not in form.values
    assert form.send({"priority": 70}).status_code == 302
    run.refresh_from_db()
    assert run.priority == 70


@pytest.mark.parametrize(
    ("priority", "error"), [(101, "less than or equal to 100"), (-1, "greater than or equal to 0")]
)
def test_a_priority_that_is_none_is_refused_in_words_in_the_admin(
    admin_client: Client, project: Project, member: User, priority: int, error: str
) -> None:
    run = make_run(project, member)
    answer = submit(admin_client, change(run), {"priority": priority})
    assert (answer.status_code, error in answer.content.decode()) == (200, True)
    run.refresh_from_db()
    assert run.priority == 50


def test_the_admin_does_not_overwrite_a_concurrently_changed_priority(
    project: Project, member: User, admin_client: Client
) -> None:
    run = make_run(project, member)
    opened = open_form(admin_client, change(run))
    services.set_priority(run, member, "member", 40)
    answer = opened.send({"priority": 66}, follow=True)
    (said,) = answer.context["messages"]
    assert f"run {run.name} was changed by ada since you looked" in str(said)
    assert Run.objects.get(pk=run.pk).priority == 40
    assert submit(admin_client, answer, {"priority": 66}).status_code == 302, "that page shows what it is now"
    assert Run.objects.get(pk=run.pk).priority == 66


def test_an_ended_run_is_read_only_in_the_admin(project: Project, member: User, admin_client: Client) -> None:
    run = make_run(project, member)
    opened = open_form(admin_client, change(run))
    services.stop(run, member, "member")
    assert opened.send({"priority": 70}).status_code == 403
    page = admin_client.get(change(run))
    assert page.status_code == 200
    assert b"env_secret" not in page.content
    assert not any(
        form.attrs.get("id") == "run_form" for form in forms_of(admin_client, page) if form.values.get("seen")
    )


def test_the_admins_list_of_runs_finds_and_filters_them_without_reading_the_others(
    project: Project, member: User, admin_client: Client
) -> None:
    first, second = make_run(project, member, "train-1"), make_run(project, member, "eval-1")
    services.stop(second, member, "member")

    def listed(query: str) -> list[str]:
        page = admin_client.get(reverse("admin:runs_run_changelist") + query)
        return [run.name for run in page.context["cl"].result_list]

    assert listed("") == listed("?q=ADA") == ["eval-1", "train-1"]
    assert listed("?q=train") == listed(f"?q={first.uid}") == listed("?q=ada+train") == ["train-1"]
    with CaptureQueriesContext(connection) as queries:
        assert listed("?status=terminated&q=eval") == ["eval-1"]
    for query in queries:
        if "LIKE" in query["sql"] and '"runs_run"' in query["sql"]:
            assert '"runs_run"."spec"' not in query["sql"]
