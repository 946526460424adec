"""Holds: GPUs for interactive work."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Conflict, Forbidden, Invalid
from dstackweb.profiles.models import Profile
from dstackweb.runs import attempts, holds, services
from dstackweb.runs.launch import runner_spec
from dstackweb.runs.models import Job, Queue, Run
from dstackweb.runs.recount import differences
from dstackweb.runs.selectors import jobs_of
from dstackweb.runs.states import Reason, RunStatus
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db
HOUR = 3600


def hold(project: Project, user: User, role: str = "member", **wanted: Any) -> Run:
    return holds.submit_hold(project, user, role, holds.HoldRequest(**{"duration": "3h", "gpu": "1", **wanted}))


def begun(run: Run, at: dt.datetime | None = None) -> Job:
    """Place it and start it, at a moment of one's choice."""
    place_all()
    job = start(placed_job(run))
    if at is not None:
        Job.objects.filter(pk=job.pk).update(started_at=at)
        Run.objects.filter(pk=run.pk).update(started_at=at)
    return job


def fresh(run: Run) -> Run:
    return Run.objects.select_related("queue", "project", "user").get(pk=run.pk)


def test_a_hold_is_an_ordinary_run_in_the_ordinary_queue(project: Project, member: User) -> None:
    run = hold(project, member, gpu="A100:2", cpu="4", memory="8GB", priority=60)
    assert (run.status, run.is_hold, run.priority, run.name[:5]) == ("submitted", True, 60, "hold-")
    wants = run.spec["requirements"]
    assert (wants["gpu_count_min"], wants["gpu_names"], wants["cpu_min"], run.spec["max_duration_s"]) == (
        2,
        ["A100"],
        4,
        3 * HOUR,
    )
    assert run.held_until is None


def test_a_hold_waits_for_its_gpus_and_keeps_them_until_its_end(project: Project, member: User) -> None:
    make_host(gpus=1, address="10.0.0.5")
    busy = make_run(project, member, "busy", resources={"gpu": 1})
    place_all()
    run = hold(project, member)
    assert (place_all(), holds.access_to(fresh(run), jobs_of(run))) == (0, None)
    attempts.end_job(start(placed_job(busy)).pk, Reason.DONE_BY_RUNNER)
    now = timezone.now()
    begun(run, now)
    assert fresh(run).held_until == now + dt.timedelta(hours=3)
    way = holds.access_to(fresh(run), jobs_of(run))
    assert way is not None
    assert way.lines == ["ssh 10.0.0.5", "export CUDA_VISIBLE_DEVICES=GPU-box-1-0"]


def test_a_hold_on_the_servers_machine_needs_no_ssh(project: Project, member: User) -> None:
    make_host(address="127.0.0.1")
    run = hold(project, member, gpu="", cpu="2")
    begun(run)
    way = holds.access_to(fresh(run), jobs_of(run))
    assert way is not None
    assert (way.here, way.lines) == (True, ["export CUDA_VISIBLE_DEVICES="])


def test_a_hold_ends_as_done_after_its_time(project: Project, member: User) -> None:
    make_host(gpus=1)
    run = hold(project, member)
    attempts.end_job(begun(run).pk, Reason.MAX_DURATION_EXCEEDED, exit_code=0)
    assert (fresh(run).status, fresh(run).termination_reason, fresh(run).exit_code) == ("done", "hold_ended", 0)
    assert Job.objects.get(run=run).status == "done"
    assert list(differences()) == []


def test_a_released_hold_ends_as_done(project: Project, member: User) -> None:
    make_host(gpus=1)
    run = hold(project, member)
    job = begun(run)
    services.stop(fresh(run), member, "member")
    attempts.end_job(job.pk, Reason.TERMINATED_BY_USER, exit_code=0)
    assert (fresh(run).status, fresh(run).termination_reason) == ("done", "given_back")


def test_a_hold_that_never_began_or_was_killed_is_terminated(project: Project, member: User) -> None:
    make_host(gpus=1)
    waiting, placed, killed = (hold(project, member) for _ in range(3))
    services.stop(fresh(waiting), member, "member")
    place_all()
    services.stop(fresh(placed), member, "member")
    job = begun(killed)
    services.stop(fresh(killed), member, "member", abort=True)
    attempts.end_job(job.pk, Reason.ABORTED_BY_USER, exit_code=137)
    assert [fresh(run).status for run in (waiting, placed, killed)] == [RunStatus.TERMINATED] * 3


def test_a_limit_ends_no_other_run_well(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, max_duration="1h")
    attempts.end_job(begun(run).pk, Reason.MAX_DURATION_EXCEEDED, exit_code=0)
    assert fresh(run).status == RunStatus.TERMINATED


def test_the_policy_of_a_hold_only_notifies_and_its_source_shows_why(project: Project, member: User) -> None:
    Profile.objects.create(
        project=project,
        name="strict",
        is_default=True,
        settings={
            "utilization_policy": {"min_gpu_utilization": 20, "time_window": "30m"},
            "retry": True,
            "schedule": {"cron": "0 2 * * *"},
        },
    )
    ordinary, held = make_run(project, member), hold(project, member)
    assert ordinary.spec["utilization_policy"]["action"] == "terminate"
    assert held.spec["utilization_policy"] == {**ordinary.spec["utilization_policy"], "action": "notify"}
    assert held.provenance["utilization_policy"] == {"source": "profile", "profile": "strict", "notifies": True}
    assert held.provenance["max_duration"] == {"source": "hold"}
    assert (held.status, held.spec["retry"], held.spec["schedule"]) == ("submitted", None, None)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"duration": "soon"}, "`for` must be a duration"),
        ({"duration": "0"}, "of at least 1 s"),
        ({"duration": "8d"}, "7 days in all, not 192h"),
        ({"gpu": ""}, "set `gpu`"),
        ({"gpu": "A100:2:2:2:2"}, "resources.gpu"),
        ({"queue": "nowhere"}, "no queue 'nowhere'"),
        ({"priority": 101}, "priority"),
    ],
)
def test_an_impossible_hold_is_refused(project: Project, member: User, wanted: dict[str, Any], words: str) -> None:
    with pytest.raises(Invalid, match=words):
        hold(project, member, **wanted)
    assert not Run.objects.exists()


def test_viewers_hold_nothing_and_managers_as_long_as_they_like(project: Project, member: User) -> None:
    with pytest.raises(Forbidden):
        hold(project, member, "viewer")
    assert hold(project, member, "manager", duration="30d").limit_s == 30 * 24 * HOUR


def test_two_requests_with_one_idempotency_key_create_one_hold(project: Project, member: User) -> None:
    wanted = holds.HoldRequest("3h", gpu="1")
    first, again = (holds.submit_hold(project, member, "member", wanted, "key") for _ in range(2))
    assert first.pk == again.pk
    with pytest.raises(Conflict):
        services.submit(project, member, "member", services.Submission(holds.run_config(wanted, 3 * HOUR)), "key")


def test_an_extension_reaches_the_runner_and_is_recorded(project: Project, member: User) -> None:
    make_host(gpus=1)
    run = hold(project, member)
    now = timezone.now()
    job = begun(run, now)
    version = fresh(run).version
    longer = holds.extend(fresh(run), member, "member", "1h30m")
    assert (longer.extended_s, longer.limit_s) == (5400, 4 * HOUR + 1800)
    assert longer.held_until == now + dt.timedelta(hours=4, minutes=30)
    assert longer.version > version
    assert (
        runner_spec(Job.objects.select_related("run__project", "run__archive", "host").get(pk=job.pk))["max_duration_s"]
        == 4 * HOUR + 1800
    )
    assert longer.events.get(kind="extended").data == {"by_s": 5400, "total_s": 16200}
    assert holds.extend(longer, member, "member", "30m").limit_s == 5 * HOUR


def test_an_ordinary_run_gets_more_time_too(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, max_duration="1h")
    begun(run)
    assert holds.extend(fresh(run), member, "member", "1h").limit_s == 2 * HOUR


def test_members_lengthen_their_own_runs_to_a_week_and_managers_any(project: Project, member: User) -> None:
    make_host(gpus=1)
    run = hold(project, member)
    begun(run)
    other = join(project, make_user("bob"))
    with pytest.raises(Forbidden, match="belongs to ada"):
        holds.extend(fresh(run), other, "member", "1h")
    with pytest.raises(Invalid, match="7 days in all, not 195h"):
        holds.extend(fresh(run), member, "member", "8d")
    assert holds.extend(fresh(run), other, "manager", "8d").extended_s == 8 * 24 * HOUR
    with pytest.raises(Invalid, match="3650 days at most"):
        holds.extend(fresh(run), other, "manager", "3650d")


@pytest.mark.parametrize("state", ["waiting", "no limit", "over", "ending", "ended"])
def test_a_run_that_cannot_be_extended_is_refused_with_the_reason(project: Project, member: User, state: str) -> None:
    make_host()
    run = make_run(project, member, max_duration="off" if state == "no limit" else "1h")
    if state != "waiting":
        job = begun(run, timezone.now() - dt.timedelta(hours=1) if state == "over" else None)
    if state in ("ending", "ended"):
        services.stop(fresh(run), member, "member")
    if state == "ended":
        attempts.end_job(job.pk, Reason.TERMINATED_BY_USER)
    with pytest.raises(Conflict):
        holds.extend(fresh(run), member, "member", "1h")
    assert fresh(run).extended_s == 0


def test_a_queue_s_lists_hear_of_more_time(project: Project, member: User) -> None:
    make_host(gpus=1)
    run = hold(project, member)
    begun(run)
    before = Queue.objects.get(pk=run.queue_id).count.version
    holds.extend(fresh(run), member, "member", "1h")
    assert Queue.objects.get(pk=run.queue_id).count.version > before
