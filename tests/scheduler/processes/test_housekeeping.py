from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs.models import Move
from dstackweb.runs.services import ensure_queue
from dstackweb.scheduler.processes import retention


@pytest.mark.django_db
def test_a_part_that_fails_stops_no_other(project: Project, member: User, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_before: dt.datetime) -> None:
        raise ValueError("broken")

    long_ago = timezone.now() - dt.timedelta(days=2)
    Move.objects.create(queue=ensure_queue(project), user=member, at=long_ago, changes=[])
    monkeypatch.setattr(retention.services, "forget_secrets", fail)
    with pytest.raises(ValueError, match="broken"):
        retention.keep_house()
    assert not Move.objects.exists()
