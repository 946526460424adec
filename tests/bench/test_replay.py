"""Jobs like those of public traces, and their replay with the scheduler's decisions."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from bench.replay import figures, jobs
from bench.replay.deployment import DEFAULT, POLICIES, Deployment, Policy, Record
from bench.replay.forecasts import Calibration, Outcome, Scores, forecast
from bench.replay.jobs import GPUS_OF_HOST, HOUR, Job, generate
from dstackweb.runs import start_estimates
from dstackweb.runs.start_estimates import ShownEstimate

pytestmark = pytest.mark.nightly  # ten seconds, for what no server runs
HOSTS = 4
by_name = {policy.name: policy for policy in POLICIES}


def few(seed: int = 3, count: int = 150, load: float = 1.3) -> list[Job]:
    return generate(seed, count, HOSTS * GPUS_OF_HOST, load)


def replayed(policy: Policy, *, exact: bool = False) -> tuple[Deployment, list[Record]]:
    """Replayed while at each pass nothing is held twice, and no more than is there."""

    def check(deployment: Deployment, second: float) -> None:
        held = [(used.host_id, gpu) for one in deployment.active.values() for used in one.usage for gpu in used.gpus]
        assert len(held) == len(set(held)) == sum(deployment.held_gpus())
        assert len(held) == sum(one.job.all_gpus for one in deployment.active.values())
        assert not deployment.active.keys() & {one.job.id for one in deployment.waiting}

    deployment = Deployment(policy, HOSTS, check)
    deployment.exact = exact
    return deployment, deployment.replay(few())


def test_a_seed_makes_the_same_jobs_again_and_another_makes_others() -> None:
    assert few(1) == few(1)
    assert few(1) != few(2)


def test_jobs_are_distributed_as_published() -> None:
    made = generate(1, 20_000, 128, 0.9)
    sizes = Counter(job.all_gpus for job in made)
    for gpus, share in jobs.SHARES_BY_GPUS.items():
        assert sizes[gpus] / len(made) == pytest.approx(share, abs=0.01)
    for size, points in jobs.RUN_TIMES.items():
        minutes = [job.took_s / 60 for job in made if job.size == size]
        for most, percent in points:
            assert sum(each <= most for each in minutes) / len(minutes) == pytest.approx(percent / 100, abs=0.01)
    by_member = Counter(job.member for job in made)
    assert 0.45 < sum(by_member[member] for member in (1, 2)) / len(made) < 0.6, "the first twentieth"
    assert sum(job.fails for job in made) / len(made) == pytest.approx(jobs.FAILED, abs=0.01)
    by_hour = Counter(int(job.at // HOUR) % 24 for job in made)
    assert by_hour[16] > 5 * by_hour[6]
    assert all(job.took_s <= job.limit_s for job in made)
    assert sum(job.work_s for job in made) / (128 * made[-1].at) == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_all_jobs_end_after_their_whole_run_time(policy: Policy) -> None:
    deployment, records = replayed(policy)
    assert not deployment.waiting
    assert not deployment.active
    assert sum(deployment.held_gpus()) == 0
    for one in records:
        assert one.started >= one.job.at
        spent_s = one.queued_s + one.lost_s + one.job.took_s
        assert one.ended - one.job.at == pytest.approx(spent_s, abs=0.01)
        assert bool(one.displaced) == bool(one.lost_s)
        assert not one.displaced or one.job.preemptible


def test_without_preemption_none_is_displaced_and_with_it_some_are() -> None:
    displaced = {policy.name: sum(one.displaced for one in replayed(policy)[1]) for policy in POLICIES}
    assert displaced.pop("+ preemption") > 0
    assert set(displaced.values()) == {0}


def test_where_nobody_passes_jobs_start_as_they_came() -> None:
    _deployment, records = replayed(by_name["FIFO, no one passes"])
    assert [one.started for one in records] == sorted(one.started for one in records)
    assert max(one.queued_s for one in records) > HOUR


@pytest.mark.parametrize("name", ["FIFO, what fits starts", "+ backfill", "+ preemption"])
def test_decisions_that_are_left_out_would_have_changed_nothing(name: str) -> None:
    assert replayed(by_name[name])[1] == replayed(by_name[name], exact=True)[1]


def test_a_replay_is_the_same_again() -> None:
    assert figures.replayed(DEFAULT, few(), HOSTS) == figures.replayed(DEFAULT, few(), HOSTS)


def test_each_policy_does_something_else() -> None:
    assert len({tuple(one.started for one in replayed(policy)[1]) for policy in POLICIES}) == len(POLICIES)


def test_fairness_is_one_where_all_have_the_same_and_less_otherwise() -> None:
    assert figures.jain([0.3, 0.3, 0.3]) == pytest.approx(1)
    assert figures.jain([1, 0, 0, 0]) == pytest.approx(0.25)


def test_quantiles_and_shares_of_a_replay_are_in_order() -> None:
    found = figures.replayed(DEFAULT, few(), HOSTS)
    for waited in (*found.by_size.values(), *found.by_member.values()):
        assert list(waited) == sorted(waited)
    assert 0.5 < found.gpu_use <= 1
    assert 0 < found.fairness <= 1


def test_progress_is_the_share_of_the_time_that_work_takes() -> None:
    job = replace(few()[0], at=0.0, took_s=60.0)
    assert figures.progress_of_members([Record(job, started=40, ended=100, queued_s=40)]) == {job.member: 0.6}


def test_starts_are_before_inside_or_after_what_was_estimated() -> None:
    shown = ShownEstimate(0.0, 100.0, 200.0, 120.0, 240.0)
    outcomes = [Outcome(shown, start, True) for start in (110.0, 120.0, 121.0, 241.0)]
    seen, simulated = Calibration.of(outcomes), Calibration.of(outcomes, corrected=False)
    assert (seen.before, seen.inside, seen.after) == (0.5, 0.25, 0.25)
    assert (simulated.before, simulated.inside, simulated.after) == (0, 0.75, 0.25)


def test_estimates_are_made_and_compared_with_the_starts_on_the_way() -> None:
    watch = forecast(DEFAULT, few(), HOSTS, HOUR)
    assert watch.refreshes > 10
    assert Calibration.of(watch.outcomes).starts > 20
    assert all(one.start >= one.shown.at for one in watch.outcomes)
    assert sum(record.starts for record in watch.scores.records.values()) > 0


@pytest.mark.django_db
def test_the_track_record_in_memory_is_that_in_rows() -> None:
    rnd, scores = random.Random(1), Scores()
    for _ in range(12):
        starts = []
        for _ in range(120):
            raw_s = rnd.choice([300.0, 5000.0])
            starts.append((ShownEstimate(0.0, raw_s, 2 * raw_s, raw_s, 2 * raw_s), raw_s * rnd.lognormvariate(0, 1)))
        scores.score(starts)
        start_estimates.score(starts)
    assert scores.records == start_estimates.load_records()
