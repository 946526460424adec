"""`dstackweb progress`: how far the tasks of a run are, and the runs of a project."""

from __future__ import annotations

import io
import json
from typing import Any

import httpx
import pytest
from django.utils import timezone
from rich.console import Console

from dstackweb.accounts.models import Project, User
from dstackweb.cli.client import Api
from dstackweb.cli.config import Settings
from dstackweb.cli.progress import WORDS, is_over, left_text, rate_text, summary, table, view_of
from dstackweb.cli.tables import watch_view
from dstackweb.progress.models import Scope, TaskFailure
from dstackweb.progress.states import PLAIN
from tests.cli.conftest import Cli
from tests.factories import make_run
from tests.progress.rows import add_group, make_scope


def now_ms() -> int:
    return int(timezone.now().timestamp() * 1000)


@pytest.fixture
def scope(project: Project, ada: User) -> Scope:
    """Tasks of the run `sweep`."""
    scope = make_scope(project, make_run(project, ada, "sweep").pk, 1)
    add_group(scope, "eval", "eval-a", now_ms(), memory=1)
    of = add_group(scope, "train", "train-a", now_ms() - 60_000, memory=30, erred=1, waiting=7, forgotten=10)
    add_group(scope, "train", "train-b", now_ms(), processing=2, no_worker=1)
    for number in range(3):
        TaskFailure.objects.create(
            scope=scope, prefix=of.prefix, key=f"train-{number}", group="train-a", message=f"no\x1b {number}", seq=1,
            at_ms=now_ms() - 60_000 * number,
        )  # fmt: skip
    return scope


def test_each_prefix_is_a_line_with_all_states(cli: Cli, scope: Scope) -> None:
    head, counts, titles, train, evaluation = cli.ok("progress", "sweep").splitlines()
    assert head == "sweep: submitted, attempt 1: 42 of 52 tasks finished (80 %), 3 groups in 2 prefixes"
    assert counts.startswith("31 done, 1 failed, 10 forgotten, 2 running, 1 no worker, 7 waiting; ")
    assert titles.split() == [
        "PREFIX", "FINISHED", "DONE", "FAILED", "RELEASED", "FORGOTTEN", "RUNNING", "QUEUED", "NO", "WORKER",
        "WAITING", "GROUPS", "RATE", "LEFT",
    ]  # fmt: skip
    assert train.split()[:12] == ["train", "41/51", "80", "%", "30", "1", "0", "10", "2", "0", "1", "7"]
    assert evaluation.split()[:4] == ["eval", "1/1", "100", "%"]


def test_json_output_has_the_answers_of_the_api_for_all_prefixes(
    cli: Cli, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstackweb.cli.client.PAGE", 1)
    output = json.loads(cli.ok("progress", "sweep", "--json"))
    assert [prefix["name"] for prefix in output["prefixes"]] == ["train", "eval"]
    assert output["total"]["states"]["processing"] == 2
    assert "eval" not in cli.ok("progress", "sweep", "--find", "tra")


def test_the_groups_of_a_prefix_all_or_those_with_failed_tasks(cli: Cli, scope: Scope) -> None:
    titles, *lines = cli.ok("progress", "sweep", "--groups", "train").splitlines()
    assert titles.split()[:3] == ["GROUP", "FINISHED", "DONE"]
    assert [line.split()[:2] for line in lines] == [["train-a", "41/48"], ["train-b", "0/3"]]
    _, *lines = cli.ok("progress", "sweep", "--groups", "train", "--failed").splitlines()
    assert [line.split()[0] for line in lines] == ["train-a"]
    found = cli("progress", "sweep", "--groups", "eval", "--failed")
    assert (found.stdout, found.stderr) == ("", "No groups with failed tasks.\n")
    assert cli("progress", "sweep", "--groups", "none").exit_code == 1


def test_the_tasks_that_failed_and_why(cli: Cli, scope: Scope) -> None:
    found = cli("progress", "sweep", "--failed", "--limit", "2")
    titles, *lines = found.stdout.splitlines()
    assert titles.split() == ["TASK", "PREFIX", "AGE", "MESSAGE"]
    assert [line.split() for line in lines[1:]] == [["train-1", "train", "1", "min", "no\ufffd", "1"]]
    assert "for more: --limit" in found.stderr
    assert len(json.loads(cli.ok("progress", "sweep", "--failed", "--json"))["items"]) == 3


def test_a_projects_runs(cli: Cli, project: Project, ada: User) -> None:
    scope, _ = Scope.objects.get_or_create(project=project, run_id=0, attempt=0)
    add_group(scope, "sweep", "sweep-1", memory=3, processing=1)
    head, counts, _titles, line = cli.ok("progress", "--once").splitlines()
    assert head == "Runs: 3 of 4 runs finished (75 %)"
    assert counts.startswith("3 done, 1 running")
    assert line.split()[:2] == ["sweep", "3/4"]


def test_options_of_a_run_need_a_run(cli: Cli, project: Project, ada: User) -> None:
    assert cli("progress", "--failed").exit_code == 2
    assert "name the run" in cli("progress", "--attempt", "2").stderr
    make_run(project, ada, "quiet")
    quiet = cli("progress", "quiet")
    assert quiet.stdout == "quiet: submitted, no tasks reported\n"
    assert "::task key=" in quiet.stderr


def test_an_attempt_without_tasks_and_names_that_match_nothing_are_said(cli: Cli, scope: Scope) -> None:
    other = cli("progress", "sweep", "--attempt", "9")
    assert (other.exit_code, other.stderr) == (1, "error: sweep has no tasks in attempt 9.\n")
    assert "No matching prefixes." in cli("progress", "sweep", "--find", "nothing").stderr


def test_all_states_have_words() -> None:
    assert set(WORDS) == set(PLAIN)


@pytest.mark.parametrize(("changes", "finished", "cells"), [({}, 30, 24), ({"total": 0, "finished": 0}, 0, 24)])
def test_a_progress_bar_shows_the_share_that_has_finished(changes: dict[str, Any], finished: int, cells: int) -> None:
    out = io.StringIO()
    Console(file=out, width=140).print(table([item(**changes)], 140).drawn())
    assert out.getvalue().splitlines()[2].count("━") == (cells * finished // 40 if finished else 0)


def test_a_progress_bar_is_red_where_tasks_have_failed() -> None:
    def bar_of(failed: int) -> Any:
        return table([item(outcomes=outcomes(done=30, failed=failed))], 140).rows[0][1]

    assert (bar_of(0).complete_style, bar_of(1).complete_style) == ("green", "red")


@pytest.mark.parametrize(
    ("per_s", "said"),
    [(None, ""), (1234.5, "1,234/s"), (12.3, "12/s"), (1.25, "1.2/s"), (0.5, "30/min"), (0.001, "3.6/h")],
)
def test_rates_in_units_that_read_well(per_s: float | None, said: str) -> None:
    assert rate_text(per_s) == said


def outcomes(**counts: int) -> dict[str, int]:
    return {"done": 0, "failed": 0, "released": 0, "forgotten": 0, **counts}


def item(**changes: Any) -> dict[str, Any]:
    states = {state: 0 for state in WORDS if state != "forgotten"} | {"memory": 30, "processing": 10}
    return {
        "name": "train", "total": 40, "finished": 30, "states": states, "forgotten": 0, "outcomes": outcomes(done=30),
        "groups": 1,
        "rate_per_s": 0.5, "left_s": 20.0, "left_low_s": 15.0, "left_high_s": 30.0, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "20 s (15 s–30 s)"),
        ({"left_high_s": None}, "20 s (≥15 s)"),
        ({"left_s": 4000.0, "left_low_s": 3000.0, "left_high_s": 9000.0}, "1 h 6 min (50 min–2 h 30 min)"),
        ({"left_s": None}, "?"),
        ({"left_s": None, "finished": 40}, ""),
        ({"left_s": 62.0, "left_low_s": 61.0, "left_high_s": 64.0}, "1 min"),
    ],
)
def test_the_time_left_has_a_range(changes: dict[str, Any], said: str) -> None:
    assert left_text(item(**changes)) == said


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (140, ["PREFIX", "", "FINISHED", "DONE", "RUNNING", "GROUPS", "RATE", "LEFT"]),
        (80, ["PREFIX", "", "FINISHED", "DONE", "RUNNING", "LEFT"]),
        (50, ["PREFIX", "", "FINISHED", "RATE", "LEFT"]),
        (40, ["PREFIX", "", "FINISHED", "LEFT"]),
        (24, ["PREFIX", "FINISHED", "LEFT"]),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns_and_each_prefix_stays_a_line(width: int, titles: list[str]) -> None:
    items = [item(), item(name="x" * 200)]
    shown = table(items, width)
    assert [column.title for column in shown.columns] == titles
    out = io.StringIO()
    Console(file=out, width=width).print(shown.drawn())
    assert len(out.getvalue().splitlines()) == 2 + len(items)


def test_thousands_are_grouped_and_finished_items_have_no_rate() -> None:
    many = {state: 0 for state in WORDS if state != "forgotten"} | {"memory": 2000}
    over = item(total=2000, finished=2000, states=many, outcomes=outcomes(done=2000), groups=1500, left_s=None)
    shown = table([over], None)
    figures = dict(zip([column.title for column in shown.columns], shown.rows[0], strict=True))
    assert (figures["DONE"], figures["GROUPS"], figures["RATE"]) == ("2,000", "1,500", "")
    assert summary(output(total=over))[1] == "2,000 done"


def output(**changes: Any) -> dict[str, Any]:
    return {
        "run": "sweep", "id": "1", "status": "running", "attempt": 1, "ended": False, "version": 1, "count": 1,
        "total": item(name=""), "silent": None, "prefixes": [item()], "next": None, **changes,
    }  # fmt: skip


def test_control_characters_in_names_are_not_printed() -> None:
    assert "\x1b" not in "".join(summary(output(run="a\x1b[2J")))
    assert "\x1b" not in str(table([item(name="a\x1b[2J")], 80))


def test_live_progress_outlasts_an_outage_until_all_tasks_are_settled() -> None:
    ended = output(status="done", ended=True)
    settled = output(status="done", ended=True, total=item(finished=40), prefixes=[])
    answers: list[httpx.Response | Exception] = [
        httpx.ConnectError("refused"),
        httpx.Response(200, json=ended),
        httpx.Response(200, json=settled),
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
    watch_view(api, output(), lambda: api.get("/p"), view_of, is_over, console=console, every_s=1)
    assert len(slept) == 3
    assert "Trying again" in out.getvalue()
    assert "attempt 1 ended: 40 of 40" in out.getvalue()
