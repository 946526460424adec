"""Polls of a queue share what they read and render, and show each reader what a page of their own would."""

from __future__ import annotations

import re
import threading

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs.queue import queues
from dstackweb.runs.services import find_queue
from dstackweb.web.queue import snapshot
from tests.factories import join, make_project, make_run, make_user

pytestmark = [pytest.mark.django_db]
POLL = {"HX-Request": "true"}


@pytest.fixture
def readers(project: Project) -> dict[str, Client]:
    """One of each role, a member with runs, and one whose limit is shown."""
    users: dict[str, User] = {}
    for name, role in (("viewer", "viewer"), ("member", "member"), ("owner", "member"), ("manager", "manager")):
        users[name] = join(project, make_user(name), role)
    boss = join(project, make_user("boss"), "manager")
    queues.change_queue(find_queue(project, "default"), boss, "manager", max_running_per_user=3)
    for number in range(5):
        make_run(project, users["owner"] if number % 2 else boss, f"run-{number}", resources={"gpu": 1})
    clients = {}
    for name, user in users.items():
        clients[name] = Client()
        clients[name].force_login(user)
    return clients


def poll(client: Client, project: str = "main") -> str:
    answer = client.get(f"/p/{project}/queue/", headers=POLL)
    assert answer.status_code == 200
    return re.sub(r'data-event="\d+"', "", answer.content.decode())


def test_each_reader_sees_what_they_would_see_alone(
    readers: dict[str, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = timezone.now()
    monkeypatch.setattr(timezone, "now", lambda: now)  # the pages say for how long a run waits
    alone = {}
    for name, client in readers.items():
        snapshot.forget()
        alone[name] = poll(client)
    snapshot.forget()
    for _ in range(2):
        for name, client in readers.items():
            assert poll(client) == alone[name], name
    assert [text.count('class="grip"') for text in alone.values()] == [0, 0, 2, 5]
    assert len(set(alone.values())) == 4


def test_a_second_reader_of_the_same_kind_costs_no_query_of_the_list(readers: dict[str, Client]) -> None:
    poll(readers["member"])
    with CaptureQueriesContext(connection) as queries:
        poll(readers["member"])
    assert not any("runs_verdict" in query["sql"] for query in queries)
    assert len(queries) <= 7


def test_a_change_is_seen_by_the_next_poll(readers: dict[str, Client], project: Project) -> None:
    assert "run-new" not in poll(readers["member"])
    make_run(project, User.objects.get(username="boss"), "run-new")
    assert "run-new" in poll(readers["member"])


def test_what_changes_without_a_version_is_seen_after_two_seconds(
    readers: dict[str, Client], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = poll(readers["viewer"])
    project.name = "renamed"
    project.save()
    now = snapshot.time.monotonic()
    monkeypatch.setattr(snapshot.time, "monotonic", lambda: now + snapshot.SECONDS)
    assert "/p/renamed/" in poll(readers["viewer"], "renamed") != before


def test_projects_do_not_see_one_another(readers: dict[str, Client], project: Project) -> None:
    other = make_project("other")
    eve = join(other, make_user("eve"), "manager")
    make_run(other, eve, "secret-plan")
    client = Client()
    client.force_login(eve)
    assert "secret-plan" in poll(client, "other")
    assert "secret-plan" not in poll(readers["manager"])
    assert "run-0" not in poll(client, "other")


def test_threads_that_come_at_once_read_and_render_once() -> None:
    calls: list[str] = []
    ready = threading.Barrier(8)

    def read() -> dict[str, str]:
        calls.append("read")
        return {"rows": "x"}

    def work() -> None:
        ready.wait(60)
        found = snapshot.snapshot("key", "1", read)
        found.body("members", lambda: calls.append("rendered") or "body")  # type: ignore[func-returns-value, arg-type, return-value]

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["read", "rendered"]


def test_few_are_kept() -> None:
    for number in range(3 * snapshot.SNAPSHOTS):
        found = snapshot.snapshot(number, "1", lambda: {"rows": 1})
    assert len(snapshot._snapshots) == snapshot.SNAPSHOTS
    for number in range(3 * snapshot.BODIES):
        found.body(number, lambda: "body")  # type: ignore[arg-type, return-value]
    assert len(found.bodies) <= snapshot.BODIES


def test_a_failed_read_is_tried_again() -> None:
    def fails() -> dict[str, str]:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        snapshot.snapshot("key", "1", fails)
    assert snapshot.snapshot("key", "1", lambda: {"rows": 1}).values == {"rows": 1}
