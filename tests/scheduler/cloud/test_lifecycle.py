"""What follows for machines and their jobs, as a table and for whatever rows and answers there are."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstackweb.backends.contract import Machine, MachineState
from dstackweb.backends.models import InstanceStatus
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.scheduler.cloud.lifecycle import (
    GIVE_UP_S,
    MISSING_S,
    ORPHANED,
    After,
    Row,
    Rules,
    Served,
    Told,
    after,
    grace_s,
    kept_s,
    match,
    orphans,
    overdue,
    told,
)

NOW = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
RULES = Rules(start_s=900, claim_s=300, lost_after_s=1800)
LATER, BEFORE = NOW + dt.timedelta(minutes=1), NOW - dt.timedelta(minutes=1)
S, J = InstanceStatus, JobStatus

seconds = st.floats(0, 1e5)
moments = st.none() | st.sampled_from([BEFORE, NOW, LATER])
rows = st.builds(
    Row, st.sampled_from(list(S)), st.sampled_from(["", "i-0"]), st.booleans(), seconds, seconds, moments, moments,
    st.booleans(),
)  # fmt: skip
jobs = st.none() | st.builds(
    Served, st.sampled_from(JOB_ACTIVE), st.booleans(), seconds, seconds, st.integers(0, 600), st.integers(0, 600)
)
machines = st.builds(
    Machine,
    st.sampled_from(["a", "b", ""]),
    st.sampled_from(["i-0", "i-1", "i-2"]),
    st.just("eu"),
    st.sampled_from(list(MachineState)),
    launched_at=st.none() | st.sampled_from([NOW - ORPHANED, NOW - 2 * ORPHANED, NOW]),
)


@pytest.mark.parametrize(
    ("row", "job", "why"),
    [
        (Row(S.REQUESTED, status_s=GIVE_UP_S), Served(J.PROVISIONING), None),
        (Row(S.REQUESTED, status_s=GIVE_UP_S + 1), Served(J.PROVISIONING), "unreachable"),
        (Row(S.STARTING, status_s=900), Served(J.PROVISIONING), None),
        (Row(S.STARTING, status_s=901), Served(J.PROVISIONING), "not_started"),
        (Row(S.RUNNING, status_s=301, ready=True), Served(J.PROVISIONING, status_s=301), "not_started"),
        (Row(S.RUNNING, status_s=10, ready=True), Served(J.PROVISIONING, status_s=1000), None),
        (Row(S.RUNNING, status_s=5000, ready=True), Served(J.PROVISIONING, status_s=10), None),
        (Row(S.RUNNING, status_s=5000), Served(J.PROVISIONING, claimed=True, status_s=5000), None),
        (Row(S.RUNNING, silent_s=1e5), Served(J.RUNNING, True), None),
        (Row(S.RUNNING), Served(J.RUNNING, True, silent_s=1e5), None),
        (Row(S.RUNNING, silent_s=1e5), Served(J.RUNNING, True, silent_s=1e5), "silent"),
        (Row(S.RUNNING, interrupted_at=LATER), Served(J.RUNNING, True), None),
        (Row(S.RUNNING, interrupted_at=LATER), Served(J.PROVISIONING), "interrupted"),
        (Row(S.RUNNING, interrupted_at=LATER, idle_until=LATER), None, "interrupted"),
        (Row(S.RUNNING), Served(J.TERMINATING, True, 0, 100, 20), None),
        (Row(S.RUNNING), Served(J.TERMINATING, True, 70, 100, 20), "overdue"),
        (Row(S.RUNNING), Served(J.TERMINATING, True, 0, 700, 20), "overdue"),
        (Row(S.RUNNING, idle_until=LATER), None, None),
        (Row(S.RUNNING, idle_until=LATER, wanted=False), None, "idle"),
        (Row(S.RUNNING, idle_until=LATER, silent_s=1801), None, "silent"),
        (Row(S.RUNNING, idle_until=NOW), None, "idle"),
        (Row(S.RUNNING), None, "idle"),
        (Row(S.STOPPING, status_s=1e5), None, None),
    ],
)
def test_when_a_machine_is_to_end(row: Row, job: Served | None, why: str | None) -> None:
    assert overdue(row, job, NOW, RULES) == why


@given(rows, jobs, st.sampled_from(["unreachable", "not_started", "silent", "interrupted", "cloud"]))
def test_a_job_that_may_have_been_executing_never_gets_another_machine(row: Row, job: Served | None, why: str) -> None:
    becomes = after(row, job, why)
    if becomes is After.OTHER_OFFER:
        assert job is not None
        assert (job.claimed, row.ready) == (False, False)
    if becomes is After.WAIT_AGAIN:
        assert job is not None
        assert not job.claimed
    assert (becomes is After.NOTHING) == (job is None)


@given(rows, st.none() | machines)
def test_a_row_is_gone_only_by_the_cloud_s_word(row: Row, machine: Machine | None) -> None:
    said = told(row, machine)
    if said is Told.GONE:
        assert row.status != S.GONE
        assert machine.state is MachineState.GONE if machine else min(row.status_s, row.silent_s) > MISSING_S
    if said is Told.ALIVE:
        assert row.status == S.STOPPING
    if row.status == S.REQUESTED and machine is None and not row.cloud_id:
        assert said is Told.NOTHING


@given(st.lists(machines, max_size=6), st.sampled_from(list(S)), st.sampled_from(["", "i-0"]))
def test_orphans_are_tagged_old_and_wanted_by_nobody(
    there: list[Machine], status: InstanceStatus, cloud_id: str
) -> None:
    known = {"a": (status, cloud_id)}
    for machine in orphans(there, known, NOW):
        assert machine.launched_at == NOW - 2 * ORPHANED
        assert machine.instance != "a" or status == S.GONE or machine.cloud_id != cloud_id != ""
    mine = match(there, "a", cloud_id)
    if mine is not None and status != S.GONE:
        assert all(orphan is not mine for orphan in orphans(there, known, NOW) if orphan.cloud_id == cloud_id)


@given(rows, st.sampled_from([str(reason) for reason in Reason]), st.none() | st.integers(0, 3600))
def test_only_what_works_is_kept(row: Row, reason: str, idle_s: int | None) -> None:
    kept = kept_s(row, reason, idle_s)
    assert kept in (0, idle_s)
    if kept:
        assert (row.status, row.interrupted_at, row.wanted) == (S.RUNNING, None, True)
        assert reason not in ("instance_unreachable", "interrupted_by_no_capacity", "out_of_capacity")


@given(st.integers(0, 10_000), st.integers(-100, 1000))
def test_a_grace_ends_before_the_machine_does(stop_s: int, left_s: int) -> None:
    grace = grace_s(stop_s, NOW + dt.timedelta(seconds=left_s), NOW)
    assert 0 <= grace <= stop_s
    assert grace == 0 or grace <= left_s - 10
