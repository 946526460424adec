"""Two people, or a person and the scheduler, at the same run: what each read before the other wrote."""

from __future__ import annotations

import re

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Stale
from dstackweb.runs import attempts, selectors, services
from dstackweb.runs.models import Job, Queue, QueueCount, Run
from dstackweb.runs.recount import differences
from dstackweb.runs.states import Reason, RunStatus
from dstackweb.runs.transitions import lock_run, move_run
from tests.factories import as_if, make_host, make_run, place_all, placed_job, start

pytestmark = pytest.mark.django_db


def test_a_move_read_before_the_run_changed_its_queue_changes_nothing(project: Project, member: User) -> None:
    """Else the counters of the old queue would be shifted for a run that stands in the new one."""
    services.ensure_queue(project, "night")
    run = make_run(project, member)
    seen_by_the_pass = Run.objects.get(pk=run.pk)
    services.set_queue(run, member, "member", "night")
    assert not move_run(seen_by_the_pass, RunStatus.PROVISIONING, now=timezone.now())
    assert list(differences()) == []


def test_a_priority_is_not_ranked_by_the_step_of_a_queue_that_the_run_has_left(project: Project, member: User) -> None:
    Queue.objects.filter(pk=services.ensure_queue(project, "night").pk).update(ageing_minutes=None)
    run = make_run(project, member)
    seen = Run.objects.get(pk=run.pk)
    services.set_queue(run, member, "member", "night")
    with pytest.raises(Stale, match="in queue night now"):
        services.set_priority(seen, member, "member", 60)
    now = Run.objects.select_related("queue").get(pk=run.pk)
    assert (now.priority, now.rank) == (50, now.seniority_us - 50 * now.queue.step_us)


def test_a_queue_is_never_there_without_its_counters(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may die between two statements; without counters a queue's runs would never be looked at."""

    def die(**_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(QueueCount.objects, "get_or_create", die)
        with pytest.raises(KeyboardInterrupt):
            services.ensure_queue(project, "night")
    assert services.ensure_queue(project, "night").count.version == 0


def test_settling_a_concurrently_ended_run_changes_nothing(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    attempts.end_job(start(placed_job(run)).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    attempts.settle_run(lock_run(run.pk))
    assert Run.objects.get(pk=run.pk).status == RunStatus.DONE


def test_a_stop_after_an_abort_restores_no_grace_and_starts_no_new_wait(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    job = start(placed_job(run))
    services.stop(run, member, "member", abort=True)
    as_if(Job.objects.filter(pk=job.pk), status_s=30)
    services.stop(run, member, "member")
    after = Job.objects.timed().get(pk=job.pk)
    assert (after.stop_grace_s, after.status_s) == (0, 30)


def test_a_gang_releases_its_hosts_in_a_fixed_order(project: Project, member: User) -> None:
    """Whoever claims takes hosts in this order too: two that take them in opposite orders would wait for ever."""
    large, small = make_host("large", cpus=8), make_host("small", cpus=1)
    run = make_run(project, member, nodes=2)
    place_all()
    assert [job.host_id for job in Job.objects.filter(run=run).order_by("node")] == [small.pk, large.pk]
    with CaptureQueriesContext(connection) as asked:
        services.stop(run, member, "member", abort=True)
    updates = [query["sql"] for query in asked if query["sql"].startswith('UPDATE "backends_host"')]
    assert [re.findall(r'"id" = (\d+)', sql) for sql in updates] == [[str(large.pk)], [str(small.pk)]]
    assert list(differences()) == []


def test_resources_of_an_ended_node_are_free_in_lists_at_once(project: Project, member: User) -> None:
    make_host(gpus=2)
    run = make_run(project, member, nodes=2, resources={"gpu": 1})
    place_all()
    first = start(placed_job(run, 0))
    start(placed_job(run, 1), "second")
    shown = selectors.list_version(project)
    attempts.end_job(first.pk, Reason.DONE_BY_RUNNER, exit_code=0)
    assert selectors.list_version(project) != shown
