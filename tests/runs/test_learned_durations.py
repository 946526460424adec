"""Durations that are learned where runs end, and forgotten where they are removed."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

import pytest
from django.db.models import Q, Sum
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import attempts, learned_durations, removal, services
from dstackweb.runs.learned_durations import BINS, RUNS_MIN, Learned
from dstackweb.runs.models import LearnedDuration, Run
from dstackweb.runs.recount import differences
from dstackweb.runs.states import Reason
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def nothing_differs() -> Iterator[None]:
    yield
    assert list(differences()) == []


def lived(project: Project, user: User, name: str, seconds: float, reason: Reason = Reason.DONE_BY_RUNNER) -> Run:
    """A run that has lasted so long."""
    run = make_run(project, user, name)
    place_all()
    job = start(placed_job(run))
    Run.objects.filter(pk=run.pk).update(started_at=timezone.now() - dt.timedelta(seconds=seconds))
    attempts.end_job(job.pk, reason, exit_code=0)
    return run


def known(project: Project, prefix: str) -> Learned:
    return learned_durations.load([project.pk], [prefix]).get((project.pk, prefix), Learned())


def test_a_run_counts_at_its_end_under_its_prefix_and_member(project: Project, member: User) -> None:
    make_host()
    lived(project, member, "train-1", 100)
    row = LearnedDuration.objects.get()
    assert (row.project, row.prefix, row.user, row.runs) == (project, "train", member, 1)
    assert BINS.low(row.bin) < 100.5 <= BINS.high(row.bin) * 1.01


def test_a_failed_or_stopped_run_counts_as_well_since_it_held_its_place(project: Project, member: User) -> None:
    make_host()
    lived(project, member, "train-1", 100, Reason.CONTAINER_EXITED_WITH_ERROR)
    assert LearnedDuration.objects.aggregate(Sum("runs"))["runs__sum"] == 1


def test_a_run_that_never_started_or_was_retried_teaches_nothing(project: Project, member: User) -> None:
    services.stop(make_run(project, member, "waits"), member, "member")
    make_host()
    run = make_run(project, member, "again")
    place_all()
    Run.objects.filter(pk=run.pk).update(attempt=2)
    run.jobs.update(attempt=2)
    attempts.end_job(start(placed_job(run)).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    assert not LearnedDuration.objects.exists()


def test_removed_runs_are_forgotten(project: Project, member: User) -> None:
    make_host()
    runs = [lived(project, member, f"train-{number}", 100) for number in range(2)]
    removal.remove([runs[0].pk], Q())
    assert LearnedDuration.objects.get().runs == 1
    removal.remove([runs[1].pk], Q())
    assert not LearnedDuration.objects.exists()


def test_beyond_the_limit_prefixes_are_counted_together(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned_durations, "KEYS_MAX", 1)
    make_host()
    first, second = lived(project, member, "train-1", 100), lived(project, member, "eval-1", 100)
    lived(project, member, "train-2", 1000)
    assert sorted(LearnedDuration.objects.values_list("prefix", flat=True)) == ["", "train", "train"]
    removal.remove([first.pk, second.pk], Q())
    assert list(LearnedDuration.objects.values_list("prefix", "runs")) == [("train", 1)]


def test_a_member_with_enough_runs_has_their_own_durations_and_any_other_those_of_all(
    project: Project, member: User
) -> None:
    make_host()
    other, new = (join(project, make_user(name)) for name in ("bob", "eve"))
    for number in range(RUNS_MIN):
        lived(project, member, f"train-{number}", 100)
        lived(project, other, f"train-b{number}", 10_000)
    learned = known(project, "train")
    assert learned.of(member.pk)[1] == RUNS_MIN
    assert max(learned_durations.equal_parts(learned.of(member.pk)[0])) < 200
    assert learned.of(new.pk)[1] == 2 * RUNS_MIN


def test_few_runs_teach_nothing(project: Project, member: User) -> None:
    make_host()
    lived(project, member, "train-1", 100)
    assert known(project, "train").of(member.pk)[1] == 0
    assert known(project, "eval").of(member.pk)[1] == 0


def test_what_a_run_has_lasted_already_is_not_possible_any_more() -> None:
    counts = {BINS.bin_of(100): 90, BINS.bin_of(5000): 10}
    assert min(learned_durations.equal_parts(counts)) < 101
    assert min(learned_durations.equal_parts(counts, lasted_s=1000)) > 3000
    assert learned_durations.equal_parts(counts, lasted_s=10_000) == ()
