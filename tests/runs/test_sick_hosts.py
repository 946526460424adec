"""A host on which commands can't be executed is held back, and not one on which people make mistakes."""

from __future__ import annotations

import datetime as dt
from itertools import combinations

import pytest
from django.utils import timezone
from hypothesis import given, strategies as st

from dstackweb.accounts.models import Project, User
from dstackweb.backends.hosts import inventory
from dstackweb.backends.models import Host, HostEvent, StartError
from dstackweb.runs import attempts
from dstackweb.runs.models import Job, Run
from dstackweb.runs.sick_hosts import AT_ONCE, NOT_EXECUTED, WINDOW, Execution, executes_nothing
from dstackweb.runs.states import Reason
from dstackweb.wording import hosts as host_words
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job, start

NOW = dt.datetime(2026, 11, 29, 8, 0, tzinfo=dt.UTC)
SICK, WELL = 1, 2


@st.composite
def executions(draw: st.DrawFn) -> list[Execution]:
    """Of eight runs of two members, who each own every second one."""
    found = []
    for run in draw(st.lists(st.integers(0, 7), max_size=8)):
        started_at = NOW - draw(st.sampled_from([WINDOW + AT_ONCE, WINDOW - AT_ONCE, AT_ONCE]))
        took = draw(st.sampled_from([None, AT_ONCE / 5, AT_ONCE, AT_ONCE * 1.01]))
        code = None if took is None else draw(st.sampled_from([0, 1, 126, 127]))
        host = draw(st.sampled_from([SICK, SICK, SICK, WELL, None]))
        found.append(Execution(run, run % 2, host, started_at, None if took is None else started_at + took, code))
    return found


def is_sick(seen: list[Execution]) -> bool:
    """As the rule is written, for every three."""

    def fails(one: Execution) -> bool:
        return (
            one.host == SICK and one.ended_at is not None and one.exit_code in (126, 127)
            and (one.ended_at - one.started_at).total_seconds() <= 5
        )  # fmt: skip

    def works(one: Execution) -> bool:
        at_once = one.ended_at is not None and (one.ended_at - one.started_at).total_seconds() <= 5
        return one.host != SICK and not (at_once and one.exit_code in (126, 127))

    lately = [one for one in seen if (NOW - one.started_at).total_seconds() < 60]
    return any(
        len({one.run for one in three}) == 3
        and (
            len({one.user for one in three}) > 1
            or any(works(other) and other.user == three[0].user for other in lately)
        )
        for three in combinations([one for one in lately if fails(one)], 3)
    )


@given(executions())
def test_the_decision_is_that_of_brute_force(seen: list[Execution]) -> None:
    assert executes_nothing(SICK, seen, NOW) == is_sick(seen)


def fail(run: Run, code: int = 127) -> None:
    job = start(placed_job(run))
    attempts.report_end(job.pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=code)


@pytest.mark.django_db
@pytest.mark.both_sides
@pytest.mark.parametrize("code", NOT_EXECUTED)
def test_a_host_on_which_three_runs_of_two_members_end_at_once_is_held_back_and_says_why(
    project: Project, member: User, code: int
) -> None:
    host = make_host()
    other = join(project, make_user("bob"))
    runs = [make_run(project, user) for user in (member, other, member)]
    waiting = make_run(project, member)
    place_all()
    for run in runs:
        assert not Host.objects.exclude(held_back_at=None).exists()
        fail(run, code)
    host.refresh_from_db()
    assert host.held_back_at is not None
    assert host_words.start_error(host.start_error).endswith("(126, 127)")
    (event,) = HostEvent.objects.all()
    assert host_words.event_text(event).startswith("held back because starts fail: commands of three runs ended")
    attempts.return_job(placed_job(waiting).pk)
    assert place_all() == 0
    assert inventory.clear_failed_starts(host.pk, timezone.now(), after_probe=True)
    assert place_all() == 1


@pytest.mark.django_db
@pytest.mark.both_sides
def test_a_member_whose_runs_fail_everywhere_holds_no_host_back_and_one_whose_runs_work_elsewhere_does(
    project: Project, member: User
) -> None:
    make_host("sick", cpus=4)
    runs = [make_run(project, member) for _ in range(4)]
    place_all()
    for run in runs[:3]:
        fail(run)
    assert not Host.objects.exclude(held_back_at=None).exists()
    make_host("well")
    Host.objects.filter(name="sick").update(draining=True)
    working = make_run(project, member)
    place_all()
    start(placed_job(working))
    fail(runs[3])
    assert [host.name for host in Host.objects.exclude(held_back_at=None)] == ["sick"]


@pytest.mark.django_db
def test_commands_that_fail_otherwise_or_later_hold_no_host_back(project: Project, member: User) -> None:
    make_host()
    other = join(project, make_user("bob"))
    for user, code, took_s in ((member, 1, 0), (other, 2, 0), (member, 127, 6), (other, 126, 6), (member, 127, 0)):
        run = make_run(project, user)
        place_all()
        job = start(placed_job(run))
        Job.objects.filter(pk=job.pk).update(started_at=timezone.now() - dt.timedelta(seconds=took_s))
        attempts.report_end(job.pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=code)
    assert not Host.objects.exclude(held_back_at=None).exists()


def test_the_command_line_words_the_code() -> None:
    from dstackweb.cli.hosts import error_of

    text = error_of({"error": "", "start_error": StartError.COMMANDS_FAIL})
    assert text == host_words.start_error(StartError.COMMANDS_FAIL)
