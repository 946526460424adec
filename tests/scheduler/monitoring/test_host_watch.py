"""Hosts that fall silent, come back, and leave (R13)."""

from __future__ import annotations

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.hosts import inventory
from dstackweb.backends.models import Host, HostEvent
from dstackweb.runs import attempts
from dstackweb.runs.models import Run
from dstackweb.scheduler import watch
from dstackweb.scheduler.models import PeriodicJob
from dstackweb.scheduler.processes.tasks import ensure_rows, host_jobs
from tests.factories import make_host, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db


def kinds() -> list[str]:
    return list(HostEvent.objects.order_by("id").values_list("kind", flat=True))


@pytest.fixture
def root(db: None) -> User:
    return make_user("root", is_superuser=True)


def test_going_offline_and_coming_back_are_recorded_once_each() -> None:
    make_host("box")
    for silent, expected in ((29, []), (31, ["offline"]), (40, ["offline"]), (0, ["offline", "online"])):
        Host.objects.update(silent_s=silent)
        watch.record_presence()
        assert kinds() == expected
    assert Host.objects.get().offline_since is None


def test_a_host_leaves_once_it_holds_nothing(project: Project, member: User, root: User) -> None:
    host = make_host("box")
    ensure_rows(host_jobs("box"))
    run = make_run(project, member)
    place_all()
    inventory.leave(host, root)
    watch.remove_left_hosts()
    assert Host.joined.filter(name="box", leaving=True, draining=True).exists()
    attempts.end_job(start(placed_job(run)).pk, "done_by_runner", exit_code=0)
    watch.remove_left_hosts()
    assert not Host.joined.exists()
    assert Host.objects.get().left_at is not None
    assert kinds() == ["leaving", "left"]
    assert not PeriodicJob.objects.filter(name__contains=":box").exists()


def test_nothing_is_placed_on_a_host_that_leaves_or_has_left(project: Project, member: User, root: User) -> None:
    host = make_host("box")
    inventory.leave(host, root)
    run = make_run(project, member)
    assert place_all() == 0
    watch.remove_left_hosts()
    assert place_all() == 0
    assert Run.objects.get(pk=run.pk).status == "submitted"


def test_a_host_that_is_to_stay_after_all_stays(root: User) -> None:
    host = make_host("box")
    inventory.leave(host, root)
    inventory.set_draining(host, root, False)
    watch.remove_left_hosts()
    assert Host.joined.filter(draining=False, leaving=False).exists()


def test_a_silent_host_leaves_too_but_not_with_a_job_that_may_live(project: Project, member: User, root: User) -> None:
    busy, idle = make_host("busy"), make_host("idle", cpus=0)
    run = make_run(project, member)
    place_all()
    start(placed_job(run))
    Host.objects.update(silent_s=9999, seen_at=timezone.now())
    for host in (busy, idle):
        inventory.leave(host, root)
    watch.remove_left_hosts()
    assert list(Host.joined.values_list("name", flat=True)) == ["busy"]
