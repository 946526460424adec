from __future__ import annotations

from dataclasses import replace

import pytest

from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.placement.after_restore import StartedJob, Step, decide

JOB = StartedJob("j", 1, attempt=2, node=0, nodes=1, cpus=1, memory_mib=1, gpus=(), nonce="n", ended=True)
FIRST, SECOND = replace(JOB, id="first", nodes=2), replace(JOB, id="second", node=1, nodes=2)


@pytest.mark.parametrize("status", [RunStatus.SUBMITTED, RunStatus.PENDING])
@pytest.mark.parametrize("attempt", [1, 2])
def test_a_waiting_run_is_taken_back_at_its_newest_attempt(status: RunStatus, attempt: int) -> None:
    earlier = replace(JOB, id="earlier", attempt=1)
    assert decide(status, attempt, [earlier, JOB], is_last=False) == (Step.TAKE, [JOB])


def test_jobs_of_an_attempt_that_the_backup_has_left_behind_are_of_no_use() -> None:
    assert decide(RunStatus.SUBMITTED, 3, [JOB], is_last=False) == (Step.NOTHING, ())


@pytest.mark.parametrize("status", [RunStatus.DONE, RunStatus.FAILED, RunStatus.TERMINATED])
def test_an_ended_run_stays_as_it_is(status: RunStatus) -> None:
    assert decide(status, 1, [JOB], is_last=True) == (Step.NOTHING, ())


@pytest.mark.parametrize("status", [RunStatus.PROVISIONING, RunStatus.RUNNING, RunStatus.TERMINATING])
def test_the_end_of_a_placed_attempt_is_waited_for_and_then_concluded_from_a_later_one(status: RunStatus) -> None:
    assert decide(status, 1, [JOB], is_last=False) == (Step.WAIT, ())
    assert decide(status, 1, [JOB], is_last=True) == (Step.END_ATTEMPT, ())
    assert decide(status, 2, [JOB], is_last=True) == (Step.NOTHING, ())


def test_of_a_node_that_was_started_twice_one_that_has_ended_counts() -> None:
    again = replace(JOB, id="again", ended=False)
    assert decide(RunStatus.SUBMITTED, 2, [JOB, again], is_last=False) == (Step.TAKE, [JOB])
    assert decide(RunStatus.SUBMITTED, 2, [again, JOB], is_last=False) == (Step.TAKE, [JOB])


def test_all_nodes_are_taken_back_together() -> None:
    assert decide(RunStatus.SUBMITTED, 1, [SECOND, FIRST], is_last=False) == (Step.TAKE, [FIRST, SECOND])
    assert decide(RunStatus.SUBMITTED, 1, [SECOND], is_last=False) == (Step.WAIT, ())
    assert decide(RunStatus.SUBMITTED, 1, [SECOND], is_last=True) == (Step.TAKE_AND_END, [SECOND])
