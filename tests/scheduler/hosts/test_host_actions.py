"""What admins do about a host that is held back, or whose machine is gone."""

from __future__ import annotations

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Host, HostEvent
from dstackweb.lib.errors import Conflict, Invalid
from dstackweb.runs import services
from dstackweb.runs.models import Allocation, Run
from dstackweb.runs.recount import differences
from dstackweb.runs.run_places import silent_hosts
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler import team_hosts
from dstackweb.wording import statuses
from tests.factories import make_host, make_run, make_user, place_all, placed_job, start

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]


@pytest.fixture
def root(db: None) -> User:
    return make_user("root", is_superuser=True)


def fresh(run: Run) -> Run:
    return Run.objects.get(pk=run.pk)


def test_a_stopped_run_on_a_dead_host_ends_once_the_machine_is_declared_gone(
    project: Project, member: User, root: User
) -> None:
    host = make_host(gpus=1)
    run = make_run(project, member, resources={"gpu": 1})
    place_all()
    start(placed_job(run))
    Host.objects.update(silent_s=1e6)
    stopped = services.stop(fresh(run), member, "member")
    assert stopped.status == RunStatus.TERMINATING
    said = statuses.silent(stopped, silent_hosts(stopped))
    assert "Waits for box-1, which is silent" in said
    assert "declares on its page that it is gone" in said
    assert team_hosts.declare_gone(host, root, " burnt down ") == 1
    assert fresh(run).status == RunStatus.TERMINATED
    assert silent_hosts(fresh(run)) == []
    assert not Allocation.objects.exists()
    event = HostEvent.objects.get(kind="gone")
    assert (event.actor, event.data) == (root, {"reason": "burnt down", "jobs": 1})
    assert list(differences()) == []


def test_runs_of_a_gone_host_are_requeued_if_unclaimed_and_retried_if_allowed(
    project: Project, member: User, root: User
) -> None:
    host = make_host()
    unclaimed, again, plain = (
        make_run(project, member),
        make_run(project, member, retry=True),
        make_run(project, member),
    )
    place_all()
    for run in (again, plain):
        start(placed_job(run))
    Host.objects.update(silent_s=1e6)
    assert team_hosts.declare_gone(host, root, "sold") == 3
    assert [fresh(run).status for run in (unclaimed, again, plain)] == ["submitted", "pending", "failed"]
    assert statuses.run_message(fresh(plain)) == "root declared that box-1 is gone: sold"


def test_a_host_with_heartbeats_cannot_be_declared_gone(project: Project, member: User, root: User) -> None:
    host = make_host()
    run = make_run(project, member)
    place_all()
    start(placed_job(run))
    with pytest.raises(Conflict, match="is online"):
        team_hosts.declare_gone(host, root, "looks dead")
    with pytest.raises(Invalid):
        team_hosts.declare_gone(host, root, "  ")
    assert fresh(run).status == RunStatus.RUNNING
