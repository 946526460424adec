"""`dstackweb usage`."""

from __future__ import annotations

import csv
import io
import json

from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import services
from dstackweb.runs.models import UsageDay
from tests.cli.conftest import Cli

HOUR_MS = 3_600_000


def used(project: Project, user: User, hours: int) -> None:
    UsageDay.objects.create(
        project=project, user=user, queue=services.ensure_queue(project), day=timezone.now().date(),
        gpu_ms=hours * HOUR_MS, measured_ms=hours * HOUR_MS // 2, idle_ms=HOUR_MS, micro_usd=2_500_000, done=2,
    )  # fmt: skip


def test_each_member_is_a_line_and_the_last_is_all(cli: Cli, project: Project, ada: User) -> None:
    used(project, ada, 8)
    shown = cli("usage")
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert lines[0] == ["MEMBER", "GPU-HOURS", "IDLE", "CPU-HOURS", "USD", "RUNS"]
    assert lines[1][:6] == ["ada", "8.0", "25%", "0.0", "$2.50", "2"]
    assert lines[2] == ["all", "8.0", "25%", "0.0", "$2.50", "2"]
    assert "samples cover (50%)" in shown.stderr


def test_json_and_csv_are_what_the_server_sends(cli: Cli, project: Project, ada: User) -> None:
    used(project, ada, 8)
    assert json.loads(cli.ok("usage", "--json", "--by", "queue"))["items"][0]["name"] == "default"
    rows = list(csv.DictReader(io.StringIO(cli.ok("usage", "--csv"))))
    assert [(row["project"], row["member"], row["gpu_hours"]) for row in rows] == [("main", "ada", "8.0")]


def test_no_usage_and_no_month_are_said(cli: Cli, project: Project) -> None:
    assert "No usage from" in cli("usage", "--month", "2020-02").stderr
    wrong = cli("usage", "--month", "May")
    assert (wrong.exit_code, "not a month" in wrong.stderr) == (2, True)
    both = cli("usage", "--month", "2020-02", "--days", "7")
    assert (both.exit_code, "--days can't be combined with --month" in both.stderr) == (2, True)


def test_all_projects_are_for_deployment_admins(cli: Cli, project: Project) -> None:
    refused = cli("usage", "--all")
    assert refused.exit_code == 1
    assert "only deployment admins" in refused.stderr
