"""`dstackweb metrics`: what a run's GPUs do."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest
from rich.console import Console

from dstackweb.accounts.models import Project, User
from dstackweb.cli.client import Api
from dstackweb.cli.config import Settings
from dstackweb.cli.tables import watch_view
from dstackweb.cli.utilization import FETCH_S, THEN, fetch, is_over, policy_text, spark, table, view_of
from dstackweb.spec.codes import UtilizationAction
from tests.cli.conftest import Cli
from tests.factories import make_host, make_run, place_all
from tests.gpus.past import past_run

POLICY = {"min_gpu_utilization": 10, "time_window": "1h"}
NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


def test_each_gpu_is_a_line_with_its_newest_sample(cli: Cli, project: Project, ada: User) -> None:
    past_run(project, ada, "train", [[90] * 30, [5] * 30], utilization_policy=POLICY)
    head, policy, titles, *lines = cli.ok("metrics", "train").splitlines()
    assert head == "train: running, 2 GPUs"
    assert policy == "Utilization unknown: GPU samples are missing (minimum 10 % over 1h)"
    assert titles.split()[:4] == ["GPU", "NAME", "UTIL", "MEMORY"]
    assert [line.split()[:5] for line in lines] == [
        ["0", "A100-SXM4-80GB", "90", "%", "█████████"],
        ["1", "A100-SXM4-80GB", "5", "%", "▌"],
    ]
    assert "1.0/80 GB" in lines[0]
    assert "70/400 W" in lines[0]


def test_json_output_is_the_answer_of_the_api(cli: Cli, project: Project, ada: User) -> None:
    past_run(project, ada, "train", [[90] * 3])
    output = json.loads(cli.ok("metrics", "train", "--json"))
    assert output["jobs"][0]["gpus"][0]["last"]["utilization"] == 90


def test_a_run_that_waits_holds_nothing(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "train")
    assert cli.ok("metrics", "train", "--once") == "train: submitted, not started\n"


def test_a_run_without_a_policy_is_reported_as_such(cli: Cli, project: Project, ada: User) -> None:
    past_run(project, ada, "train", [[90] * 3])
    assert "No utilization policy" in cli.ok("metrics", "train")


def test_a_run_without_gpus_is_reported_as_such(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "plain", resources={"cpu": 1})
    make_host()
    place_all()
    assert cli.ok("metrics", "plain", "--once") == "plain: provisioning, no GPUs\n"


GPUS = 6


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (120, ["GPU", "NAME", "UTIL", "MEMORY", "POWER", "TEMP", "SEEN", "LAST HOUR"]),
        (80, ["GPU", "UTIL", "MEMORY", "POWER", "TEMP", "SEEN", "LAST HOUR"]),
        (60, ["GPU", "UTIL", "MEMORY", "POWER", "TEMP", "SEEN"]),
        (40, ["GPU", "UTIL", "MEMORY", "TEMP", "SEEN"]),
        (20, ["GPU", "UTIL", "SEEN"]),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns_and_each_gpu_stays_a_line(width: int, titles: list[str]) -> None:
    last = {"utilization": 97, "memory_used_mib": 33_000, "power_w": 351, "temperature_c": 70, "at": at(seconds=-9)}
    gpu = {
        "uuid": "GPU-1", "index": 0, "name": "NVIDIA A100-SXM4-80GB", "memory_mib": 81920, "power_limit_w": 400,
        "last": last, "utilization": [50.0] * 30,
    }  # fmt: skip
    output = {"run": "train", "status": "running", "jobs": [{"node": 0, "gpus": [gpu] * GPUS}]}
    shown = table(output, NOW.timestamp(), width)
    assert [column.title for column in shown.columns if column.title] == titles
    out = io.StringIO()
    Console(file=out, width=width).print(shown.drawn())
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 + GPUS
    assert all("9 s ago" in line for line in lines[2:])


def policy(**changes: Any) -> dict[str, Any]:
    return {
        "min_gpu_utilization": 50, "time_window_s": 3600, "scope": "any", "action": "terminate", "verdict": "keep",
        "low_since": None, "stops_at": None, "gpu_index": None, "node": 0, "kept_until": None, "kept_by": None,
        "kept_because": None, "observe_only": False, **changes,
    }  # fmt: skip


def at(**delta: float) -> str:
    return (NOW + timedelta(**delta)).isoformat()


LOW = {"low_since": at(minutes=-41), "stops_at": at(minutes=19), "gpu_index": 1}


@pytest.mark.parametrize(
    ("changes", "nodes", "said"),
    [
        (LOW, 1, "GPU 1 below 50 % for 41 min, stops in 19 min"),
        (LOW, 2, "GPU 1 of node 0 below 50 % for 41 min, stops in 19 min"),
        (LOW | {"gpu_index": None}, 1, "All GPUs below 50 % for 41 min, stops in 19 min"),
        (LOW | {"observe_only": True}, 1, "GPU 1 below 50 % for 41 min, would stop (observe only) in 19 min"),
        (LOW | {"action": "notify"}, 1, "GPU 1 below 50 % for 41 min, warns in 19 min"),
        (LOW | {"stops_at": at(seconds=-3)}, 1, "GPU 1 below 50 % for 41 min, stops now"),
        ({}, 1, "In use (minimum 50 % over 1h)"),
        ({"time_window_s": 90}, 1, "In use (minimum 50 % over 90s)"),
        ({"verdict": "unknown"}, 1, "Utilization unknown: GPU samples are missing (minimum 50 % over 1h)"),
    ],
)
def test_the_policy_state_is_shown_with_its_countdown(changes: dict[str, Any], nodes: int, said: str) -> None:
    assert policy_text(policy(**changes), NOW.timestamp(), nodes) == said


def test_every_policy_action_has_words() -> None:
    assert set(THEN) == set(UtilizationAction)


def test_a_keep_shows_its_reason_without_control_characters() -> None:
    kept = policy(**LOW, kept_until=at(minutes=30), kept_by="ada", kept_because="look\x1b[2J")
    output = policy_text(kept, NOW.timestamp())
    assert "by ada: look�[2J" in output
    assert "; kept until " in output


def test_a_sparkline_has_blanks_for_missing_samples() -> None:
    assert spark([0, 12.4, 50, None, 99, 100]) == "▁▁▅ ██"


def test_live_metrics_outlast_an_outage_until_the_run_has_ended() -> None:
    running = {"run": "train", "id": "1", "status": "running", "policy": None, "jobs": []}
    answers: list[httpx.Response | Exception] = [
        httpx.ConnectError("refused"),
        httpx.Response(200, json={**running, "status": "done"}),
    ]
    slept: list[float] = []

    def answer(_request: httpx.Request) -> httpx.Response:
        given = answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    api = Api(Settings("http://x", "t", "main", ""), transport=httpx.MockTransport(answer), sleep=slept.append)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    watch_view(api, (running, 0.0), lambda: fetch(api, "/m"), view_of, is_over, console=console, every_s=FETCH_S)
    assert len(slept) == 10
    assert "train: done" in out.getvalue()
    assert "Trying again" in out.getvalue()


def test_ages_are_counted_by_the_servers_clock() -> None:
    ahead = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    answer = httpx.Response(200, json={}, headers={"Date": ahead})
    api = Api(Settings("http://x", "t", "main", ""), transport=httpx.MockTransport(lambda _request: answer))
    assert fetch(api, "/m")[1] == pytest.approx(3600, abs=5)
