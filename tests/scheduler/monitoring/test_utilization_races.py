"""Two workers apply a policy to the same idle run at once, on real connections."""

from __future__ import annotations

import functools

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.gpus import exemptions, intake, rollout
from dstackweb.gpus.models import GpuSeries, JobPolicy, PolicyExemption, PolicyStop
from dstackweb.gpus.window import PolicyAction
from dstackweb.lib.times import to_moment
from dstackweb.profiles.models import Profile
from dstackweb.runs import services
from dstackweb.runs.models import Run
from dstackweb.runs.recount import differences
from dstackweb.scheduler import utilization
from tests.accounts.races import at_once
from tests.factories import make_run, place_all, placed_job
from tests.gpus.snapshots import EVERY_MS, START_MS, snapshot
from tests.gpus.watching import IDLE, MINUTE, begin, stopped, watch

pytestmark = pytest.mark.django_db(transaction=True)
NOW = to_moment(START_MS + MINUTE)
OTHER = {"min_gpu_utilization": 90, "time_window": "1h"}


def kinds(run: Run) -> list[str]:
    return list(run.events.filter(kind__startswith="utilization").values_list("kind", flat=True))


def test_a_stop_by_several_concurrent_workers_happens_once(project: Project, member: User) -> None:
    job = begin(project, member, gpus=4, utilization_policy=IDLE)
    watch(MINUTE - EVERY_MS)
    host = placed_job(job.run).host
    assert host is not None
    intake.add_snapshot(host, snapshot(g0=0, g1=0, g2=0, g3=0), START_MS + MINUTE)
    act = functools.partial(utilization.apply_policy, job, NOW)
    assert sorted(at_once(act, act, act)) == [PolicyAction.NOTHING, PolicyAction.NOTHING, PolicyAction.STOP]
    assert (PolicyStop.objects.count(), kinds(job.run)) == (1, ["utilization_stop"])
    assert stopped(job.run).status == "terminated"
    assert list(differences()) == []


def test_a_stop_and_a_concurrent_keep_or_manual_stop_are_consistent(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exemptions.timezone, "now", lambda: NOW)
    for number in range(4):
        job = begin(project, member, f"run-{number}", utilization_policy=IDLE)
        watch(MINUTE - EVERY_MS)
        host, run = placed_job(job.run).host, Run.objects.get(pk=job.run_id)
        assert host is not None
        intake.add_snapshot(host, snapshot(g0=0, g1=0, g2=0, g3=0), START_MS + MINUTE)
        act = functools.partial(utilization.apply_policy, job, NOW)
        keep = functools.partial(exemptions.exempt, run, member, "member", "it loads data")
        stop = functools.partial(services.stop, run, member, "member")
        acted, did = at_once(act, keep if number % 2 else stop)
        run.refresh_from_db()
        assert acted in (PolicyAction.STOP, PolicyAction.NOTHING)
        assert (acted == PolicyAction.STOP) == PolicyStop.objects.exists()
        if number % 2:
            # Who came first has won: it is kept and runs, or it is stopped and nothing is kept.
            assert run.status == ("terminating" if acted == PolicyAction.STOP else "running")
            assert (
                PolicyExemption.objects.filter(run=run).exists()
                == isinstance(did, PolicyExemption)
                == (acted == PolicyAction.NOTHING)
            )
        else:
            by_policy = "terminated_due_to_utilization_policy"
            assert run.stop_reason == (by_policy if acted == PolicyAction.STOP else "stopped_by_user")
        stopped(run)
        PolicyStop.objects.all().delete()
    assert list(differences()) == []


def test_samples_stored_during_a_policy_change_are_judged_by_the_new_one(project: Project, member: User) -> None:
    profile = Profile.objects.create(name="nightly", settings={"utilization_policy": IDLE})
    for number in range(4):
        job = begin(project, member, f"run-{number}", gpus=4, profile="nightly")
        if number % 2:  # bound before, and not yet
            watch(EVERY_MS)
        wanted = OTHER if number < 2 else {**OTHER, "min_gpu_utilization": 80}
        profile.settings = {"utilization_policy": wanted}
        profile.save()
        shown = rollout.fingerprint(rollout.policy_set_by(profile))
        host = placed_job(job.run).host
        assert host is not None
        seen = snapshot(g0=85, g1=85, g2=85, g3=85)
        sample = functools.partial(intake.add_snapshot, host, seen, START_MS + 2 * EVERY_MS)
        apply = functools.partial(rollout.apply, profile, [job.run_id], shown, member)
        _worth, changed = at_once(sample, apply)
        assert changed == 1
        assert JobPolicy.objects.get(pk=job.pk).min_gpu_utilization == wanted["min_gpu_utilization"]
        low = wanted["min_gpu_utilization"] == 90
        for series in GpuSeries.objects.filter(job=job):
            assert series.low_last_ms is not None
            assert (series.low_since_ms is not None) == low
        stopped(job.run)
        profile.settings = {"utilization_policy": IDLE}
        profile.save()


def test_the_next_run_is_recorded_once(project: Project, member: User) -> None:
    job = begin(project, member, gpus=4, utilization_policy=IDLE)
    watch(MINUTE)
    stopped(job.run)
    make_run(project, member, "next", resources={"gpu": 4})
    place_all()
    PolicyStop.objects.update(at=job.placed_at, next_run=None)
    job.run.events.filter(kind="utilization_next").delete()
    note = functools.partial(utilization.record_next_runs, job.placed_at)
    assert sorted(at_once(note, note)) == [0, 1]
    assert job.run.events.filter(kind="utilization_next").count() == 1
