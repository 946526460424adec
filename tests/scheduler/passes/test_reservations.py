"""Reservations as passes make, keep and end them."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Gpu, Host
from dstackweb.runs import attempts, services
from dstackweb.runs.attempts import end_job
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.selectors import why
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.models import Reservation
from dstackweb.scheduler.passes.decision import decide_now, visible_reservation
from dstackweb.scheduler.team_hosts import list_hosts
from dstackweb.wording import waiting
from tests.factories import make_host, make_project, make_run, place_all, placed_job, start

pytestmark = pytest.mark.django_db


def waited(run: Run, minutes: float = 20) -> Run:
    Run.objects.filter(pk=run.pk).update(queued_at=timezone.now() - dt.timedelta(minutes=minutes))
    return run


def fresh(run: Run) -> Run:
    return Run.objects.select_related("queue", "project").get(pk=run.pk)


def events(run: Run) -> list[str]:
    kinds = ("reserved", "reservation_ended")
    return list(Run.objects.get(pk=run.pk).events.filter(kind__in=kinds).values_list("kind", flat=True))


@pytest.fixture
def reserved(project: Project, member: User) -> Run:
    """Two of three GPUs are reserved for it: one is free, one held for half an hour, one for a whole hour."""
    make_host(gpus=3, cpus=8)
    for limit in ("30m", "60m"):
        holder = make_run(project, member, f"holder-{limit}", resources={"gpu": 1}, max_duration=limit)
        place_all()
        start(placed_job(holder))
    run = waited(make_run(project, member, "big", resources={"gpu": 2, "cpu": 4}))
    assert place_all() == 0
    return run


def small(project: Project, member: User, **keys: Any) -> Run:
    return make_run(project, member, **({"resources": {"gpu": 1}} | keys))


def test_the_first_run_that_has_waited_long_gets_named_gpus_and_a_start(project: Project, reserved: Run) -> None:
    """R27."""
    row = Reservation.objects.get()
    assert row.run == reserved
    assert [(node["host"], len(node["gpus"])) for node in row.nodes] == [("box-1", 2)]
    expected = timezone.now() + dt.timedelta(seconds=30 * 60 + 20 + 60)
    assert abs((row.starts_at - expected).total_seconds()) < 30
    assert events(reserved) == ["reserved"]
    seen = visible_reservation(reserved.pk, [project.pk])
    assert seen is not None
    assert seen.run == reserved


def test_a_run_that_has_not_waited_long_gets_none(project: Project, member: User) -> None:
    make_host(gpus=1)
    make_run(project, member, resources={"gpu": 1})
    make_run(project, member, resources={"gpu": 1})
    place_all()
    assert not Reservation.objects.exists()


def test_a_later_run_is_backfilled_only_if_it_ends_before_the_reserved_start(
    project: Project, member: User, reserved: Run
) -> None:
    """R27."""
    long = small(project, member, max_duration="2h")
    assert place_all() == 0
    code, data = why(fresh(long))
    assert (code, data["run"], data["project"]) == ("reserved_for_other", "big", project.name)
    assert data["starts_at"] == Reservation.objects.get().starts_at.isoformat()
    text = waiting.reason(code, data).text
    assert "reserved for big" in text
    assert re.search(r"with max_duration: 2[89]m this run could start first", text)
    short = small(project, member, max_duration="25m")
    assert place_all() == 1
    assert fresh(short).status == RunStatus.PROVISIONING


def test_people_of_another_project_do_not_learn_for_whom_it_is_reserved(member: User, reserved: Run) -> None:
    other = make_project("other")
    run = small(other, member, max_duration="2h")
    place_all()
    code, data = why(fresh(run))
    assert code == "reserved_for_other"
    assert "run" not in data
    assert "project" not in data
    assert "a run of another project" in waiting.reason(code, data).text
    seen = visible_reservation(reserved.pk, [other.pk])
    assert seen is not None
    assert seen.run is None


def test_cpus_that_are_reserved_stay_free_too(project: Project, member: User, reserved: Run) -> None:
    """Of eight CPUs two are held, one until after the start, and four reserved."""
    four = make_run(project, member, resources={"cpu": 4})
    assert place_all() == 0
    assert why(fresh(four))[0] == "reserved_for_other"
    make_run(project, member, resources={"cpu": 3})
    assert place_all() == 1


def test_a_run_before_it_in_its_queue_is_not_bound(project: Project, member: User, reserved: Run) -> None:
    small(project, member, priority=80, max_duration="2h")
    assert place_all() == 1


def test_the_reservation_moves_to_a_run_ahead_that_has_also_waited_long(
    project: Project, member: User, reserved: Run
) -> None:
    earlier = waited(small(project, member, name="earlier", priority=80, resources={"gpu": 3}))
    place_all()
    assert Reservation.objects.get().run == earlier
    assert events(reserved) == ["reserved", "reservation_ended"]
    assert events(earlier) == ["reserved"]


def test_it_ends_when_its_run_is_placed(project: Project, member: User, reserved: Run) -> None:
    services.stop(Run.objects.select_related("user").get(name="holder-60m"), member, "member", abort=True)
    job = placed_job(Run.objects.get(name="holder-60m"))
    end_job(job.pk, "aborted_by_user")
    assert place_all() == 1
    assert fresh(reserved).status == RunStatus.PROVISIONING
    assert not Reservation.objects.exists()
    assert fresh(reserved).events.get(kind="reservation_ended").data == {"reason": "placed"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda run: services.stop(run, run.user, "member"), "left"),
        (lambda run: Queue.objects.filter(pk=run.queue_id).update(paused=True), "queue_paused"),
        (lambda run: Queue.objects.filter(pk=run.queue_id).update(max_gpus_per_user=1), "user_limit"),
        (lambda run: Host.objects.update(draining=True), "backend_unavailable"),
        (lambda run: Gpu.objects.filter(index__gt=0).update(present=False), "impossible"),
        (lambda run: Gpu.objects.filter(index__gt=0).update(stranger={"pid": 1, "user": "eve"}), "vanished"),
    ],
    ids=["stopped", "paused", "limit", "drained", "GPUs gone", "strangers"],
)
def test_it_ends_when_its_run_can_not_use_it_any_more(reserved: Run, change: Any, reason: str) -> None:
    change(Run.objects.select_related("user", "queue", "project").get(pk=reserved.pk))
    place_all()
    assert not Reservation.objects.exists()
    assert fresh(reserved).events.get(kind="reservation_ended").data == {"reason": reason}


def test_a_pass_that_changes_nothing_writes_nothing(project: Project, reserved: Run) -> None:
    before = Reservation.objects.values().get()
    version = services.ensure_queue(project).count.version
    place_all()
    assert Reservation.objects.values().get() == before
    assert services.ensure_queue(project).count.version == version


def test_a_reservation_with_an_unknown_start_lets_short_runs_pass_and_is_not_repeated(
    project: Project, member: User
) -> None:
    make_host(gpus=2)
    small(project, member, max_duration="off")
    place_all()
    run = waited(small(project, member, resources={"gpu": 2}))
    place_all()
    row = Reservation.objects.get()
    assert row.starts_at is None
    assert 3500 < (row.expires_at - timezone.now()).total_seconds() <= 3600
    short = small(project, member, max_duration="1m")
    assert place_all() == 1
    attempts.end_job(start(placed_job(short)).pk, "done_by_runner", exit_code=0)
    other = small(project, member, max_duration="2h")
    assert place_all() == 0
    code, data = why(fresh(other))
    assert code == "reserved_for_other"
    assert re.search(r"until .* at most; with max_duration: 5\dm this run could start", waiting.reason(code, data).text)
    past = timezone.now() - dt.timedelta(seconds=1)
    Reservation.objects.update(expires_at=past)
    assert place_all() == 1
    assert fresh(run).events.get(kind="reservation_ended").data == {"reason": "expired"}
    assert fresh(other).status == RunStatus.PROVISIONING
    place_all()
    kept = Reservation.objects.get()
    assert (kept.run, kept.lapsed_at is None, kept.expires_at) == (run, False, past)
    assert not Reservation.kept().exists()


def test_after_anothers_turn_a_run_whose_hold_lapsed_gets_the_next(project: Project, member: User) -> None:
    make_host(gpus=2)
    small(project, member, max_duration="off")
    place_all()
    first = waited(small(project, member, resources={"gpu": 2}))
    place_all()
    second = waited(small(project, member, name="second", resources={"gpu": 2}, max_duration="2h"))
    place_all()
    assert [row.run for row in Reservation.kept()] == [first]
    Reservation.objects.update(expires_at=timezone.now() - dt.timedelta(seconds=1))
    place_all()
    assert [row.run for row in Reservation.kept()] == [second]
    assert Reservation.objects.count() == 2
    services.stop(fresh(second), member, "member")
    place_all()
    place_all()
    assert [row.run for row in Reservation.kept()] == [first]
    assert events(first) == ["reserved", "reservation_ended", "reserved"]


def test_each_disjoint_set_of_hosts_has_its_own_reservation(project: Project, member: User) -> None:
    """An A100 run that holds a reservation keeps no H100 run from its own."""
    runs = {}
    for model in ("A100", "H100"):
        box = make_host(f"box-{model.lower()}", gpus=2)
        Gpu.objects.filter(host=box).update(name=f"NVIDIA {model}")
        small(project, member, resources={"gpu": f"{model}:1"}, max_duration="30m")
    assert place_all() == 2
    for model in ("A100", "H100"):
        runs[model] = waited(small(project, member, name=f"big-{model.lower()}", resources={"gpu": f"{model}:2"}), 600)
    place_all()
    assert {row.run: {node["host"] for node in row.nodes} for row in Reservation.kept()} == {
        runs["A100"]: {"box-a100"}, runs["H100"]: {"box-h100"},
    }  # fmt: skip
    for model, run in runs.items():
        later = small(project, member, resources={"gpu": f"{model}:1"}, max_duration="2h")
        place_all()
        assert why(fresh(later))[1]["run"] == run.name
        for reader in (run, later):
            seen = decide_now(fresh(reader)).reservation
            assert seen is not None
            assert seen.run == run
    assert [found.kept.run for found in list_hosts() if found.kept] == [runs["A100"], runs["H100"]]


def test_with_an_unknown_start_a_run_placed_by_the_same_pass_is_assumed_to_end_too(
    project: Project, member: User
) -> None:
    """At the start the host has four CPUs and keeps one: a run of two finds room beside it."""
    make_host(gpus=2, cpus=4)
    small(project, member, resources={"gpu": 1, "cpu": 2}, max_duration="off")
    run = waited(small(project, member, resources={"gpu": 2, "cpu": 1}))
    assert place_all() == 1
    assert Reservation.objects.get().run == run
    make_run(project, member, resources={"cpu": 2}, max_duration="off")
    assert place_all() == 1


def test_more_time_for_a_holder_moves_the_start(reserved: Run) -> None:
    before = Reservation.objects.get().starts_at
    Run.objects.filter(name="holder-30m").update(extended_s=900)
    place_all()
    assert Reservation.objects.get().starts_at == before + dt.timedelta(seconds=900)
