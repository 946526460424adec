"""Two people, or a person and the scheduler, at the same run: what each read before the other wrote."""

from __future__ import annotations

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Stale
from dstackweb.runs import services
from dstackweb.runs.models import Queue, QueueCount, Run
from dstackweb.runs.recount import differences
from dstackweb.runs.states import RunStatus
from dstackweb.runs.transitions import move_run
from tests.factories import make_run

pytestmark = pytest.mark.django_db


def test_a_mover_that_looked_before_the_run_changed_its_queue_changes_nothing(project: Project, member: User) -> None:
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
