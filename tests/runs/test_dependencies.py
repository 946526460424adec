"""A run waits for others to end before it enters its queue (`after`)."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone
from hypothesis import given, strategies as st

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Conflict, Forbidden, Invalid
from dstackweb.runs import attempts, dependencies, pipelines, services
from dstackweb.runs.codes import DependencyOutcome
from dstackweb.runs.dependencies import Consequence
from dstackweb.runs.models import Dependency, Run, RunEvent, Sweep
from dstackweb.runs.queue.queues import create_queue
from dstackweb.runs.recount import differences
from dstackweb.runs.states import ACTIVE, ENDED, Reason, RunStatus
from dstackweb.runs.sweeps import creation, services as sweeps
from dstackweb.scheduler.passes.decision import plan
from dstackweb.spec.codes import On, Otherwise
from dstackweb.wording import statuses
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start

OUTCOMES = st.lists(st.tuples(st.sampled_from(Otherwise), st.sampled_from(DependencyOutcome)))


@given(OUTCOMES)
def test_a_run_enters_once_all_are_met_or_released_and_is_canceled_by_the_first_that_cannot_be(
    found: list[tuple[Otherwise, DependencyOutcome]],
) -> None:
    outcomes = {outcome for _otherwise, outcome in found}
    step = dependencies.decide([Dependency(otherwise=otherwise, outcome=outcome) for otherwise, outcome in found])
    assert (step == Consequence.ENTER) == (outcomes <= {DependencyOutcome.MET, DependencyOutcome.RELEASED})
    assert (step == Consequence.CANCEL) == ((Otherwise.CANCEL, DependencyOutcome.UNMET) in found)
    if step == Consequence.KEEP:
        assert DependencyOutcome.WAITING not in outcomes


@pytest.mark.parametrize(
    ("on", "met"),
    [(On.DONE, {"done"}), (On.FAILED, {"failed", "terminated"}), (On.ENDED, {"done", "failed", "terminated"})],
)
def test_each_condition_is_met_by_its_ends_and_by_none_that_is_unknown(on: On, met: set[str]) -> None:
    assert {status for status in ENDED if dependencies.outcome(on, status) == DependencyOutcome.MET} == met
    assert {dependencies.outcome(on, status) for status in ACTIVE} == {DependencyOutcome.WAITING}
    assert dependencies.outcome(on, None) == DependencyOutcome.UNMET, "a removed run"


@pytest.fixture
def box(project: Project) -> None:
    make_host()


@pytest.fixture
def first(project: Project, member: User, box: None) -> Run:
    return make_run(project, member, "prepare")


def end(run: Run, reason: str = Reason.DONE_BY_RUNNER) -> None:
    place_all()
    start(placed_job(run))
    attempts.end_job(placed_job(run).pk, reason, exit_code=0 if reason == Reason.DONE_BY_RUNNER else 1)


def settled(run: Run) -> Run:
    dependencies.settle(timezone.now())
    return Run.objects.select_related("queue", "project").get(pk=run.pk)


def kinds(run: Run) -> list[str]:
    return list(RunEvent.objects.filter(run=run).order_by("id").values_list("kind", flat=True))


@pytest.mark.django_db
class TestRows:
    def test_it_is_pending_without_a_position_until_the_run_before_is_done(
        self, project: Project, member: User, first: Run
    ) -> None:
        after = make_run(project, member, "train", after="prepare", priority=80)
        assert after.status == RunStatus.PENDING
        assert statuses.run_message(after) == "Enters its queue after: prepare is done."
        assert place_all() == 1, "only the first run is placed, whatever the other's priority"
        assert settled(after).status == RunStatus.PENDING
        end(first)
        later = make_run(project, member, "later", priority=80)
        after = settled(after)
        assert (after.status, after.status_detail, kinds(after)) == ("submitted", {}, ["submitted", "follows"])
        assert after.seniority_us > later.seniority_us, "its waiting counts from its entry"
        assert place_all() == 2
        assert list(differences()) == []

    def test_a_pass_that_a_predecessors_end_requested_places_the_run_after_it(
        self, project: Project, member: User, first: Run
    ) -> None:
        after = make_run(project, member, "train", after=["prepare"])
        end(first)
        place_all()
        assert Run.objects.get(pk=after.pk).status == RunStatus.PROVISIONING

    def test_a_chain_is_canceled_to_its_end(self, project: Project, member: User, first: Run) -> None:
        train = make_run(project, member, "train", after="prepare")
        report = make_run(project, member, "report", after={"run": "train"})
        clean = make_run(project, member, "clean", after={"run": str(train.uid), "on": "ended"})
        end(first, Reason.CONTAINER_EXITED_WITH_ERROR)
        train = settled(train)
        assert (train.status, train.termination_reason) == ("terminated", Reason.DEPENDENCY_NOT_MET)
        assert statuses.run_message(train) == "prepare did not end as done."
        assert settled(report).status == RunStatus.TERMINATED
        assert settled(clean).status == RunStatus.SUBMITTED
        assert list(differences()) == []

    def test_a_kept_run_stays_until_its_owner_releases_it(self, project: Project, member: User, first: Run) -> None:
        kept = make_run(project, member, "train", after={"run": "prepare", "otherwise": "keep"})
        end(first, Reason.CONTAINER_EXITED_WITH_ERROR)
        kept = settled(kept)
        assert (kept.status, statuses.run_message(kept)) == ("pending", "prepare did not end as done.")
        other = join(project, make_user("other"))
        with pytest.raises(Forbidden):
            dependencies.release(kept, other, "member")
        kept = dependencies.release(kept, member, "member")
        assert (kept.status, kinds(kept)) == ("submitted", ["submitted", "released"])
        assert kept.dependencies.get().outcome == DependencyOutcome.RELEASED
        with pytest.raises(Conflict):
            dependencies.release(kept, member, "member")

    def test_a_released_run_is_not_canceled_when_the_run_before_fails(
        self, project: Project, member: User, first: Run
    ) -> None:
        after = dependencies.release(make_run(project, member, "train", after="prepare"), member, "member")
        end(first, Reason.CONTAINER_EXITED_WITH_ERROR)
        assert settled(after).status == RunStatus.PROVISIONING

    def test_a_retry_of_the_run_before_is_waited_for(self, project: Project, member: User, box: None) -> None:
        first = make_run(project, member, "prepare", retry=True)
        after = make_run(project, member, "train", after="prepare")
        end(first, Reason.CONTAINER_EXITED_WITH_ERROR)
        assert (Run.objects.get(pk=first.pk).status, settled(after).status) == ("pending", "pending")

    def test_a_run_after_one_that_is_done_already_enters_at_once(
        self, project: Project, member: User, first: Run
    ) -> None:
        end(first)
        after = make_run(project, member, "train", after=[{"run": str(first.uid)}])
        assert (after.status, after.dependencies.get().outcome) == ("submitted", DependencyOutcome.MET)

    def test_a_waiting_run_that_was_stopped_stays_stopped_and_its_wait_ends_with_the_run_before(
        self, project: Project, member: User, first: Run
    ) -> None:
        after = services.stop(make_run(project, member, "train", after="prepare"), member, "member")
        end(first)
        assert settled(after).status == RunStatus.TERMINATED
        assert not Dependency.objects.filter(outcome=DependencyOutcome.WAITING).exists()

    def test_a_run_before_that_was_removed_cancels(self, project: Project, member: User, first: Run) -> None:
        after = make_run(project, member, "train", after={"run": "prepare", "on": "ended"})
        services.stop(first, member, "member")
        Run.objects.filter(pk=first.pk).delete()
        assert statuses.run_message(settled(after)) == "prepare was removed."

    def test_it_can_change_queue_and_priority_while_it_waits(self, project: Project, member: User, first: Run) -> None:
        create_queue(project, join(project, make_user("boss"), "admin"), "admin", "night")
        after = make_run(project, member, "train", after="prepare")
        after = services.set_queue(after, member, "member", "night")
        services.set_priority(after, member, "member", 20)
        end(first)
        after = settled(after)
        assert (after.status, after.queue.name, after.priority) == ("submitted", "night", 20)
        assert list(differences()) == []

    @pytest.mark.parametrize(
        ("keys", "place", "text"),
        [
            ({"after": "nowhere"}, ["after", 0, "run"], "no run is called 'nowhere' in main"),
            ({"after": ["prepare", {"run": "prepare", "on": "ended"}]}, ["after", 1], "prepare is listed twice"),
            ({"after": {"run": "failed"}}, ["after", 0], "failed is terminated, so this run would never start"),
            ({"after": "prepare", "schedule": {"cron": "0 2 * * *"}}, ["after"], "either a `schedule` or an `after`"),
            ({"after": [{"run": "prepare", "on": "dead"}]}, ["after", 0, "on"], "`done`, `failed` or `ended`"),
            ({"after": [{"run": "prepare", "one": "done"}]}, ["after", 0, "one"], "did you mean `after.0.on`"),
            ({"after": []}, ["after"], "a run's name"),
            ({"after": 7}, ["after", 0], "after"),
        ],
        ids=["unknown", "twice", "never", "scheduled", "bad condition", "bad key", "none", "number"],
    )
    def test_what_cannot_be_is_refused_at_its_place(
        self, project: Project, member: User, first: Run, keys: dict[str, Any], place: list[Any], text: str
    ) -> None:
        services.stop(make_run(project, member, "failed"), member, "member")
        with pytest.raises(Invalid) as refused:
            make_run(project, member, "train", **keys)
        error = refused.value.errors[0]
        assert (error["loc"], text in error["msg"]) == (place, True), error
        assert not Run.objects.filter(name="train").exists()

    def test_a_run_of_another_project_is_not_there(self, project: Project, member: User) -> None:
        """Neither by its name nor by its id, which nobody else should learn anything from."""
        strange = make_run(make_project("other"), member, "strange")
        for named in ("strange", str(strange.uid)):
            with pytest.raises(Invalid, match="no run is called"):
                make_run(project, member, "train", after=named)

    def test_a_plan_has_no_position_and_says_what_it_would_wait_for(
        self, project: Project, member: User, first: Run
    ) -> None:
        config = {"type": "task", "commands": ["true"], "after": ["prepare"]}
        found = plan(project, member, "member", services.Submission(config))
        assert found.position is None
        assert found.follows is not None
        assert statuses.after(found.follows) == "Enters its queue after: prepare is done."
        assert not Dependency.objects.exists()

    def test_deciding_costs_the_same_however_many_wait_for_runs_that_go_on(
        self, project: Project, member: User, first: Run, django_assert_num_queries: Any
    ) -> None:
        for _ in range(3):
            make_run(project, member, after="prepare")
        with django_assert_num_queries(1):
            dependencies.settle(timezone.now())


def swept(project: Project, member: User, count: int = 2) -> Sweep:
    made, _new = pipelines.submit(
        project, member, "member", services.Submission(SWEEP | {"array": count, "name": "trials"})
    )
    assert isinstance(made, Sweep)
    return made


SWEEP = {"type": "task", "commands": ["true"]}


def sweep_ends(sweep: Sweep, *reasons: str) -> None:
    place_all()
    for run, reason in zip(Run.objects.filter(sweep=sweep).order_by("sweep_index"), reasons, strict=True):
        start(placed_job(run), f"nonce-{run.pk}")
        attempts.end_job(placed_job(run).pk, reason, exit_code=0 if reason == Reason.DONE_BY_RUNNER else 1)


def test_a_run_waits_until_all_runs_of_a_sweep_are_done(project: Project, member: User, box: None) -> None:
    sweep = swept(project, member)
    report = make_run(project, member, "report", after="trials")
    assert statuses.after(report.status_detail) == "Enters its queue after: trials is done."
    place_all()
    first, second = Run.objects.filter(sweep=sweep).order_by("sweep_index")
    end(first)
    place_all()
    assert settled(report).status == "pending"
    end(second)
    place_all()
    assert settled(report).status == "provisioning"
    assert report.dependencies.get().of == sweep


@pytest.mark.parametrize(("on", "status"), [("done", "terminated"), ("failed", "submitted"), ("ended", "submitted")])
def test_a_sweep_has_failed_when_one_of_its_runs_did(
    project: Project, member: User, box: None, on: str, status: str
) -> None:
    sweep = swept(project, member)
    report = make_run(project, member, "report", after={"run": "trials", "on": on})
    sweep_ends(sweep, Reason.DONE_BY_RUNNER, Reason.CONTAINER_EXITED_WITH_ERROR)
    creation.settle(timezone.now())
    assert settled(report).status == status
    late = {"run": "trials", "on": "done"}
    with pytest.raises(Invalid, match="trials is failed, so this run would never start"):
        make_run(project, member, "late", after=late)


def test_a_sweep_that_is_stopped_has_failed_and_one_by_id_counts_once(
    project: Project, member: User, box: None
) -> None:
    sweep = swept(project, member)
    with pytest.raises(Invalid, match="trials is listed twice"):
        make_run(project, member, after=["trials", str(sweep.uid)])
    report = make_run(project, member, "report", after=str(sweep.uid))
    sweeps.stop(sweep, member, "member")
    creation.settle(timezone.now())
    assert settled(report).status == "terminated"


def test_the_newest_of_a_name_counts_whether_it_is_a_run_or_a_sweep(project: Project, member: User, box: None) -> None:
    sweep = swept(project, member)
    older = make_run(project, member, "report", after="trials")
    sweeps.stop(sweep, member, "member")
    creation.settle(timezone.now())
    make_run(project, member, "trials")
    newer = make_run(project, member, "late", after="trials")
    assert [one.dependencies.get().sweep for one in (older, newer)] == [sweep, None]


def test_a_run_of_a_file_may_wait_for_a_sweep_of_the_project(project: Project, member: User, box: None) -> None:
    sweep = swept(project, member)
    config = [SWEEP | {"name": "best", "after": "trials"}, SWEEP | {"name": "report", "after": "best"}]
    runs, _new = pipelines.submit(project, member, "member", services.Submission(config))
    assert isinstance(runs, list)
    assert [run.dependencies.get().of for run in runs] == [sweep, runs[0]]
