"""`dstackweb keep` and `dstackweb what-if`."""

from __future__ import annotations

import json

from dstackweb.accounts.models import Project, User
from dstackweb.gpus.models import PolicyExemption
from tests.cli.conftest import Cli
from tests.gpus.past import past_run

POLICY = {"min_gpu_utilization": 10, "time_window": "10m"}


def test_a_run_is_kept_with_a_reason(cli: Cli, project: Project, ada: User) -> None:
    past_run(project, ada, "idle", [[0] * 10], utilization_policy=POLICY)
    kept = cli("keep", "idle", "--reason", "debugging the loader")
    assert kept.stdout.startswith("idle: kept until ")
    assert "You can extend this 2 more times." in kept.stderr
    made = PolicyExemption.objects.get()
    assert (made.reason, made.by) == ("debugging the loader", ada)
    assert (made.until - made.at).total_seconds() == 1800


def test_a_refused_keep_shows_the_reason(cli: Cli, project: Project, ada: User) -> None:
    past_run(project, ada, "free", [[0] * 10])
    refused = cli("keep", "free", "-r", "why not")
    assert (refused.exit_code, "has no utilization policy" in refused.stderr) == (1, True)
    assert cli("keep", "free").exit_code == 2


def test_a_policy_is_tried_on_the_last_day(cli: Cli, project: Project, ada: User) -> None:
    past_run(project, ada, "idle", [[0] * 180])
    past_run(project, ada, "busy", [[90] * 180])
    tried = cli("what-if", "--min", "10", "--window", "10m")
    titles, line = tried.stdout.splitlines()
    assert titles.split()[:3] == ["RUN", "USER", "WOULD"]
    assert line.split()[:2] == ["idle", "ada"]
    assert "GPU 0 of node 0" in line
    assert "This policy would have stopped 1 of 2 runs and saved 0.3 of 1.0 GPU-hours" in tried.stderr
    output = json.loads(cli.ok("what-if", "--min", "10", "--window", "10m", "--json"))
    assert [stop["run"] for stop in output["stops"]] == ["idle"]


def test_without_runs_or_a_policy_a_message_is_shown(cli: Cli) -> None:
    assert "No GPU samples in the last 24 hours" in cli("what-if", "--min", "10", "--window", "10m").stderr
    refused = cli("what-if", "--min", "10", "--window", "soon")
    assert (refused.exit_code, "not a duration such as 30m" in refused.stderr) == (1, True)
