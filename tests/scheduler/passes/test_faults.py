"""Passes that meet a pause, another pass, a broken run or an error half-way."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.hosts.inventory import host_views
from dstackweb.backends.models import Host
from dstackweb.runs import services
from dstackweb.runs.models import Job, Queue, Run, Verdict
from dstackweb.runs.queue import queues
from dstackweb.runs.recount import differences
from dstackweb.runs.selectors import why
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.models import PassRequest, PassState
from dstackweb.scheduler.passes import apply, loading, placement_pass, queue_scan
from tests.factories import make_host, make_run, place_all

pytestmark = pytest.mark.django_db


def begun(generation: int = 1) -> placement_pass.PlacementPass:
    """A pass that has claimed and read, and decided nothing yet."""
    until = timezone.now() + dt.timedelta(seconds=5)
    PassState.objects.update_or_create(pk=1, defaults={"generation": generation, "expires_at": until})
    return placement_pass.PlacementPass(generation)


def fresh(run: Run) -> Run:
    return Run.objects.select_related("queue").get(pk=run.pk)


def test_nothing_leaves_a_queue_that_is_paused_while_a_pass_is_at_work(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    started = begun()
    queues.change_queue(run.queue, member, "manager", paused=True)
    assert started.run() == 0
    assert fresh(run).status == RunStatus.SUBMITTED


def test_a_pass_that_fails_leaves_the_way_free_for_the_next(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host()
    make_run(project, member)
    with monkeypatch.context() as patched:
        patched.setattr(apply, "claim_all", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            place_all()
    assert place_all() == 1


def test_a_claim_renewed_during_the_check_does_not_look_like_one_from_the_future(db: None) -> None:
    now = timezone.now()
    begun()
    PassState.objects.update(expires_at=now + dt.timedelta(seconds=PassState.EXPIRES_S + 0.1))
    assert PassState.claim(now) is None


def test_a_long_walk_keeps_its_claim(project: Project, member: User, monkeypatch: pytest.MonkeyPatch) -> None:
    make_host()
    for cpus in (9, 10):
        make_run(project, member, resources={"cpu": cpus})
    monkeypatch.setattr(placement_pass, "RENEW_EVERY_S", 0)
    started, soon = begun(), timezone.now() + dt.timedelta(seconds=7)
    started.run()
    assert PassState.objects.get().expires_at > soon


def test_an_overtaken_pass_changes_no_verdict(project: Project, member: User) -> None:
    make_host()
    make_run(project, member, resources={"cpu": 9})
    overtaken = begun(7)
    begun(8)
    overtaken.run()
    assert not Verdict.objects.exists()


def test_a_host_drained_after_the_read_does_not_let_later_runs_overtake(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the pass read is stale: it looks again from the start, rather than going on behind the run it failed."""
    make_host("tight", cpus=1)
    make_host("roomy", cpus=2)
    first, second, third = (make_run(project, member) for _ in range(3))
    views = [host_views()]
    Host.objects.filter(name="tight").update(draining=True)
    monkeypatch.setattr(loading, "host_views", lambda: views.pop() if views else host_views())
    assert place_all() == 2
    assert [fresh(run).status for run in (first, second, third)] == ["provisioning", "provisioning", "submitted"]


def test_passes_that_are_wanted_without_end_leave_the_worker_to_others_now_and_then(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """django-q kills a task after a minute, and its claim with it."""
    make_run(project, member)
    counted: list[int] = []

    def run(self: placement_pass.PlacementPass) -> int:
        counted.append(self.generation)
        PassRequest.make()
        return 0

    monkeypatch.setattr(placement_pass.PlacementPass, "run", run)
    monkeypatch.setattr(placement_pass, "WORK_S", 0.05)
    placement_pass.run_passes()
    assert counted


def test_a_request_served_by_an_earlier_pass_starts_no_other(project: Project, member: User) -> None:
    make_host()
    make_run(project, member)
    PassRequest.make()
    assert placement_pass.run_requested() == 1
    generation = PassState.objects.get().generation
    assert placement_pass.run_requested() == 0
    assert PassState.objects.get().generation == generation


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_request_does_not_wait_for_a_pass_that_is_being_written() -> None:
    def request() -> bool:
        try:
            with connection.cursor() as cursor:
                cursor.execute("SET lock_timeout = '10s'")
            return PassRequest.make()
        finally:
            connection.close()

    generation = PassState.claim(timezone.now())
    assert generation is not None
    with ThreadPoolExecutor(1) as pool, transaction.atomic():
        PassState.renew(generation)
        assert pool.submit(request).result()
    assert PassRequest.is_waiting()


@pytest.mark.parametrize("setting", [{"paused": True}, {"max_running": 1}, {"max_gpus_per_user": 0}])
def test_a_limit_set_during_a_pass_holds_at_once(project: Project, member: User, setting: dict) -> None:
    make_host()
    run = make_run(project, member)
    started = begun()
    Queue.objects.filter(pk=run.queue_id).update(**setting)
    assert started.run() == 0
    assert fresh(run).status == RunStatus.SUBMITTED
    assert PassRequest.is_waiting()


def test_a_concurrently_stopped_run_affects_only_the_runs_behind_it(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host(cpus=2)
    first, second, third = (make_run(project, member) for _ in range(3))
    real, begun_with = apply.write_decisions, []

    def write(generation: int, backends: Any, placements: Sequence[apply.Placement], *more: Any) -> None:
        begun_with.append(len(placements))
        if len(begun_with) == 1:
            services.stop(Run.objects.select_related("user").get(pk=second.pk), member, "member")
        real(generation, backends, placements, *more)

    monkeypatch.setattr(apply, "write_decisions", write)
    assert place_all() == 2
    assert [fresh(run).status for run in (first, second, third)] == ["provisioning", "terminated", "provisioning"]
    assert begun_with == [2, 1, 1, 1]
    assert list(differences()) == []


def test_a_gang_in_a_batch_that_fails_leaves_nothing_behind(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        make_host(name, cpus=2)
    make_run(project, member)
    gang = make_run(project, member, nodes=2)
    views = host_views()
    Host.objects.filter(name="two").update(draining=True)
    started = begun()
    started.hosts = tuple(views)
    assert started.run() == 1
    assert fresh(gang).status == RunStatus.SUBMITTED
    assert Job.objects.count() == 1
    assert list(differences()) == []


def test_a_run_with_an_unreadable_spec_does_not_block_others(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_scan, "_specs", {})
    make_host()
    broken, sound = make_run(project, member), make_run(project, member, resources={"cpu": 2})
    Run.objects.filter(pk=broken.pk).update(spec={"type": "no longer known"})
    assert place_all() == 1
    assert Job.objects.get().run_id == sound.pk
    assert why(fresh(broken))[0] == "backend_unavailable"


def test_a_run_behind_many_that_fit_nowhere_is_found_batch_by_batch(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_scan, "BATCH", 2)
    make_host()
    for index in range(9):
        make_run(project, member, resources={"cpu": 9 + index // 2})
    Run.objects.update(rank=0)
    last = make_run(project, member, priority=0)
    assert place_all() == 1
    assert fresh(last).status == RunStatus.PROVISIONING
    assert Verdict.objects.count() == 5
