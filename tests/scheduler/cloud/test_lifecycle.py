"""What follows for machines and their jobs, as a table and for whatever rows and answers there are."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstackweb.backends.contract import CloudInstance, InstanceState
from dstackweb.backends.models import InstanceStatus
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.scheduler.cloud.lifecycle import (
    GIVE_UP_S,
    MISSING_S,
    ORPHANED,
    CloudState,
    Deadlines,
    InstanceJob,
    InstanceView,
    JobFollowUp,
    cloud_state,
    find_instance,
    find_orphans,
    follow_up,
    grace_s,
    idle_time_s,
    reason_to_end,
)

NOW = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
RULES = Deadlines(start_s=900, claim_s=300, lost_after_s=1800)
LATER, BEFORE = NOW + dt.timedelta(minutes=1), NOW - dt.timedelta(minutes=1)
S, J = InstanceStatus, JobStatus

seconds = st.floats(0, 1e5)
moments = st.none() | st.sampled_from([BEFORE, NOW, LATER])
rows = st.builds(
    InstanceView, st.sampled_from(list(S)), st.sampled_from(["", "i-0"]), st.booleans(), seconds, seconds, moments,
    moments, st.booleans(),
)  # fmt: skip
jobs = st.none() | st.builds(
    InstanceJob, st.sampled_from(JOB_ACTIVE), st.booleans(), seconds, seconds, st.integers(0, 600), st.integers(0, 600)
)
machines = st.builds(
    CloudInstance,
    st.sampled_from(["a", "b", ""]),
    st.sampled_from(["i-0", "i-1", "i-2"]),
    st.just("eu"),
    st.sampled_from(list(InstanceState)),
    launched_at=st.none() | st.sampled_from([NOW - ORPHANED, NOW - 2 * ORPHANED, NOW]),
)


@pytest.mark.parametrize(
    ("row", "job", "why"),
    [
        (InstanceView(S.REQUESTED, status_s=GIVE_UP_S), InstanceJob(J.PROVISIONING), None),
        (InstanceView(S.REQUESTED, status_s=GIVE_UP_S + 1), InstanceJob(J.PROVISIONING), "unreachable"),
        (InstanceView(S.STARTING, status_s=900), InstanceJob(J.PROVISIONING), None),
        (InstanceView(S.STARTING, status_s=901), InstanceJob(J.PROVISIONING), "not_started"),
        (InstanceView(S.RUNNING, status_s=301, ready=True), InstanceJob(J.PROVISIONING, status_s=301), "not_started"),
        (InstanceView(S.RUNNING, status_s=10, ready=True), InstanceJob(J.PROVISIONING, status_s=1000), None),
        (InstanceView(S.RUNNING, status_s=5000, ready=True), InstanceJob(J.PROVISIONING, status_s=10), None),
        (InstanceView(S.RUNNING, status_s=5000), InstanceJob(J.PROVISIONING, claimed=True, status_s=5000), None),
        (InstanceView(S.RUNNING, silent_s=1e5), InstanceJob(J.RUNNING, True), None),
        (InstanceView(S.RUNNING), InstanceJob(J.RUNNING, True, silent_s=1e5), None),
        (InstanceView(S.RUNNING, silent_s=1e5), InstanceJob(J.RUNNING, True, silent_s=1e5), "silent"),
        (InstanceView(S.RUNNING, interrupted_at=LATER), InstanceJob(J.RUNNING, True), None),
        (InstanceView(S.RUNNING, interrupted_at=LATER), InstanceJob(J.PROVISIONING), "interrupted"),
        (InstanceView(S.RUNNING, interrupted_at=LATER, idle_until=LATER), None, "interrupted"),
        (InstanceView(S.RUNNING), InstanceJob(J.TERMINATING, True, 0, 100, 20), None),
        (InstanceView(S.RUNNING), InstanceJob(J.TERMINATING, True, 70, 100, 20), "overdue"),
        (InstanceView(S.RUNNING), InstanceJob(J.TERMINATING, True, 0, 700, 20), "overdue"),
        (InstanceView(S.RUNNING, idle_until=LATER), None, None),
        (InstanceView(S.RUNNING, idle_until=LATER, wanted=False), None, "idle"),
        (InstanceView(S.RUNNING, idle_until=LATER, silent_s=1801), None, "silent"),
        (InstanceView(S.RUNNING, idle_until=NOW), None, "idle"),
        (InstanceView(S.RUNNING), None, "idle"),
        (InstanceView(S.STOPPING, status_s=1e5), None, None),
    ],
)
def test_when_a_machine_is_to_end(row: InstanceView, job: InstanceJob | None, why: str | None) -> None:
    assert reason_to_end(row, job, NOW, RULES) == why


@given(rows, jobs, st.sampled_from(["unreachable", "not_started", "silent", "interrupted", "cloud"]))
def test_a_job_that_may_have_been_executing_never_gets_another_machine(
    row: InstanceView, job: InstanceJob | None, why: str
) -> None:
    becomes = follow_up(row, job, why)
    if becomes is JobFollowUp.OTHER_OFFER:
        assert job is not None
        assert (job.claimed, row.ready) == (False, False)
    if becomes is JobFollowUp.WAIT_AGAIN:
        assert job is not None
        assert not job.claimed
    assert (becomes is JobFollowUp.NOTHING) == (job is None)


@given(rows, st.none() | machines)
def test_a_row_is_gone_only_by_the_cloud_s_word(row: InstanceView, machine: CloudInstance | None) -> None:
    said = cloud_state(row, machine)
    if said is CloudState.GONE:
        assert row.status != S.GONE
        assert machine.state is InstanceState.GONE if machine else min(row.status_s, row.silent_s) > MISSING_S
    if said is CloudState.ALIVE:
        assert row.status == S.STOPPING
    if row.status == S.REQUESTED and machine is None and not row.cloud_id:
        assert said is CloudState.NOTHING


@given(st.lists(machines, max_size=6), st.sampled_from(list(S)), st.sampled_from(["", "i-0"]))
def test_orphans_are_tagged_old_and_wanted_by_nobody(
    there: list[CloudInstance], status: InstanceStatus, cloud_id: str
) -> None:
    known = {"a": (status, cloud_id)}
    for machine in find_orphans(there, known, NOW):
        assert machine.launched_at == NOW - 2 * ORPHANED
        assert machine.instance != "a" or status == S.GONE or machine.cloud_id != cloud_id != ""
    mine = find_instance(there, "a", cloud_id)
    if mine is not None and status != S.GONE:
        assert all(orphan is not mine for orphan in find_orphans(there, known, NOW) if orphan.cloud_id == cloud_id)


@given(rows, st.sampled_from([str(reason) for reason in Reason]), st.none() | st.integers(0, 3600))
def test_only_what_works_is_kept(row: InstanceView, reason: str, idle_s: int | None) -> None:
    kept = idle_time_s(row, reason, idle_s)
    assert kept in (0, idle_s)
    if kept:
        assert (row.status, row.interrupted_at, row.wanted) == (S.RUNNING, None, True)
        assert reason not in ("instance_unreachable", "interrupted_by_no_capacity", "out_of_capacity")


@given(st.integers(0, 10_000), st.integers(-100, 1000))
def test_a_grace_ends_before_the_machine_does(stop_s: int, left_s: int) -> None:
    grace = grace_s(stop_s, NOW + dt.timedelta(seconds=left_s), NOW)
    assert 0 <= grace <= stop_s
    assert grace == 0 or grace <= left_s - 10
