"""Two people, or a person and the scheduler, at the same run: what each read before the other wrote."""

from __future__ import annotations

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import services
from dstackweb.runs.models import Run
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
