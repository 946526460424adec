"""`dstackweb queue --at`: a queue as it was, from a shell."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.cli.history import moment
from dstackweb.cli.output import UsageError
from dstackweb.runs import removal, services
from tests.cli.conftest import Cli
from tests.factories import make_host, make_run, place_all

NOW = datetime(2026, 11, 26, 14, 30, tzinfo=UTC)


def test_the_queue_of_a_moment_is_shown_with_what_came_next(cli: Cli, project: Project, ada: User) -> None:
    make_host(cpus=2)
    make_run(project, ada, "first", resources={"cpu": 2})
    second, gone = (make_run(project, ada, name, resources={"cpu": 2}) for name in ("second", "gone"))
    place_all()
    at = timezone.now().isoformat()
    removal.delete(services.stop(gone, ada, "member"), ada, "member")
    services.stop(second, ada, "member")

    shown = cli("queue", "--at", at)
    assert "2 runs waited, 1 placed" in shown.stderr
    assert "1 run of these deleted since" in shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["#", "NAME", "PRIO", "USER", "WAITED", "THEN", "WHY"]
    assert lines[1].split()[:4] == ["1", "second", "50", "ada"]
    assert "stopped" in lines[1]
    assert "(deleted)" in lines[2]
    assert "box-1" in lines[-1]

    assert cli.ok("queue", "--at", at, "-q").split() == [str(second.uid)]
    assert json.loads(cli.ok("queue", "--at", at, "--json"))["deleted"] == 1
    assert cli("queue", "--at", "-1m").exit_code == 0


@pytest.mark.parametrize("more", [["--pause"], ["--list"], ["--create"], ["--max-gpus", "2"]])
def test_it_changes_nothing(cli: Cli, project: Project, more: list[str]) -> None:
    refused = cli("queue", "--at", "-1h", *more)
    assert refused.exit_code == 2
    assert "--at" in refused.stderr


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("-2h", NOW - timedelta(hours=2)),
        ("-1h30m", NOW - timedelta(minutes=90)),
        ("2026-11-26T12:00+01:00", datetime(2026, 11, 26, 11, tzinfo=UTC)),
        ("2026-11-26T12:00Z", datetime(2026, 11, 26, 12, tzinfo=UTC)),
        ("12:15", datetime(2026, 11, 26, 12, 15).astimezone()),
    ],
)
def test_moments_are_read_as_people_write_them(text: str, found: datetime) -> None:
    assert moment(text, NOW) == found


@pytest.mark.parametrize("text", ["now", "-", "-x", "25:00", "2026-13-01", "-99999d"])
def test_other_texts_are_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match=f"2026-11-26T14:00, 14:00 or -2h, not '{text}'"):
        moment(text, NOW)
