"""ps, queue, priority and stop."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
from django.utils import timezone
from rich.console import Console

from dstackweb.accounts.models import Project, User
from dstackweb.cli.client import Api
from dstackweb.cli.config import Settings
from dstackweb.cli.tables import Column, Note, Rows, View, watch_view
from dstackweb.runs import services
from dstackweb.runs.models import Job, Queue, Run, StartEstimate
from dstackweb.runs.states import Reason
from dstackweb.scheduler.passes import forecast_pass
from tests.cli.conftest import Cli
from tests.factories import cloud_job, join, make_host, make_run, make_user, place_all


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_ps_lists_active_runs_newest_first_and_all_with_an_option(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "one")
    services.stop(make_run(project, ada, "two"), ada, "member")
    make_run(project, ada, "three", priority=70)
    output = lines(cli.ok("ps"))
    assert output[0] == ["NAME", "STATUS", "PRIO", "USER", "AGE", "WHERE", "MESSAGE"]
    assert [row[:4] for row in output[1:]] == [["three", "submitted", "70", "ada"], ["one", "submitted", "50", "ada"]]
    assert [row[:2] for row in lines(cli.ok("ps", "-a"))[1:]] == [
        ["three", "submitted"],
        ["two", "terminated"],
        ["one", "submitted"],
    ]


def test_ps_filters_by_status_member_queue_and_name(cli: Cli, project: Project, ada: User) -> None:
    Queue.objects.create(project=project, name="eval")
    make_run(project, ada, "one")
    make_run(project, join(project, make_user("bob")), "two")
    services.stop(make_run(project, ada, "three", queue="eval"), ada, "member")

    def names(*options: str) -> list[str]:
        return [run["name"] for run in json.loads(cli.ok("ps", "--json", *options))["items"]]

    assert names("--status", "terminated") == ["three"]
    assert names("--user", "bob") == ["two"]
    assert names("--queue", "eval") == []
    assert names("--queue", "eval", "-a") == ["three"]
    assert names("--search", "ON") == ["one"]
    assert "No matching runs." in cli("ps", "--user", "nobody").stderr
    assert names("--status", "terminated,submitted", "--status", "done") == ["three", "two", "one"]


@pytest.mark.parametrize("command", ["ps", "sweep"])
def test_a_status_that_does_not_exist_is_wrong_usage(cli: Cli, command: str) -> None:
    wrong = cli(command, "--status", "running,finished")
    assert wrong.exit_code == 2
    assert "'finished' is not one of pending, submitted, " in " ".join(wrong.stderr.split())


def test_lists_and_show_say_why_a_run_ended_where_nothing_else_does(cli: Cli, project: Project, ada: User) -> None:
    run = make_run(project, ada, "long")
    Run.objects.filter(pk=run.pk).update(
        status="terminated", termination_reason=Reason.MAX_DURATION_EXCEEDED, exit_code=143, ended_at=timezone.now()
    )
    said = "It reached its max_duration. Exit code 143."
    assert f"long: terminated, {said}\n" in cli.ok("show", "long")
    assert said in cli.ok("ps", "-a")
    assert json.loads(cli.ok("ps", "-a", "--json"))["items"][0]["status_message"] == "It reached its max_duration."


def test_ps_shows_places_and_why_no_instance_is_requested(cli: Cli, project: Project, ada: User) -> None:
    make_host("box-1")
    make_run(project, ada, "here")
    place_all()
    make_run(project, ada, "waits")
    job = cloud_job(make_run(project, ada, "there"))
    Job.objects.filter(pk=job.pk).update(
        region="us-east-1", instance_type="m5.large", is_spot=True, message="AWS is asked too often."
    )
    output = {run["name"]: run for run in json.loads(cli.ok("ps", "--json"))["items"]}
    assert {name: run["where"] for name, run in output.items()} == {
        "here": "box-1",
        "waits": None,
        "there": "aws us-east-1 m5.large (spot)",
    }
    assert output["there"]["status_message"] == "AWS is asked too often."
    assert "aws us-east-1 m5.large (spot)  AWS is asked too often." in cli.ok("ps")


def test_ps_and_queue_show_when_runs_start_and_why(cli: Cli, project: Project, ada: User) -> None:
    make_host(gpus=1)
    make_run(project, ada, "holder", resources={"gpu": 1}, max_duration="1h")
    place_all()
    make_run(project, ada, "behind", resources={"gpu": 1}, max_duration="off")
    make_run(project, ada, "last", resources={"gpu": 1})
    forecast_pass.refresh()
    output = {row[0]: " ".join(row[4:]) for row in lines(cli.ok("ps", "--start"))[1:]}
    assert "behind has no max_duration and no history" in output["last"]
    assert "after holder ends, from its max_duration" in output["behind"]
    at = StartEstimate.objects.get(run__name="behind").p50
    assert at is not None
    assert f"{at.astimezone():%H:%M}" in output["behind"]
    first, last = lines(cli.ok("queue"))[1:]
    assert f"{at.astimezone():%H:%M}" in first
    assert "history" in last


def test_ps_reports_an_empty_list_and_further_pages(cli: Cli, project: Project, ada: User) -> None:
    empty = cli("ps")
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert "No active runs" in empty.stderr
    make_run(project, ada), make_run(project, ada)
    assert "for more: --limit" in cli("ps", "--limit", "1").stderr


def test_json_output_is_the_answer_of_the_api(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "one")
    page = json.loads(cli.ok("ps", "--json"))
    assert [run["name"] for run in page["items"]] == ["one"]
    assert page["next"] is None
    queue = json.loads(cli.ok("queue", "--json"))
    assert (queue["items"][0]["position"], queue["paused"]) == (1, False)


def test_quiet_output_has_only_ids_and_names_where_there_are_no_ids(cli: Cli, project: Project, ada: User) -> None:
    make_host("box-1")
    one, two = make_run(project, ada, "one"), make_run(project, ada, "two")
    assert cli.ok("ps", "-q").split() == [str(two.uid), str(one.uid)]
    assert cli.ok("queue", "-q").split() == [str(one.uid), str(two.uid)]
    assert cli.ok("queue", "-l", "-q") == "default\n"
    assert cli.ok("host", "list", "-q") == "box-1\n"
    assert cli.ok("projects", "-q") == "main\n"
    for change in (["priority", "one", "40"], ["stop", "one"], ["delete", "one"]):
        assert cli.ok(*change, "-q") == f"{one.uid}\n"
    assert cli.ok("ps", "-q") == f"{two.uid}\n"


def test_changes_print_the_answer_of_the_api_as_json(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "one"), make_run(project, ada, "two")
    assert json.loads(cli.ok("priority", "two", "70", "--json"))["priority"] == 70
    assert json.loads(cli.ok("move", "one", "--top", "--json"))["changes"][0]["run"] == "one"
    assert json.loads(cli.ok("stop", "two", "--json"))["status"] == "terminated"
    assert json.loads(cli.ok("delete", "two", "--json"))["name"] == "two"
    assert json.loads(cli.ok("projects", "--json"))["items"][0]["name"] == "main"


def test_only_one_form_of_output_can_be_asked_for(cli: Cli) -> None:
    for options in (["--json", "-q"], ["-w", "--json"], ["-q", "-w"]):
        assert cli("ps", *options).exit_code == 2
    assert "needs a terminal" in cli("ps", "-w").stderr


def test_watching_fetches_again_and_leaves_out_columns_without_values() -> None:
    names = [["one"], ["one", "two"]]
    out = io.StringIO()

    def pause(_seconds: float) -> None:
        if not names:
            raise KeyboardInterrupt

    def view(found: list[str]) -> View:
        yield Rows([Column("NAME"), Column("WHERE")], [(name, None) for name in found])
        yield Note(f"{len(found)} runs")

    api = Api(Settings("http://x", "dw_x", "main", ""), sleep=pause)
    watch_view(api, names.pop(0), lambda: names.pop(0), view, console=Console(file=out, width=60, force_terminal=True))
    output = out.getvalue()
    assert output.index("1 runs") < output.index("two") < output.index("2 runs")
    assert "WHERE" not in output


def test_the_queue_shows_the_true_order_and_why_each_run_waits(cli: Cli, project: Project, ada: User) -> None:
    """R22 of the command line: positions, and a reason in words for each."""
    make_host()
    make_run(project, ada, "later")
    make_run(project, ada, "huge", resources={"gpu": "H100:16"})
    make_run(project, ada, "first", priority=80, resources={"cpu": "64"})
    place_all()
    output = cli.ok("queue")
    assert [row[:3] for row in lines(output)] == [["#", "NAME", "PRIO"], ["1", "first", "80"], ["2", "huge", "50"]]
    assert all(len(row) > 6 for row in lines(output)[1:])


def test_paused_and_empty_queues_are_shown_as_such(cli: Cli, project: Project) -> None:
    Queue.objects.update(paused=True)
    output = cli("queue").stderr
    assert "default: paused" in output
    assert "No runs wait" in output
    refused = cli("queue", "nope")
    assert refused.exit_code == 1
    assert "no queue is called 'nope'" in refused.stderr


def test_a_priority_change_shows_both_positions(cli: Cli, project: Project, ada: User) -> None:
    """R24 of the command line."""
    make_run(project, ada, "one")
    make_run(project, ada, "two")
    assert cli.ok("priority", "two", "70") == "two: priority 50 → 70, position 2 → 1 in default\n"
    assert Run.objects.get(name="two").priority == 70


def test_an_invalid_priority_is_refused_with_the_server_s_message(
    cli: Cli, connect: Callable[..., Cli], project: Project, ada: User
) -> None:
    make_run(project, ada, "one")
    assert "up to 80" in cli("priority", "one", "90").stderr
    assert "0 to 100" in cli("priority", "one", "101").stderr
    assert "belongs to ada" in connect(join(project, make_user("bob")))("priority", "one", "10").stderr
    assert cli("priority", "one", "high").exit_code == 2
    assert Run.objects.get().priority == 50


def test_a_concurrent_change_is_not_overwritten(
    cli: Cli, project: Project, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(project, ada, "one")
    send = Api.send

    def after_somebody_else(api: Api, method: str, path: str, **request: object) -> object:
        if method == "PATCH":
            services.set_priority(run, ada, "member", 20)
        return send(api, method, path, **request)  # type: ignore[arg-type]

    monkeypatch.setattr(Api, "send", after_somebody_else)
    refused = cli("priority", "one", "70")
    assert refused.exit_code == 1
    assert "changed by ada since you looked: its priority is 20" in refused.stderr
    assert "dstackweb priority one 70" in refused.stderr
    assert Run.objects.get().priority == 20


def test_an_ended_run_is_deleted_and_an_active_one_is_refused(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "one")
    refused = cli("delete", "one")
    assert refused.exit_code == 1
    assert "Stop it first" in refused.stderr
    cli.ok("stop", "one")
    assert cli.ok("delete", "one") == "one: deleted\n"
    assert not Run.objects.exists()


def test_a_run_is_stopped_and_an_ended_one_is_refused(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "one")
    assert cli.ok("stop", "one") == "one: terminated\n"
    refused = cli("stop", "one", "--abort")
    assert refused.exit_code == 1
    assert "already ended" in refused.stderr


def test_an_unknown_run_is_named_in_the_error(cli: Cli) -> None:
    for command in (["stop", "nope"], ["priority", "nope", "3"], ["logs", "nope"], ["logs", "-f", "a b?c#d%2e"]):
        refused = cli(*command)
        assert refused.exit_code == 1
        assert "no run is called" in refused.stderr
    for name in ("a/b", "..", ""):
        assert cli("logs", name).exit_code == 2


def test_a_project_of_others_is_reported_as_missing(cli: Cli, connect: Callable[..., Cli]) -> None:
    stranger = connect(make_user("eve"))
    assert stranger("ps").stderr == cli("ps", DSTACKWEB_PROJECT="nope").stderr.replace("nope", "main")


def test_tables_fit_80_columns_and_no_colour_means_no_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [Column("NAME"), Column("STATUS"), Column("PRIO", right=True), Column("USER"), Column("WHY", wide=True)]
    row = [
        "a-name-that-is-as-long-as-any-may-be-in-this-product-which-is",
        "submitted",
        "100",
        "somebody",
        "word " * 60,
    ]

    def drawn(**options: object) -> str:
        file = io.StringIO()
        console = Console(file=file, width=80, force_terminal=True, **options)  # type: ignore[arg-type]
        console.print(Rows(columns, [row]).drawn())
        return file.getvalue()

    plain = drawn(color_system=None)
    assert max(len(line) for line in plain.splitlines()) <= 80
    assert "submitted" in plain
    assert "\x1b[36m" in drawn(color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[36m" not in drawn()


def test_text_from_the_server_cannot_steer_the_terminal(cli: Cli, project: Project, ada: User) -> None:
    Run.objects.filter(pk=make_run(project, ada, "one").pk).update(status_message="\x1b]0;owned\x07\nline")
    output = cli.ok("ps")
    assert "\x1b" not in output
    assert "owned" in output
    assert len(output.splitlines()) == 2


def test_a_run_that_waits_for_another_says_so_and_is_released(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "prepare")
    make_run(project, ada, "train", after="prepare")
    waiting = next(row for row in cli.ok("ps").splitlines() if row.startswith("train"))
    assert "Enters its queue after: prepare is done." in waiting
    found = json.loads(cli.ok("ps", "--json"))["items"][0]
    assert (found["name"], found["status"]) == ("train", "pending")
    assert cli.ok("release", "train").startswith("train: submitted, position 2")
    assert cli("release", "train").exit_code == 1
