"""A removal that is killed at each of its statements: the run is there with all that counts it, or gone from it all."""

from __future__ import annotations

import pytest
from django.db.models import Q

from dstackweb.runs import removal
from dstackweb.runs.models import Job, QueueCount, RemovedRun, Run
from dstackweb.runs.recount import differences
from tests.factories import join, make_host, make_project, make_user
from tests.faults.killing import killed_at_each_statement
from tests.runs.test_removal import done_run

pytestmark = [pytest.mark.nightly, pytest.mark.django_db(transaction=True)]


def test_a_killed_removal_leaves_counters_right_and_its_logs_to_the_next() -> None:
    main = make_project("main")
    ada = join(main, make_user("ada"))
    make_host()
    runs = [done_run(main, ada, f"train-{number}") for number in range(2)]
    logs = [job.pk for job in Job.objects.all()]
    kills = 0
    for moment, number in killed_at_each_statement(lambda: removal.remove([run.pk for run in runs], Q())):
        kills += 1
        assert list(differences()) == [], f"killed {moment} statement {number}"
        left = Run.objects.count()
        assert left in (0, 2)
        assert QueueCount.objects.get().done == left
        assert RemovedRun.objects.count() == 2 - left
        assert left == 0 or all(map(logs.log_size, logs))
    assert kills > 10
    while removal.remove_logs():
        continue
    assert not any(map(logs.log_size, logs))
