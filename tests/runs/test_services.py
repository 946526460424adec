from __future__ import annotations

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import set_secret
from dstackweb.lib.errors import Conflict, DomainError, Forbidden, Invalid, Stale
from dstackweb.runs import attempts, selectors, services
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue import queues
from dstackweb.runs.recount import differences
from dstackweb.runs.rows import queue_rows
from dstackweb.runs.states import Reason, RunStatus
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db


def names(project: Project) -> list[str]:
    return [row.name for row in queue_rows(services.ensure_queue(project))]


def test_higher_priority_is_first_and_equals_are_in_order_of_arrival(project: Project, member: User) -> None:
    """R22, R23, R27."""
    for name, priority in [("dev", 30), ("train-a", 50), ("train-b", 50), ("ab", 70)]:
        make_run(project, member, name, priority=priority)
    make_run(project, member, "hotfix", role="manager", priority=90)
    assert names(project) == ["hotfix", "ab", "train-a", "train-b", "dev"]
    assert [row.position for row in queue_rows(services.ensure_queue(project))] == [1, 2, 3, 4, 5]


def test_priority_is_50_by_default_and_0_is_a_priority(project: Project, member: User) -> None:
    """R22."""
    assert make_run(project, member).priority == 50
    assert make_run(project, member, priority=0).priority == 0


def test_a_waiting_run_whose_priority_rises_moves_up_at_once(project: Project, member: User) -> None:
    """R24, R25."""
    make_run(project, member, "first")
    second = make_run(project, member, "second")
    services.set_priority(second, member, "member", 60)
    assert names(project) == ["second", "first"]
    second.refresh_from_db()
    assert second.events.filter(kind="priority").get().data == {"from": 50, "to": 60}


def test_a_member_above_the_projects_limit_is_refused_and_not_clamped(project: Project, member: User) -> None:
    with pytest.raises(Invalid, match="up to 80"):
        make_run(project, member, priority=81)
    run = make_run(project, member, priority=80)
    with pytest.raises(Invalid, match="a manager can raise it to 81"):
        services.set_priority(run, member, "member", 81)
    assert services.set_priority(run, member, "manager", 100).priority == 100


def test_a_stale_if_match_is_refused_and_says_what_changed(project: Project, member: User) -> None:
    run = make_run(project, member, "contested")
    seen = services.etag(run)
    boss = make_user("grace")
    services.set_priority(run, boss, "manager", 70, if_match=seen)
    with pytest.raises(Stale, match=r"changed by grace .* priority is 70"):
        services.set_priority(run, member, "member", 60, if_match=seen)
    run.refresh_from_db()
    assert run.priority == 70


def test_a_run_with_a_schedule_waits_for_its_time_and_then_enters_the_queue(project: Project, member: User) -> None:
    run = make_run(project, member, "nightly", schedule={"cron": "0 3 * * *"})
    assert (run.status, names(project)) == (RunStatus.PENDING, [])
    assert run.retry_at is not None
    assert (run.retry_at.hour, run.retry_at.minute) == (3, 0)
    assert attempts.requeue_due(run.retry_at) == 1
    assert names(project) == ["nightly"]


def test_another_members_run_is_not_mine_to_change(project: Project, member: User) -> None:
    run = make_run(project, member)
    other = join(project, make_user("bob"))
    for change in (lambda: services.set_priority(run, other, "member", 1), lambda: services.stop(run, other, "member")):
        with pytest.raises(Forbidden, match="belongs to ada"):
            change()


def test_a_viewer_cannot_submit(project: Project, member: User) -> None:
    with pytest.raises(Forbidden, match="role of member"):
        make_run(project, member, role="viewer")


def test_a_name_is_taken_while_its_run_is_active_and_free_afterwards(project: Project, member: User) -> None:
    run = make_run(project, member, "one")
    with pytest.raises(Conflict, match="a run named 'one' is already submitted"):
        make_run(project, member, "one")
    services.stop(run, member, "member")
    again = make_run(project, member, "one")
    assert selectors.find_run(project, "one").pk == again.pk
    assert selectors.find_run(project, str(run.uid)).pk == run.pk
    assert list(differences()) == []


def test_the_same_idempotency_key_answers_with_the_same_run(project: Project, member: User) -> None:
    body = services.Submission({"type": "task", "commands": ["true"]})
    first, made = services.submit(project, member, "member", body, "key-1")
    second, made_again = services.submit(project, member, "member", body, "key-1")
    assert (made, made_again, second.pk) == (True, False, first.pk)
    other = services.Submission({"type": "task", "commands": ["false"]})
    with pytest.raises(Conflict, match="Idempotency-Key"):
        services.submit(project, member, "member", other, "key-1")
    assert Run.objects.count() == 1


@pytest.mark.parametrize(
    ("keys", "loc"),
    [
        ({"profile": "nope"}, "profile"),
        ({"queue": "nope"}, "queue"),
        ({"env": {"TOKEN": "${{ secrets.NOPE }}"}}, "env"),
        ({"env": ["HF_TOKEN"]}, "env"),
    ],
)
def test_missing_objects_are_refused_by_name(project: Project, member: User, keys: dict, loc: str) -> None:
    with pytest.raises(Invalid) as refused:
        make_run(project, member, **keys)
    assert refused.value.errors[0]["loc"][0] == loc
    assert not Run.objects.exists()


def test_no_secret_value_is_stored_in_the_clear(project: Project, member: User) -> None:
    set_secret(project, "HF", "hunter2hunter2", member)
    body = services.Submission(
        {"type": "task", "commands": ["true"], "env": ["A=${{ secrets.HF }}", "WANDB_KEY"]},
        env={"WANDB_KEY": "s3cr3tkey"},
    )
    run, _made = services.submit(project, member, "member", body)
    stored = str(Run.objects.filter(pk=run.pk).values().get())
    assert "hunter2hunter2" not in stored
    assert "s3cr3tkey" not in stored


def test_a_paused_queue_keeps_its_order_and_starts_no_run(project: Project, member: User) -> None:
    make_host()
    queue = services.ensure_queue(project)
    with pytest.raises(Forbidden):
        queues.change_queue(queue, member, "member", paused=True)
    queues.change_queue(queue, member, "manager", paused=True)
    run = make_run(project, member)
    assert place_all() == 0
    assert selectors.why(Run.objects.select_related("queue").get(pk=run.pk))[0] == "queue_paused"
    queues.change_queue(queue, member, "manager", paused=False)
    assert place_all() == 1


def test_stopping_a_waiting_run_ends_it_at_once(project: Project, member: User) -> None:
    run = services.stop(make_run(project, member), member, "member")
    assert (run.status, run.termination_reason) == (RunStatus.TERMINATED, "stopped_by_user")
    with pytest.raises(Conflict, match="already ended"):
        services.stop(run, member, "member")


def test_stopping_a_placed_run_that_no_runner_claimed_frees_its_capacity_at_once(
    project: Project, member: User
) -> None:
    host = make_host(gpus=1)
    run = make_run(project, member, resources={"gpu": 1})
    place_all()
    job = placed_job(run)
    assert services.stop(run, member, "member").status == RunStatus.TERMINATED
    with pytest.raises(DomainError):
        start(job)
    host.refresh_from_db()
    assert (host.cpus_used, host.memory_used_mib, job.allocations.count()) == (0, 0, 0)


def test_stopping_a_running_run_waits_for_its_runner(project: Project, member: User) -> None:
    host = make_host()
    run = make_run(project, member)
    place_all()
    job = start(placed_job(run))
    assert services.stop(run, member, "member").status == RunStatus.TERMINATING
    host.refresh_from_db()
    assert host.cpus_used == 1
    job.refresh_from_db()
    assert (job.status, job.stop_reason) == ("terminating", "terminated_by_user")
    attempts.end_job(job.pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=143)
    job.refresh_from_db()
    run.refresh_from_db()
    assert (job.status, job.termination_reason) == ("terminated", "terminated_by_user")
    assert (run.status, run.termination_reason) == ("terminated", "stopped_by_user")


def test_many_runs_are_stopped_a_few_at_a_time_and_ended_ones_left_out(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for the queue only so long."""
    monkeypatch.setattr(services, "STOPPED_AT_ONCE", 2)
    runs = [make_run(project, member, f"train-{number}") for number in range(5)]
    services.stop(runs[1], member, "member")
    together = list[int]()

    def lock_queue(queue_id: int) -> Queue:
        together.append(Run.objects.filter(status=RunStatus.TERMINATED).count())
        return queues.lock_queue(queue_id)

    monkeypatch.setattr(services, "lock_queue", lock_queue)
    assert services.stop_all(runs, member, "member") == [run for run in runs if run != runs[1]]
    assert together == [1, 2, 4]
    assert list(differences()) == []
    with pytest.raises(Conflict, match="train-0 has already ended"):
        services.stop_all(runs, member, "member")


def test_nothing_is_stopped_where_one_of_the_runs_is_anothers(project: Project, member: User) -> None:
    other = join(project, make_user("other"))
    runs = [make_run(project, user, f"of-{user}") for user in (member, other)]
    with pytest.raises(Forbidden):
        services.stop_all(runs, member, "member")
    assert not Run.objects.filter(status=RunStatus.TERMINATED).exists()


def test_abort_after_stop_leaves_no_grace(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    job = start(placed_job(run))
    services.stop(run, member, "member")
    services.stop(run, member, "member", abort=True)
    job.refresh_from_db()
    assert job.stop_grace_s == 0
