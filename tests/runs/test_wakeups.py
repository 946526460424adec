"""Signals may be lost: a change succeeds while the broker is unreachable."""

from __future__ import annotations

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.runs import wakeups
from dstackweb.runs.models import Job, Run
from tests.factories import make_run


@pytest.mark.django_db(transaction=True)
def test_a_submit_succeeds_during_a_broker_outage(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(**_: object) -> None:
        raise ConnectionError("no broker")

    wakeups.pass_requested.connect(away)
    try:
        run = make_run(project, member)
    finally:
        wakeups.pass_requested.disconnect(away)
    assert Run.objects.get().pk == run.pk


@pytest.mark.django_db(transaction=True)
def test_a_request_to_check_jobs_outlives_an_absent_broker() -> None:
    def away(**_: object) -> None:
        raise ConnectionError("no broker")

    wakeups.cloud_checks_requested.connect(away)
    try:
        wakeups.request_job_checks([Job(host=None)])
    finally:
        wakeups.cloud_checks_requested.disconnect(away)
