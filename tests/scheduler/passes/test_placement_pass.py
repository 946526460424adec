from __future__ import annotations

import datetime as dt

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Gpu, Host
from dstackweb.runs.models import Allocation, Job, Queue, Run, Verdict
from dstackweb.runs.recount import differences
from dstackweb.runs.rows import queue_rows
from dstackweb.runs.selectors import blockers_of, why
from dstackweb.runs.services import ensure_queue
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.models import ClaimLost, PassRequest, PassState
from dstackweb.scheduler.passes import placement_pass
from dstackweb.scheduler.passes.decision import decide_now
from dstackweb.scheduler.placement import capacity
from tests.factories import make_host, make_project, make_run, place_all

pytestmark = pytest.mark.django_db


def statuses(project: Project) -> dict[str, str]:
    return dict(Run.objects.filter(project=project).values_list("name", "status"))


def test_runs_are_placed_in_the_order_of_the_queue_until_nothing_fits(project: Project, member: User) -> None:
    """R23, R27."""
    make_host(cpus=2)
    for name, priority in [("dev", 30), ("regular", 50), ("ab", 70)]:
        make_run(project, member, name, priority=priority)
    assert place_all() == 2
    assert statuses(project) == {"ab": "provisioning", "regular": "provisioning", "dev": "submitted"}


def test_a_run_that_does_not_fit_does_not_block_a_smaller_one_behind_it(project: Project, member: User) -> None:
    make_host(cpus=4)
    make_run(project, member, "now", resources={"cpu": 2})
    place_all()
    make_run(project, member, "big", resources={"cpu": 4})
    make_run(project, member, "small")
    assert place_all() == 1
    assert statuses(project)["small"] == "provisioning"


def test_no_gpu_is_claimed_twice_and_gpus_in_foreign_use_are_not_claimed(project: Project, member: User) -> None:
    make_host(gpus=3)
    Gpu.objects.filter(index=1).update(stranger={"pid": 4711, "user": "eve"})
    for _ in range(3):
        make_run(project, member, resources={"gpu": 1})
    assert place_all() == 2
    held = list(Allocation.objects.exclude(gpu=None).values_list("gpu__index", flat=True))
    assert sorted(held) == [0, 2]


def test_a_waiting_run_has_a_reason_with_numbers(project: Project, member: User) -> None:
    make_host(gpus=2)
    make_run(project, member, "holder", resources={"gpu": 1})
    make_run(project, member, "wants-two", resources={"gpu": 2})
    place_all()
    row = queue_rows(ensure_queue(project))[0]
    assert row.reason == "waiting_for_capacity"
    assert row.reason_data["gpus"] == 2
    assert (row.reason_data["gpus_free"], row.reason_data["gpus_total"]) == (1, 2)


@pytest.mark.parametrize(
    ("host", "keys", "reason"),
    [
        ({}, {"resources": {"gpu": 1}}, "impossible"),
        ({}, {"resources": {"cpu": 9}}, "impossible"),
        ({"cpus": 2}, {"nodes": 3}, "impossible"),
        ({"draining": True}, {}, "backend_unavailable"),
        ({"silent_s": 1e6}, {}, "backend_unavailable"),
        ({"isolation": "none"}, {}, "backend_unavailable"),
        ({}, {"backends": ["aws"]}, "backend_unavailable"),
        ({}, {"image": "python:3.12"}, "impossible"),
        ({"labels": {"region": "hall-1"}}, {"regions": ["hall-2"]}, "impossible"),
        ({}, {"instance_types": ["box-2"]}, "impossible"),
    ],
)
def test_the_most_permanent_reason_is_named(
    project: Project, member: User, host: dict, keys: dict, reason: str
) -> None:
    make_host(**host)
    run = make_run(project, member, **keys)
    assert place_all() == 0
    assert why(Run.objects.select_related("queue").get(pk=run.pk))[0] == reason


def test_a_paused_queue_shows_first_what_could_never_start(project: Project, member: User) -> None:
    make_host()
    possible, impossible = make_run(project, member), make_run(project, member, resources={"cpu": 9})
    Queue.objects.update(paused=True)
    assert place_all() == 0
    found = {run: Run.objects.select_related("queue__project").get(pk=run.pk) for run in (possible, impossible)}
    assert blockers_of(found[possible]) == [("queue_paused", {})]
    assert [code for code, _data in blockers_of(found[impossible])] == ["impossible", "queue_paused"]
    assert [row.reason for row in queue_rows(found[possible].queue)] == ["queue_paused", "impossible"]
    for run in found.values():
        now = decide_now(run)
        assert [(waits.reason, waits.data) for waits in now.blockers] == blockers_of(run)


def test_a_paused_queue_shows_when_what_it_lacked_has_come(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, resources={"cpu": 9})
    Queue.objects.update(paused=True)
    place_all()
    make_host("larger", cpus=16)
    place_all()
    assert why(Run.objects.select_related("queue").get(pk=run.pk)) == ("queue_paused", {})


def test_a_queue_at_its_limit_shows_first_what_could_never_start(project: Project, member: User) -> None:
    make_host()
    make_run(project, member)
    place_all()
    make_run(project, member), make_run(project, member, resources={"cpu": 9})
    Queue.objects.update(max_running=1)
    assert place_all() == 0
    assert [row.reason for row in queue_rows(ensure_queue(project))] == ["queue_limit", "impossible"]


def test_regions_and_instance_types_choose_among_the_hosts(project: Project, member: User) -> None:
    make_host("box-1", labels={"region": "hall-1"})
    make_host("box-2", labels={"region": "hall-2"})
    make_host("box-3", labels={"region": "hall-2"})
    run = make_run(project, member, regions=["hall-2"], instance_types=["box-1", "box-3"])
    assert place_all() == 1
    assert Job.objects.get(run=run).host.name == "box-3"


def test_a_verdict_is_written_only_when_it_changes(project: Project, member: User) -> None:
    make_host()
    make_run(project, member, resources={"cpu": 9})
    place_all()
    first = Verdict.objects.get()
    version = ensure_queue(project).count.version
    place_all()
    assert Verdict.objects.get().at == first.at
    assert ensure_queue(project).count.version == version


def test_a_reason_ends_when_a_run_of_its_shape_is_placed(project: Project, member: User) -> None:
    host = make_host(draining=True)
    make_run(project, member)
    place_all()
    assert Verdict.objects.exists()
    Host.objects.filter(pk=host.pk).update(draining=False)
    assert place_all() == 1
    later = make_run(project, member)
    assert why(Run.objects.select_related("queue").get(pk=later.pk))[0] == "starting"


def test_ten_runs_of_one_shape_are_decided_once(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host()
    for _ in range(10):
        make_run(project, member, resources={"cpu": 9})
    decided: list[object] = []
    real = capacity.place_on_hosts
    monkeypatch.setattr(capacity, "place_on_hosts", lambda spec, hosts: decided.append(spec) or real(spec, hosts))
    place_all()
    assert len(decided) == 1


def test_projects_are_served_in_order_of_their_usage_per_weight(project: Project, member: User) -> None:
    make_host(cpus=6)
    heavy = make_project("heavy", weight=2)
    for _ in range(6):
        make_run(project, member)
        make_run(heavy, member)
    assert place_all() == 6
    placed = Run.objects.filter(status=RunStatus.PROVISIONING)
    assert placed.filter(project=heavy).count() == 4
    assert placed.filter(project=project).count() == 2


def test_a_pass_that_was_overtaken_writes_nothing_more(project: Project, member: User) -> None:
    make_host()
    make_run(project, member)
    overtaken = placement_pass.PlacementPass(generation=7)
    PassState.objects.update_or_create(pk=1, defaults={"generation": 8})
    assert overtaken.run() == 0
    assert not Job.objects.exists()


def test_a_pass_that_outlived_its_claim_cannot_renew_or_release_the_next_one() -> None:
    now = timezone.now()
    first = PassState.claim(now)
    second = PassState.claim(now + dt.timedelta(seconds=PassState.EXPIRES_S + 1))
    assert first is not None
    assert second is not None
    with pytest.raises(ClaimLost):
        PassState.renew(first)
    PassState.release(first, 1.0, 0)
    assert PassState.objects.get().expires_at is not None
    PassState.renew(second)
    PassState.release(second, 1.0, 0)
    assert PassState.objects.get().expires_at is None


def test_a_second_concurrent_pass_exits_and_the_first_serves_its_request(project: Project, member: User) -> None:
    PassState.objects.create(pk=1, generation=3, expires_at=timezone.now() + dt.timedelta(seconds=5))
    make_host()
    make_run(project, member)
    assert place_all() == 0
    assert PassRequest.is_waiting()


def test_the_claim_of_a_pass_that_died_expires(project: Project, member: User) -> None:
    make_host()
    make_run(project, member)
    PassState.objects.create(pk=1, generation=3, expires_at=timezone.now() - dt.timedelta(seconds=1))
    assert place_all() == 1


def test_a_claim_from_the_future_is_void_after_the_clock_was_put_back(project: Project, member: User) -> None:
    make_host()
    make_run(project, member)
    PassState.objects.create(pk=1, generation=3, expires_at=timezone.now() + dt.timedelta(days=1))
    assert place_all() == 1


def test_capacity_claimed_between_read_and_claim_is_not_claimed_twice(project: Project, member: User) -> None:
    host = make_host(cpus=1)
    first, second = make_run(project, member), make_run(project, member)
    stale = placement_pass.PlacementPass(generation=0)
    PassState.objects.get_or_create(pk=1)
    stale_again = placement_pass.PlacementPass(generation=0)
    assert stale.run() == 1
    assert stale_again.run() == 0
    host.refresh_from_db()
    assert host.cpus_used == 1
    assert sorted(Run.objects.filter(pk__in=[first.pk, second.pk]).values_list("status", flat=True)) == [
        "provisioning", "submitted",
    ]  # fmt: skip
    assert list(differences()) == []


def test_a_pass_costs_no_more_statements_for_many_runs_than_for_a_few(project: Project, member: User) -> None:
    """What a pass needs of each run it has read with the others."""
    make_host(cpus=100)
    counted = []
    for number in (2, 20):
        for _ in range(number):
            make_run(project, member)
        with CaptureQueriesContext(connection) as queries:
            assert place_all() == number
        counted.append(len(queries))
    assert counted[1] <= counted[0]
