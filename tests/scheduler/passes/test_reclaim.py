"""Queues that take back what they have lent, as passes carry it out."""

from __future__ import annotations

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.notifications.models import Delivery
from dstackweb.runs import attempts, services
from dstackweb.runs.models import DisplacedWork, Job, Queue, QueueCount, Run
from dstackweb.runs.states import Reason
from dstackweb.scheduler.models import Reservation
from dstackweb.scheduler.passes import placement_pass
from dstackweb.scheduler.passes.decision import decide_now, plan
from dstackweb.wording import notifications as notification_words, queue as queue_words
from tests.factories import join, make_host, make_run, make_user, place_all, start
from tests.scheduler.passes.test_preemption import ends, fresh, sentences, statuses

pytestmark = pytest.mark.django_db


@pytest.fixture
def ann(project: Project) -> User:
    return join(project, make_user("ann"))


@pytest.fixture(autouse=True)
def lent(project: Project, ann: User) -> list[Run]:
    """Runs of *train*, which owns two of four GPUs, hold them all, and *eval* takes its two back."""
    make_host(cpus=8, gpus=4)
    for name in ("train", "eval"):
        queue = Queue.objects.create(project=project, name=name, max_gpus=2, cohort="team")
        QueueCount.objects.create(queue=queue)
    change("eval", reclaim="any")
    runs = [make_run(project, ann, f"t-{n}", queue="train", resources={"gpu": 1}, preemptible=True) for n in range(4)]
    place_all()
    for job in Job.objects.all():
        start(job, f"nonce-{job.pk}")
    assert statuses(*runs) == ["running"] * 4
    return runs


def change(name: str, **settings: object) -> None:
    Queue.objects.filter(name=name).update(**settings)


def asking(project: Project, user: User, name: str = "e-0", gpus: int = 1, priority: int = 50) -> Run:
    return make_run(project, user, name, queue="eval", resources={"gpu": gpus}, priority=priority)


def test_a_borrowing_run_makes_room_and_gets_back_what_is_free_again(
    project: Project, member: User, lent: list[Run]
) -> None:
    run = asking(project, member)
    place_all()
    assert statuses(run, *lent) == ["submitted", "running", "running", "running", "terminating"]
    assert Reservation.objects.get().reclaims
    place_all()
    assert statuses(run, *lent) == ["submitted", "running", "running", "running", "terminating"]
    ends(lent[3])
    for _ in range(2):
        place_all()
        assert statuses(run, *lent) == ["provisioning", "running", "running", "running", "submitted"]
    assert not Reservation.objects.exists()
    whose = f"e-0 of {member}"
    text = f"displaced by {whose}, which takes back GPUs that queue eval lent: it stops and is queued again"
    assert text in sentences(lent[3])
    assert "takes back GPUs that its queue lent to train: displaces t-3 of ann" in sentences(run)
    note = Delivery.objects.get(event="run_displaced")
    said = notification_words.notification(note.event, note.data).text
    assert said.startswith(f"It stops for {whose}, which takes back GPUs that queue eval lent")
    services.stop(fresh(run), member, "member", abort=True)
    place_all()
    assert statuses(lent[3]) == ["provisioning"]


def test_two_runs_take_back_what_the_queue_owns_and_a_third_nothing(
    project: Project, member: User, lent: list[Run]
) -> None:
    both = asking(project, member, gpus=2)
    place_all()
    assert statuses(*lent) == ["running", "running", "terminating", "terminating"]
    for run in lent[2:]:
        ends(run)
    place_all()
    third = asking(project, member, "e-1")
    place_all()
    assert statuses(both, third, *lent[:2]) == ["provisioning", "submitted", "running", "running"]
    assert not decide_now(fresh(third)).displaces


def test_a_run_that_borrows_goes_after_one_that_needs_its_queues_own(
    project: Project, ann: User, member: User, lent: list[Run]
) -> None:
    older = make_run(project, ann, "t-late", queue="train", resources={"gpu": 1}, preemptible=True)
    run = asking(project, member)
    attempts.end_job(Job.objects.get(run=lent[0]).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    place_all()
    assert statuses(run, older, *lent[1:]) == ["provisioning", "submitted", "running", "running", "running"]


def test_a_limit_of_another_queue_that_changes_meanwhile_is_kept(
    project: Project, ann: User, lent: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = make_run(project, ann, "t-late", queue="train", resources={"gpu": 1})
    attempts.end_job(Job.objects.get(run=lent[0]).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    write, times = placement_pass.apply.write_decisions, []

    def slow(*args: object) -> None:
        if not times:
            change("eval", lend_gpus=0)
        times.append(1)
        write(*args)  # type: ignore[arg-type]  # as they were

    monkeypatch.setattr(placement_pass.apply, "write_decisions", slow)
    place_all()
    assert statuses(late) == ["submitted"]


def test_what_is_not_preemptible_or_not_lower_stays(project: Project, member: User, lent: list[Run]) -> None:
    Run.objects.filter(pk=lent[3].pk).update(spec=lent[3].spec | {"preemptible": False})
    change("eval", reclaim="lower_priority")
    first = asking(project, member)
    place_all()
    assert statuses(*lent) == ["running"] * 4
    services.set_priority(fresh(first), member, "manager", 51)
    place_all()
    assert statuses(*lent) == ["running", "running", "terminating", "running"]


def test_queues_wait_unless_they_take_back(project: Project, member: User, lent: list[Run]) -> None:
    change("eval", reclaim="never", preempt_points=1)
    asking(project, member, priority=80)
    place_all()
    assert statuses(*lent) == ["running"] * 4


def test_it_counts_towards_no_budget_of_preemption(project: Project, member: User, lent: list[Run]) -> None:
    change("eval", preempt_points=1, preempt_gpu_hours=1)
    Job.objects.update(placed_at=Job.objects.latest("pk").placed_at.replace(year=2025))
    asking(project, member)
    place_all()
    assert sorted(statuses(*lent)) == ["running", "running", "running", "terminating"]
    assert not DisplacedWork.objects.exists()


def test_plan_and_why_say_what_it_takes_back(project: Project, member: User, lent: list[Run]) -> None:
    config = {"type": "task", "commands": ["true"], "queue": "eval", "resources": {"gpu": 2}}
    planned = plan(project, member, "member", services.Submission(config))
    text = "when its turn comes, it takes back 2 GPUs from train: 2 runs of ann stop, "
    assert queue_words.would_displace(planned).startswith(text)
    run = asking(project, member)
    decision = decide_now(fresh(run))
    assert (decision.reclaims, [one.name for one in decision.displaces]) == (True, ["t-3"])
    assert decision.outcome == "queue_limit"


def test_preemptible_has_an_effect_where_another_queue_takes_back(project: Project, member: User) -> None:
    config = {"type": "task", "commands": ["true"], "queue": "train", "preemptible": True}
    assert not plan(project, member, "member", services.Submission(config)).notes
    change("eval", reclaim="never")
    assert plan(project, member, "member", services.Submission(config)).notes == ["not_preempted"]


def test_a_queue_whose_limit_is_raised_meanwhile_loses_nothing(
    project: Project, member: User, lent: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = placement_pass.apply.write_displacements

    def late(*args: object) -> None:
        change("train", max_gpus=4)
        write(*args)  # type: ignore[arg-type]  # as they were

    monkeypatch.setattr(placement_pass.apply, "write_displacements", late)
    asking(project, member)
    place_all()
    assert statuses(*lent) == ["running"] * 4


def test_a_reservation_to_take_back_ends_with_its_cohort(project: Project, member: User, lent: list[Run]) -> None:
    run = asking(project, member)
    place_all()
    change("eval", max_gpus=0)
    place_all()
    assert not Reservation.objects.exists()
    ends(lent[3])
    place_all()
    assert statuses(run) == ["submitted"]
