"""A run with a schedule recurs."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Membership, Project, User
from dstackweb.lib.errors import Conflict
from dstackweb.lib.secrets import decrypt
from dstackweb.runs import attempts, recurrence, selectors, services
from dstackweb.runs.models import Queue, Run, RunEvent
from dstackweb.runs.queue import ordering
from dstackweb.runs.recount import differences
from dstackweb.runs.recurrence import next_time, seniority_us
from dstackweb.runs.rows import queue_rows
from dstackweb.runs.states import Reason, RunStatus
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db

CRON = "0 2 * * *"
DAY = dt.timedelta(days=1)


def nightly(project: Project, user: User, **keys: Any) -> Run:
    return make_run(project, user, "nightly", schedule={"cron": CRON}, **keys)


def place(run: Run) -> Run:
    """Let its time come, and a pass place it."""
    due = Run.objects.get(pk=run.pk).retry_at
    assert due is not None
    attempts.requeue_due(due)
    place_all()
    start(placed_job(run))
    return Run.objects.get(pk=run.pk)


def end(run: Run, reason: str = Reason.DONE_BY_RUNNER, exit_code: int = 0) -> Run:
    attempts.end_job(placed_job(run).pk, reason, exit_code=exit_code)
    return Run.objects.get(pk=run.pk)


def newest() -> Run:
    return Run.objects.select_related("queue").order_by("-id")[0]


def kinds(run: Run) -> list[str]:
    return list(RunEvent.objects.filter(run=run).order_by("id").values_list("kind", flat=True))


@pytest.fixture
def box(project: Project) -> None:
    make_host()


def test_its_seniority_is_its_time_so_that_waiting_for_the_hour_ages_nothing(project: Project, member: User) -> None:
    before = timezone.now()
    run = nightly(project, member, priority=60)
    assert run.retry_at is not None
    assert run.retry_at >= next_time([CRON], before)
    assert run.seniority_us == seniority_us(run.retry_at)
    assert run.rank == ordering.rank(run.seniority_us, 60, run.queue.step_us)
    assert Queue.objects.get(pk=run.queue_id).last_seniority_us < run.seniority_us


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (Reason.DONE_BY_RUNNER, "done"),
        (Reason.CONTAINER_EXITED_WITH_ERROR, "failed"),
        (Reason.MAX_DURATION_EXCEEDED, "terminated"),
    ],
)
def test_it_recurs_however_it_ended_by_itself(
    project: Project, member: User, box: None, reason: Reason, status: str
) -> None:
    first = end(place(nightly(project, member)), reason)
    assert (first.status, recurrence.create_occurrences(timezone.now())) == (status, 1)
    second = newest()
    assert second.pk != first.pk
    assert (second.name, second.status, second.attempt, second.user) == ("nightly", RunStatus.PENDING, 1, member)
    assert second.retry_at is not None
    assert second.retry_at > timezone.now()
    assert second.seniority_us == seniority_us(second.retry_at)
    scheduled = second.events.get(kind="scheduled")
    assert scheduled.data == {"previous": str(first.uid), "at": second.retry_at.isoformat()}
    assert first.events.get(kind="next_scheduled").data["next"] == str(second.uid)
    assert list(differences()) == []


def test_a_clock_that_is_behind_makes_no_second_one_of_the_same_hour(project: Project, member: User, box: None) -> None:
    """Its end is reported to another machine than the one that queued it."""
    first = nightly(project, member)
    due = first.retry_at
    assert due is not None
    assert due > timezone.now()
    assert end(place(first)).retry_at == due + DAY


def test_checking_again_makes_no_second_one(project: Project, member: User, box: None) -> None:
    end(place(nightly(project, member)))
    assert [recurrence.create_occurrences(timezone.now()) for _ in range(3)] == [1, 0, 0]
    assert Run.objects.count() == 2


def test_of_two_concurrent_processes_one_creates_the_occurrence(project: Project, member: User, box: None) -> None:
    """What a second process read before the first one had committed."""
    first = end(place(nightly(project, member)))
    read = Run.objects.select_related("queue", "project", "user").get(pk=first.pk)
    recurrence.create_occurrences(timezone.now())
    second = newest()
    services.stop(second, member, "member")
    recurrence._create(read, timezone.now())
    assert Run.objects.count() == 2


def test_one_unreadable_run_does_not_block_other_schedules(project: Project, member: User, box: None) -> None:
    for name in ("broken", "other"):
        end(place(make_run(project, member, name, schedule={"cron": CRON})))
    Run.objects.filter(name="broken").update(spec={"type": "no longer known"})
    with pytest.raises(KeyError):
        recurrence.create_occurrences(timezone.now())
    assert newest().name == "other"
    assert newest().status == RunStatus.PENDING


def test_each_occurrence_keeps_the_code_and_the_masked_values(project: Project, member: User, box: None) -> None:
    config = {"type": "task", "name": "nightly", "commands": ["true"], "env": ["KEY"], "schedule": {"cron": CRON}}
    run, _ = services.submit(project, member, "member", services.Submission(config, env={"KEY": "hidden"}))
    for _ in range(3):
        end(place(run))
        recurrence.create_occurrences(timezone.now())
        run = newest()
    assert decrypt(run.env_secret) == '{"KEY": "hidden"}'
    assert Run.objects.filter(name="nightly").count() == 4
    assert run.config_text


def test_a_running_occurrence_prevents_a_second_one(project: Project, member: User, box: None) -> None:
    place(nightly(project, member))
    assert recurrence.create_occurrences(timezone.now() + 3 * DAY) == 0
    assert attempts.requeue_due(timezone.now() + 3 * DAY) == 0


def test_a_retry_creates_no_next_occurrence(project: Project, member: User, box: None) -> None:
    run = place(nightly(project, member, retry=True))
    again = end(run, Reason.CONTAINER_EXITED_WITH_ERROR, 1)
    assert (again.status, again.attempt, again.seniority_us) == (RunStatus.PENDING, 2, run.seniority_us)
    assert recurrence.create_occurrences(timezone.now()) == 0


@pytest.mark.parametrize("when", ["pending", "submitted", "running"])
def test_a_stop_by_a_user_ends_the_schedule(project: Project, member: User, box: None, when: str) -> None:
    run = nightly(project, member)
    if when == "submitted":
        attempts.requeue_due(timezone.now() + DAY)
    elif when == "running":
        place(run)
    services.stop(Run.objects.select_related("queue", "project", "user").get(pk=run.pk), member, "member")
    if when == "running":
        end(run, Reason.TERMINATED_BY_USER, 143)
    run.refresh_from_db()
    assert (run.status, run.retry_at) == (RunStatus.TERMINATED, None)
    assert recurrence.create_occurrences(timezone.now()) == 0


def test_after_a_long_outage_a_schedule_runs_once(project: Project, member: User, box: None) -> None:
    nightly(project, member)
    later = timezone.now() + 30 * DAY
    assert [attempts.requeue_due(later) for _ in range(2)] == [1, 0]
    assert Run.objects.count() == 1


def test_a_time_that_was_missed_is_left_out(project: Project, member: User, box: None) -> None:
    end(place(nightly(project, member)))
    later = timezone.now() + 30 * DAY
    recurrence.create_occurrences(later)
    assert newest().retry_at == next_time([CRON], later)


def test_a_taken_name_is_recorded_once_and_retried(project: Project, member: User, box: None) -> None:
    first = end(place(nightly(project, member)))
    other = make_run(project, member, "nightly")
    assert [recurrence.create_occurrences(timezone.now()) for _ in range(3)] == [0, 0, 0]
    assert kinds(first).count("schedule_waits") == 1
    services.stop(other, member, "member")
    assert recurrence.create_occurrences(timezone.now()) == 1
    assert list(differences()) == []


def test_a_name_taken_between_check_and_write_changes_nothing(
    project: Project, member: User, box: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(place(nightly(project, member)))
    make_run(project, member, "nightly")
    monkeypatch.setattr(recurrence, "blocked_by", lambda run: "")
    assert recurrence.create_occurrences(timezone.now()) == 0
    assert list(differences()) == []


def test_a_draining_queue_keeps_it_waiting_and_loses_nothing(project: Project, member: User, box: None) -> None:
    first = end(place(nightly(project, member)))
    Queue.objects.update(draining=True)
    assert recurrence.create_occurrences(timezone.now()) == 0
    assert first.events.get(kind="schedule_waits").data == {"reason": "draining"}
    Queue.objects.update(draining=False)
    assert recurrence.create_occurrences(timezone.now()) == 1


def test_a_stop_of_the_last_run_ends_a_schedule_that_waits(project: Project, member: User, box: None) -> None:
    first = end(place(nightly(project, member)))
    Queue.objects.update(draining=True)
    recurrence.create_occurrences(timezone.now())
    assert services.stop(first, member, "member").status == RunStatus.DONE
    Queue.objects.update(draining=False)
    assert recurrence.create_occurrences(timezone.now()) == 0
    ended = first.events.get(kind="schedule_ended")
    assert (ended.data, ended.actor) == ({"reason": "stopped"}, member)
    with pytest.raises(Conflict, match="already ended"):
        services.stop(first, member, "member")


def test_it_stays_in_the_queue_that_it_was_moved_to(project: Project, member: User, box: None) -> None:
    run = nightly(project, member)
    night = services.ensure_queue(project, "night")
    services.set_queue(run, member, "member", "night")
    end(place(run))
    recurrence.create_occurrences(timezone.now())
    assert newest().queue == night


def test_a_scheduled_run_moved_to_another_queue_does_not_delay_later_submissions(
    project: Project, member: User
) -> None:
    """Else all that is submitted there would stand behind every run that comes before that hour."""
    services.ensure_queue(project, "night")
    yearly = make_run(project, member, "yearly", schedule={"cron": "0 2 1 1 *"})
    services.set_queue(yearly, member, "member", "night")
    later = make_run(project, member, queue="night")
    assert later.seniority_us <= seniority_us(timezone.now())


def test_a_priority_of_one_night_is_not_that_of_the_next(project: Project, member: User, box: None) -> None:
    run = nightly(project, member, priority=40)
    services.set_priority(run, member, "manager", 90)
    end(place(run))
    recurrence.create_occurrences(timezone.now())
    assert newest().priority == 40


def test_the_schedule_of_a_member_who_left_ends_with_an_event(project: Project, box: None) -> None:
    ada = join(project, make_user("guest"))
    first = end(place(nightly(project, ada)))
    Membership.objects.filter(user=ada).delete()
    assert recurrence.create_occurrences(timezone.now()) == 0
    first.refresh_from_db()
    assert first.retry_at is None
    assert first.events.get(kind="schedule_ended").data == {"reason": "no_member", "user": "guest"}


def test_a_pending_run_holds_no_position(project: Project, member: User, box: None) -> None:
    """Neither one that waits for its hour nor one that waits to be tried again."""
    waiting = nightly(project, member)
    assert selectors.position(waiting) is None
    assert queue_rows(waiting.queue) == []
    other = make_run(project, member, "other")
    assert selectors.position(other) == 1
    assert place_all() == 1
