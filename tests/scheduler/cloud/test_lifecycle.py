"""What follows for instances and their jobs: as a table, and for generated rows and answers."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given, strategies as st

from dstackweb.backends.contract import CloudInstance, InstanceState
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.scheduler.cloud.lifecycle import (
    GIVE_UP_S,
    MISSING_S,
    ORPHANED,
    CloudState,
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
LATER, BEFORE = NOW + dt.timedelta(minutes=1), NOW - dt.timedelta(minutes=1)
S, J = InstanceStatus, JobStatus


def instance(
    status: InstanceStatus,
    cloud_id: str = "",
    ready: bool = False,
    status_s: float = 0,
    silent_s: float = 0,
    idle_until: dt.datetime | None = None,
    interrupted_at: dt.datetime | None = None,
    wanted: bool = True,
    error: str = "",
) -> Instance:
    """A row that is not stored. `ready`: its agent has called; `wanted`: its backend is enabled."""
    return Instance(
        status=status,
        cloud_id=cloud_id,
        ready_at=NOW if ready else None,
        status_s=status_s,
        silent_s=silent_s,
        idle_until=idle_until,
        interrupted_at=interrupted_at,
        backend=Backend(enabled=wanted),
        error=error,
    )


def job(
    status: JobStatus,
    claimed: bool = False,
    silent_s: float = 0,
    status_s: float = 0,
    grace_s: int = 0,
    stop_s: int = 0,
) -> Job:
    run = Run(spec={"stop_duration_s": stop_s})
    nonce = "nonce" if claimed else ""
    made = Job(run=run, status=status, claim_nonce=nonce, stop_grace_s=grace_s)
    made.silent_s, made.status_s = silent_s, status_s
    return made


seconds = st.floats(0, 1e5)
moments = st.none() | st.sampled_from([BEFORE, NOW, LATER])
rows = st.builds(
    instance, st.sampled_from(list(S)), st.sampled_from(["", "i-0"]), st.booleans(), seconds, seconds, moments,
    moments, st.booleans(),
)  # fmt: skip
jobs = st.none() | st.builds(
    job, st.sampled_from(JOB_ACTIVE), st.booleans(), seconds, seconds, st.integers(0, 600), st.integers(0, 600)
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
        (instance(S.REQUESTED, status_s=GIVE_UP_S, error="away"), job(J.PROVISIONING), None),
        (instance(S.REQUESTED, status_s=GIVE_UP_S + 1, error="away"), job(J.PROVISIONING), "unreachable"),
        (instance(S.REQUESTED, status_s=GIVE_UP_S + 1), job(J.PROVISIONING), None),
        (instance(S.STARTING, status_s=900), job(J.PROVISIONING), None),
        (instance(S.STARTING, status_s=901), job(J.PROVISIONING), "not_started"),
        (instance(S.RUNNING, status_s=301, ready=True), job(J.PROVISIONING, status_s=301), "not_started"),
        (instance(S.RUNNING, status_s=10, ready=True), job(J.PROVISIONING, status_s=1000), None),
        (instance(S.RUNNING, status_s=5000, ready=True), job(J.PROVISIONING, status_s=10), None),
        (instance(S.RUNNING, status_s=5000), job(J.PROVISIONING, claimed=True, status_s=5000), None),
        (instance(S.RUNNING, silent_s=1e5), job(J.RUNNING, True), None),
        (instance(S.RUNNING), job(J.RUNNING, True, silent_s=1e5), None),
        (instance(S.RUNNING, silent_s=1e5), job(J.RUNNING, True, silent_s=1e5), "silent"),
        (instance(S.RUNNING, interrupted_at=LATER), job(J.RUNNING, True), None),
        (instance(S.RUNNING, interrupted_at=LATER), job(J.PROVISIONING), "interrupted"),
        (instance(S.RUNNING, interrupted_at=LATER, idle_until=LATER), None, "interrupted"),
        (instance(S.RUNNING), job(J.TERMINATING, True, 0, 100, 20), None),
        (instance(S.RUNNING), job(J.TERMINATING, True, 70, 100, 20), "overdue"),
        (instance(S.RUNNING), job(J.TERMINATING, True, 0, 700, 20), "overdue"),
        (instance(S.RUNNING, idle_until=LATER), None, None),
        (instance(S.RUNNING, idle_until=LATER, wanted=False), None, "idle"),
        (instance(S.RUNNING, idle_until=LATER, silent_s=1801), None, "silent"),
        (instance(S.RUNNING, idle_until=NOW), None, "idle"),
        (instance(S.RUNNING), None, "idle"),
        (instance(S.STOPPING, status_s=1e5), None, None),
    ],
)
def test_an_instance_is_terminated_for_each_reason(row: Instance, job: Job | None, why: str | None) -> None:
    assert reason_to_end(row, job, NOW) == why


@given(rows, jobs, st.sampled_from(["unreachable", "not_started", "silent", "interrupted", "cloud"]))
def test_a_possibly_executing_job_never_gets_another_instance(row: Instance, job: Job | None, why: str) -> None:
    becomes = follow_up(row, job, why)
    if becomes is JobFollowUp.OTHER_OFFER:
        assert job is not None
        assert (job.claim_nonce, row.ready_at) == ("", None)
    if becomes is JobFollowUp.WAIT_AGAIN:
        assert job is not None
        assert not job.claim_nonce
    assert (becomes is JobFollowUp.NOTHING) == (job is None)


@given(rows, st.none() | machines)
def test_an_instance_counts_as_gone_only_if_the_cloud_confirms_it(row: Instance, machine: CloudInstance | None) -> None:
    said = cloud_state(row, machine)
    if said is CloudState.GONE:
        assert row.status != S.GONE
        assert machine.state is InstanceState.GONE if machine else min(row.status_s, row.silent_s) > MISSING_S
    if said is CloudState.ALIVE:
        assert row.status == S.STOPPING
    if row.status == S.REQUESTED and machine is None and not row.cloud_id:
        assert said is CloudState.NOTHING


@given(st.lists(machines, max_size=6), st.sampled_from(list(S)), st.sampled_from(["", "i-0"]))
def test_orphans_are_tagged_old_and_without_a_row(
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
def test_only_working_instances_stay_idle_for_reuse(row: Instance, reason: str, idle_s: int | None) -> None:
    kept = idle_time_s(row, reason, idle_s)
    assert kept in (0, idle_s)
    if kept:
        assert (row.status, row.interrupted_at, row.backend.enabled) == (S.RUNNING, None, True)
        assert reason not in ("instance_unreachable", "interrupted_by_no_capacity", "out_of_capacity")


@given(st.integers(0, 10_000), st.integers(-100, 1000))
def test_the_grace_of_a_job_ends_before_its_instance(stop_s: int, left_s: int) -> None:
    grace = grace_s(stop_s, NOW + dt.timedelta(seconds=left_s), NOW)
    assert 0 <= grace <= stop_s
    assert grace == 0 or grace <= left_s - 10
