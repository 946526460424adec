"""`dstackweb history`."""

from __future__ import annotations

import datetime as dt
import json

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.cli.history import local_zone
from dstackweb.cli.tables import BAR, bar
from dstackweb.runs import history, services
from dstackweb.runs.models import Run
from tests.cli.conftest import Cli


def placed(project: Project, user: User, *waits: int, days_ago: int = 0, queue: str = "default") -> None:
    """Runs that started so many days ago after waiting so many seconds."""
    at, found = timezone.now() - dt.timedelta(days=days_ago), services.ensure_queue(project, queue)
    runs = [Run(queue=found, user=user, queued_at=at - dt.timedelta(seconds=waited)) for waited in waits]
    history.count_placed(runs, at)


def test_each_day_is_a_line_with_a_bar_and_each_band_has_its_sum(cli: Cli, project: Project, ada: User) -> None:
    placed(project, ada, 7300)
    placed(project, ada, 3650, days_ago=2)
    history.sample_lengths(timezone.now())
    days, bands = cli.ok("history", "default", TZ="UTC").strip().split("\n\n")
    lines = days.splitlines()
    assert lines[0].split() == ["DAY", "STARTED", "MEDIAN", "WAIT", "P90", "LONGEST", "WAITING"]
    assert len(lines) == 8
    assert lines[-1].split()[3:] == ["1", *["2", "h", "1", "min"] * 3, "0", "(≤0)", "█" * BAR]
    assert lines[-3].split()[3:] == ["1", *["1", "h"] * 3, "█" * (BAR // 2)]
    assert [line.split()[:2] for line in bands.splitlines()[1:]] == [
        ["75–100", "0"], ["50–74", "2"], ["25–49", "0"], ["0–24", "0"],
    ]  # fmt: skip


def test_without_a_queue_the_history_covers_all_queues(cli: Cli, project: Project, ada: User) -> None:
    placed(project, ada, 5)
    placed(project, ada, 5, 5, queue="night")
    queues = cli.ok("history", "--days", "30").strip().split("\n\n")[2]
    assert [line.split()[:2] for line in queues.splitlines()[1:]] == [["default", "1"], ["night", "2"]]


def test_an_empty_history_has_a_message_and_json_has_everything(cli: Cli) -> None:
    assert "No runs waited in any queue in the last 7 days." in cli("history").stderr
    assert json.loads(cli.ok("history", "--json", "--days", "3"))["total"]["placed"] == 0
    refused = cli("history", "none")
    assert (refused.exit_code, "no queue is called 'none'" in refused.stderr) == (1, True)


def test_a_bar_is_as_long_as_its_share_and_at_least_one_character() -> None:
    assert bar(10, 10) == "█" * BAR
    assert bar(5, 10) == "█" * (BAR // 2)
    assert bar(0.001, 10) == "▏"
    assert bar(0, 10) == bar(None, 10) == bar(0, 0) == ""


@pytest.mark.parametrize(
    ("tz", "zone"),
    [("Asia/Tokyo", "Asia/Tokyo"), (":Asia/Tokyo", "Asia/Tokyo"), ("CET-1CEST", "UTC"), ("../etc/passwd", "UTC")],
)
def test_the_local_time_zone_is_that_of_tz_if_it_has_a_name(
    tz: str, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", tz)
    assert local_zone() == zone
