"""A queue as it was: what is read of a moment is what could be read at that moment."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Conflict, DomainError, Invalid
from dstackweb.runs import attempts, past_log, removal, services
from dstackweb.runs.codes import PlaceEnd
from dstackweb.runs.models import Job, PastPlace, PastVerdict, Queue, Run, UsageDay, Verdict
from dstackweb.runs.past_log import StoredWait
from dstackweb.runs.queue import past, queues, reorder
from dstackweb.runs.queue.move_preview import MoveTarget
from dstackweb.runs.queue.past import PastQueue, queue_at
from dstackweb.runs.rows import queue_rows
from dstackweb.runs.services import Submission
from dstackweb.runs.states import PLACED, RunStatus
from dstackweb.runs.sweeps import services as sweeps
from dstackweb.scheduler.processes import retention
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db
NOW = dt.datetime(2026, 11, 26, 14, tzinfo=dt.UTC)
MINUTE = dt.timedelta(minutes=1)


@dataclass
class Seen:
    """What could be read of a queue at a moment."""

    at: dt.datetime
    waiting: list[tuple[str, int, int, str, dict[str, Any]]]
    placed: set[str]
    settings: dict[str, Any]


@dataclass
class Story:
    """A team at work; `seen` has what each step left of both queues."""

    project: Project
    users: list[User]
    seen: list[tuple[Queue, Seen]] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)
    """Runs that have been in both queues: where they were placed then is not kept (docs/queue.md)."""

    def queue(self, name: str = "default") -> Queue:
        return services.find_queue(self.project, name)

    def runs(self, *statuses: RunStatus) -> list[Run]:
        found = Run.objects.filter(project=self.project).select_related("queue", "project", "user")
        return list((found.filter(status__in=statuses) if statuses else found).order_by("pk"))

    def look(self) -> None:
        for name in ("default", "night"):
            queue = self.queue(name)
            rows = queue_rows(queue, 1000)
            placed = Run.objects.filter(queue=queue, status__in=PLACED, jobs__ended_at=None)
            seen = Seen(
                at=timezone.now(),
                waiting=[(row.id, row.priority, row.penalty_s, row.reason, row.reason_data) for row in rows],
                placed={str(uid) for uid in placed.values_list("uid", flat=True)},
                settings={name: getattr(queue, name) for name in queues.SETTINGS},
            )
            self.seen.append((queue, seen))

    def act(self, what: int, which: int) -> None:
        """One of the things that people, passes and runners do."""
        waiting, placed = self.runs(RunStatus.SUBMITTED), self.runs(*PLACED)
        ended = self.runs(RunStatus.DONE, RunStatus.TERMINATED)
        user = self.users[which % 2]
        manager, queue = self.users[2], self.queue("night" if which % 5 == 0 else "default")
        match what:
            case 0 | 1 | 2:
                gpus = {"resources": {"gpu": 1 + which % 4}} if which % 2 else {}
                keys = {"queue": queue.name, "priority": 40 + which % 3 * 5, **gpus}
                make_run(self.project, user, f"run-{len(self.seen)}", role="manager", **keys)
            case 3:
                place_all()
            case 4 if waiting:
                where = ("top", "bottom")[which % 2]
                run = waiting[which % len(waiting)]
                move = reorder.move([run], manager, "manager", MoveTarget(where)).move_id
                if which % 3 == 0 and move is not None:
                    self.look()
                    reorder.undo(move, manager)
            case 5 if waiting or placed:
                run = (waiting + placed)[which % len(waiting + placed)]
                services.set_priority(run, manager, "manager", which % 101)
            case 6 if waiting:
                target = self.queue("night" if waiting[which % len(waiting)].queue.name == "default" else "default")
                services.set_queue(waiting[which % len(waiting)], manager, "manager", target.name)
                self.moved.add(str(waiting[which % len(waiting)].uid))
            case 7 if waiting:
                services.stop(waiting[which % len(waiting)], manager, "manager")
            case 8 if placed:
                run = placed[which % len(placed)]
                if which % 3:
                    attempts.return_job(placed_job(run).pk)
                else:
                    attempts.end_job(start(placed_job(run)).pk, "done_by_runner", exit_code=0)
            case 9:
                values = ({"paused": not queue.paused}, {"ageing_minutes": None if which % 2 else 1 + which},
                          {"max_running": which % 3 or None}, {"fair_share_minutes": which % 90 or None})  # fmt: skip
                queues.change_queue(queue, manager, "manager", **values[which % 4])
            case 10 if ended:
                removal.delete(ended[which % len(ended)], manager, "manager")
            case 11:
                config = {
                    "type": "task",
                    "name": f"sweep-{len(self.seen)}",
                    "commands": ["true"],
                    "array": {"count": 3},
                }
                found, _made = sweeps.submit(self.project, user, "member", Submission(config))
                self.look()
                sweeps.set_priority(found, manager, "manager", which % 101)
            case 12:
                retention.keep_house()


@contextmanager
def undone() -> Iterator[None]:
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


STEPS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 1000)), min_size=15, max_size=30)


@given(STEPS)
@settings(
    max_examples=max(4, settings().max_examples // 6),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_the_past_is_what_could_be_read_then(monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, int]]) -> None:
    """Order, priorities, shares, reasons with their numbers, settings and placed runs, after each step of a story."""
    monkeypatch.setattr(past_log, "LOGGED_EVERY", dt.timedelta(0))
    with undone():
        make_host(cpus=4, gpus=3)
        project = make_project()
        users = [join(project, make_user(), role) for role in ("member", "member", "manager")]
        queues.create_queue(project, users[2], "manager", "night")
        queue = services.find_queue(project, "default")
        queues.change_queue(queue, users[2], "manager", fair_share_minutes=60)
        UsageDay.objects.create(
            project=project, queue=queue, user=users[0], day=timezone.now().date(), gpu_ms=50 * 3_600_000
        )
        story = Story(project, users)
        for what, which in steps:
            try:
                with transaction.atomic():
                    story.act(what, which)
            except DomainError:
                continue
            story.look()
        there = {str(uid) for uid in Run.objects.values_list("uid", flat=True)}
        for queue, seen in story.seen:
            _compare(queue_at(queue, seen.at, 1000), seen, there, story.moved)


def _compare(past_queue: PastQueue, seen: Seen, there: set[str], moved: set[str]) -> None:
    """Of runs that were deleted only their places are left."""
    ids, *numbers = zip(*seen.waiting, strict=True) if seen.waiting else ((), (), (), (), ())
    priorities, penalties, reasons, data = numbers
    kept = [pk in there for pk in ids]
    assert [row.id for row in past_queue.rows] == [pk if pk in there else None for pk in ids]
    assert [row.position for row in past_queue.rows] == list(range(1, len(ids) + 1))
    assert (past_queue.waiting, past_queue.deleted) == (len(ids), kept.count(False))
    assert [row.priority for row in past_queue.rows] == list(priorities)
    assert [row.penalty_s for row in past_queue.rows] == list(penalties)
    known = zip(reasons, data, kept, strict=True)
    expected = [(reason, more) if is_kept else (None, {}) for reason, more, is_kept in known]
    assert [(row.reason, row.reason_data) for row in past_queue.rows] == expected
    assert {row.id for row in past_queue.placed} - moved == (seen.placed & there) - moved
    assert past_queue.settings == seen.settings


def test_each_row_says_what_happened_next(project: Project, member: User) -> None:
    make_host(cpus=2)
    for name in ("first", "second", "third", "fourth"):
        make_run(project, member, name, resources={"cpu": 2})
    queues.create_queue(project, member, "manager", "night")
    queue = services.ensure_queue(project)
    at = timezone.now()
    reorder.move([Run.objects.get(name="third")], member, "manager", MoveTarget("bottom"))
    place_all()
    services.stop(Run.objects.select_related("project").get(name="second"), member, "member")
    services.set_queue(Run.objects.select_related("project").get(name="third"), member, "member", "night")

    rows = {row.name: row for row in queue_at(queue, at).rows}

    assert list(rows) == ["first", "second", "third", "fourth"]
    assert [row.then for row in rows.values()] == ["provisioning", "terminated", "queue", None]
    assert rows["first"].then_at == Job.objects.get().placed_at
    assert rows["fourth"].then_at is None


def test_a_run_is_found_on_its_page_or_alone(project: Project, member: User) -> None:
    runs = [make_run(project, member, f"run-{number}") for number in range(7)]
    queue, at = runs[0].queue, timezone.now()
    services.stop(runs[0], member, "member")
    found = queue_at(queue, at, 3, run=runs[4])
    assert found.position == 5
    assert [row.name for row in found.rows] == ["run-3", "run-4", "run-5"]
    alone = queue_at(queue, at, 3, run=runs[4], alone=True)
    assert [(row.name, row.position) for row in alone.rows] == [("run-4", 5)]
    assert queue_at(queue, timezone.now(), 3, run=runs[0], alone=True).rows == []


def test_numbers_are_noted_every_five_minutes_and_a_reason_at_once() -> None:
    before = StoredWait("waiting_for_capacity", {"gpus_free": 1}, NOW)
    for minutes, reason, noted in [(4, before.reason, False), (5, before.reason, True), (1, "no_quota", True)]:
        at = NOW + minutes * MINUTE
        assert (past_log.logged_from(before, reason, at) == at) == noted
    assert past_log.logged_from(before, None, NOW + MINUTE) == NOW + MINUTE


def test_passes_fill_no_table_while_only_numbers_change(project: Project, member: User) -> None:
    make_host(cpus=4)
    make_run(project, member, "large", resources={"cpu": 4}, priority=40)
    for number in range(3):
        make_run(project, member, f"small-{number}", resources={"cpu": 1})
        place_all()
    assert Verdict.objects.get().data["cpus_free"] == 1
    assert not PastVerdict.objects.exists()
    at = timezone.now()
    Run.objects.filter(name="large").update(status=RunStatus.TERMINATED)
    retention.keep_house()
    assert PastVerdict.objects.get().data["cpus_free"] == 1
    assert past.reasons_at(services.ensure_queue(project), {PastVerdict.objects.get().shape}, at, is_paused=False)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2026-11-26T13:30", NOW - 90 * MINUTE),
        ("2026-11-26 12:30Z", NOW - 90 * MINUTE),
        ("2026-11-26T14:00:30Z", NOW),
    ],
)
def test_a_moment_is_read_in_the_readers_zone(text: str, found: dt.datetime) -> None:
    """A clock may be half a minute fast."""
    assert past.parse_moment(text, dt.timezone(dt.timedelta(hours=1)), NOW) == found


@pytest.mark.parametrize("text", ["", "yesterday", "2026-11-26T14:02Z", "2026-10-27T13:59Z", "0001-01-01T00:00+05:00"])
def test_a_moment_without_data_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        past.parse_moment(text, dt.UTC, NOW)


SETTING = st.sampled_from(["paused", "max_gpus"])


@given(st.lists(st.tuples(SETTING, st.integers(0, 3)), max_size=8), st.integers(-1, 8))
def test_settings_of_a_moment_are_the_present_ones_without_the_changes_since(
    changes: list[tuple[str, int]], at: int
) -> None:
    values = {"paused": 0, "max_gpus": 0}
    states, noted = [dict(values)], []
    for minute, (name, value) in enumerate(changes):
        noted.append((NOW + minute * MINUTE, {name: [values[name], value], "name": [None, "x"]}))
        values[name] = value
        states.append(dict(values))
    expected = states[min(at + 1, len(changes))]
    assert past.settings_at(values, noted[::-1], NOW + at * MINUTE) == expected


def test_the_statements_do_not_grow_with_the_runs_that_waited(project: Project, member: User) -> None:
    def statements() -> int:
        at = timezone.now()
        with CaptureQueriesContext(connection) as asked:
            queue_at(services.ensure_queue(project), at)
        return len(asked)

    make_host(cpus=2)
    for number in range(20):
        make_run(project, member, f"run-{number}")
        if number == 4:
            place_all()
            few = statements()
    assert statements() == few


def test_what_is_older_than_thirty_days_is_pruned(project: Project, member: User) -> None:
    run = make_run(project, member)
    now = timezone.now()
    past_log.close_places([run.pk], now - past.KEPT - MINUTE, PlaceEnd.MOVED)
    past_log.close_places([run.pk], now - past.KEPT + MINUTE, PlaceEnd.MOVED)
    for minutes in (-1, 1):
        until = now - past.KEPT + minutes * MINUTE
        PastVerdict.objects.create(queue=run.queue, shape="", since=until, until=until, reason="no_quota")
    retention.prune(now, None)
    assert PastPlace.objects.get().until == now - past.KEPT + MINUTE
    assert PastVerdict.objects.get().until == now - past.KEPT + MINUTE


def test_a_removed_run_leaves_its_place_without_a_name(project: Project, member: User) -> None:
    run = make_run(project, member, "secret-plan")
    at = timezone.now()
    services.stop(run, member, "member")
    assert removal.remove([run.pk], Q()) == 1
    [row] = queue_at(run.queue, at).rows
    assert (row.name, row.user, row.reason, row.then) == (None, None, None, "terminated")
    with pytest.raises(Conflict):
        removal.delete(make_run(project, member), member, "member")
