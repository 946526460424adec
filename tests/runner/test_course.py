"""The decisions about one job, at times that the tests choose."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from dstackweb.runner.course import Course, End, exit_code, natural_end

TERM, KILL = signal.SIGTERM, signal.SIGKILL


def course(**limits: Any) -> Course:
    """A job that began at 100, with contact just before."""
    return Course(100, **{"heard": 99, "max_duration_s": None, "stop_duration_s": 20, "lost_after_s": None} | limits)


def test_without_limits_a_job_goes_on_for_ever() -> None:
    assert course().signal_due(1e9) is None


def test_max_duration_counts_from_the_start_of_the_commands_and_leaves_the_grace() -> None:
    job = course(max_duration_s=60, stop_duration_s=5)
    assert [job.signal_due(at) for at in (100, 159.9, 160, 160.1, 164.9, 165)] == [None, None, TERM, None, None, KILL]
    job.shell_ended(166, KILL)
    assert job.ended is not None
    assert (job.ended.reason, job.ended.exit_code) == ("max_duration_exceeded", 137)
    assert "60 s" in job.ended.message


def test_a_job_without_contact_for_lost_after_ends_as_an_interruption() -> None:
    job = course(lost_after_s=30)
    job.heard(110)
    assert [job.signal_due(139.9), job.signal_due(140)] == [None, TERM]
    job.shell_ended(141, 0)
    assert job.ended is not None
    assert job.ended.reason == "instance_unreachable"


def test_an_answer_that_comes_late_counts_from_when_it_was_asked_for() -> None:
    job = course(lost_after_s=30)
    job.heard(120)
    job.heard(105)
    assert job.signal_due(149.9) is None


def test_without_lost_after_silence_is_no_reason_to_stop() -> None:
    assert course().signal_due(1e7) is None


def test_a_stop_without_a_grace_of_its_own_gets_the_jobs() -> None:
    job = course()
    job.stop(200, None, "terminated_by_user")
    assert [job.signal_due(at) for at in (200, 219.9, 220)] == [TERM, None, KILL]


def test_an_abort_kills_without_asking() -> None:
    job = course()
    job.stop(200, 0, "aborted_by_user")
    assert job.signal_due(200) == KILL


def test_an_abort_hastens_a_stop_and_a_later_stop_gives_no_more_time() -> None:
    job = course()
    job.stop(200, 20, "terminated_by_user")
    assert job.signal_due(200) == TERM
    job.stop(205, 20, "terminated_by_user")
    assert [job.signal_due(219.9), job.signal_due(220)] == [None, KILL]
    job = course()
    job.stop(200, 20, "terminated_by_user")
    job.signal_due(200)
    job.stop(201, 0, "aborted_by_user")
    assert job.signal_due(201) == KILL


def test_a_kill_is_repeated_for_what_was_forked_meanwhile_but_not_at_full_speed() -> None:
    job = course()
    job.stop(200, 0, "aborted_by_user")
    assert [job.signal_due(at) for at in (200, 200.05, 200.2)] == [KILL, None, KILL]


def test_what_commands_leave_behind_may_end_by_itself_then_is_asked_then_killed() -> None:
    job = course()
    job.shell_ended(200, 0)
    assert [job.signal_due(at) for at in (200.9, 201, 205.9, 206)] == [None, TERM, None, KILL]
    assert job.ended == End(0, "done_by_runner")


def test_a_child_that_still_saves_its_work_keeps_its_grace_when_the_shell_has_gone() -> None:
    job = course()
    job.stop(200, 20, "terminated_by_user")
    job.signal_due(200)
    job.shell_ended(200.1, TERM)
    assert [job.signal_due(at) for at in (219.9, 220)] == [None, KILL]


def test_commands_that_were_over_before_the_stop_have_ended_by_themselves() -> None:
    job = course(max_duration_s=100.5)
    job.shell_ended(200, 3 << 8)
    job.stop(200.1, 0, "terminated_by_user")
    job.signal_due(201)
    assert job.ended is not None
    assert (job.ended.reason, job.ended.exit_code) == ("container_exited_with_error", 3)


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3 << 8, 3), (9, 137), (15, 143), (11 | 0x80, 139)])
def test_exit_codes_are_told_as_shells_tell_them(status: int, code: int) -> None:
    assert exit_code(status) == code


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "a command failed with exit code 1"),
        (127, "command not found (exit code 127)"),
        (126, "can't be executed (exit code 126)"),
        (137, "killed by SIGKILL (exit code 137), often for want of memory"),
        (139, "killed by SIGSEGV (exit code 139)"),
        (255, "a command failed with exit code 255"),
    ],
)
def test_a_failure_says_in_words_what_its_code_means(code: int, words: str) -> None:
    end = natural_end(code)
    assert (end.exit_code, end.reason) == (code, "container_exited_with_error")
    assert words in end.message
