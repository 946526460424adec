"""Sweeps whose creation, stop or retry is killed at each statement: no index is lost, and none is created twice."""

from __future__ import annotations

from contextlib import suppress

import pytest
from django.utils import timezone

from dstackweb.lib.errors import Conflict
from dstackweb.runs.models import Run, Sweep
from dstackweb.runs.recount import differences
from dstackweb.runs.services import Submission
from dstackweb.runs.states import ACTIVE, Reason, RunStatus
from dstackweb.runs.sweeps import creation, services as sweeps
from tests.factories import join, make_host, make_project, make_user, place_all
from tests.faults.killing import killed_at_each_statement
from tests.runs.sweeps.test_sweeps import end, names, settle

pytestmark = [pytest.mark.nightly, pytest.mark.django_db(transaction=True)]


def test_a_killed_submission_is_whole_or_not_there_and_creation_goes_on() -> None:
    main = make_project("main")
    ada = join(main, make_user("ada"))
    make_host(cpus=20)
    config = {"type": "task", "name": "lr", "commands": ["true"], "array": {"count": 7, "max_parallel": 3}}
    kills = 0
    for moment, number in killed_at_each_statement(
        lambda: sweeps.submit(main, ada, "member", Submission(config), "key"), every=4
    ):
        kills += 1
        assert list(differences()) == [], f"killed {moment} statement {number}"
        assert (Sweep.objects.count(), Run.objects.count()) in ((0, 0), (1, 3))
    assert kills > 8
    sweep = Sweep.objects.get()
    place_all()
    for name in names(sweep):
        end(name, code=1)
    for moment, number in killed_at_each_statement(lambda: creation.settle(timezone.now()), every=3):
        assert list(differences()) == [], f"killed {moment} statement {number}"
        assert Run.objects.count() in (3, 6)
    assert names(sweep) == ["lr-3", "lr-4", "lr-5"]
    for moment, number in killed_at_each_statement(lambda: sweeps.stop(sweep, ada, "member"), every=3):
        assert list(differences()) == [], f"killed {moment} statement {number}"
        if not Run.objects.filter(status__in=ACTIVE).exists():
            break
    settle()
    assert names(sweep) == []
    assert Run.objects.filter(termination_reason=Reason.STOPPED_BY_USER).count() == 3
    assert Sweep.objects.get().ended_at is not None

    def retry() -> None:
        with suppress(Conflict):  # it was killed once all was written
            sweeps.retry(sweep, ada, "member")

    for moment, number in killed_at_each_statement(retry, every=3):
        assert list(differences()) == [], f"killed {moment} statement {number}"
        assert Run.objects.filter(sweep=sweep).count() == 6
    assert names(sweep) == ["lr-0", "lr-1", "lr-2"]
    assert Run.objects.filter(sweep=None, status=RunStatus.FAILED).count() == 3
