"""show and diff."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
from django.conf import LazySettings
from django.utils import timezone
from rich.console import Console

from dstackweb.accounts.models import Project, User
from dstackweb.cli import details
from dstackweb.cli.client import Api
from dstackweb.cli.config import Settings
from dstackweb.cli.tables import show_view, watch_view
from dstackweb.runs import attempts, service_health, services
from dstackweb.runs.models import Run
from dstackweb.runs.service_codes import CheckFailure
from dstackweb.runs.service_health import Check, advanced
from dstackweb.runs.states import Reason
from tests.cli.conftest import Cli
from tests.factories import make_host, make_run, place_all, placed_job, start


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_show_has_status_times_nodes_settings_and_events(cli: Cli, project: Project, ada: User) -> None:
    make_host("box-1")
    run = make_run(project, ada, "train", commands=["one", "two"], priority=70)
    place_all()
    output = words(cli.ok("show", "train"))
    assert output[0] == "train: provisioning"
    assert f"id {run.uid}" in output
    assert "queue default, priority 70" in output
    assert "1 0 provisioning box-1" in output
    assert "commands one" in [line.removesuffix(" run file") for line in output]
    assert any("submitted to queue default with priority 70 ada" in line for line in output)
    assert not any(line.startswith("shell") for line in output)


def test_show_says_why_a_run_waits_and_what_it_waits_for(cli: Cli, project: Project, ada: User) -> None:
    make_host()
    make_run(project, ada, "first", resources={"cpu": 999})
    make_run(project, ada, "second", after="first")
    place_all()
    assert "999 CPUs" in cli.ok("show", "first")
    assert "after first (done): waiting" in words(cli.ok("show", "second"))


def test_ps_and_show_say_how_a_service_is_and_where(
    cli: Cli, project: Project, ada: User, settings: LazySettings
) -> None:
    settings.DSTACKWEB_GATEWAY_PORT = 8001
    make_host()
    config = {"type": "service", "name": "llm", "commands": ["serve"], "port": 8000}
    run, _made = services.submit(project, ada, "member", services.Submission(config))
    place_all()
    start(placed_job(run))
    failed = Check(timezone.now(), CheckFailure.REFUSED, {"port": 8000})
    service_health.change(run.pk, 1, None, advanced(None, failed, 3))
    assert "llm running, starting" in " ".join(cli.ok("ps").split())
    output = words(cli.ok("show", "llm"))
    assert f"url http://{run.uid}.localhost:8001" in output
    assert any(line.endswith("last check: nothing listens on port 8000") for line in output)


def test_show_gives_only_the_id_or_the_answer_of_the_api(cli: Cli, project: Project, ada: User) -> None:
    run = make_run(project, ada, "train")
    assert cli.ok("show", "train", "-q") == f"{run.uid}\n"
    found = json.loads(cli.ok("show", "train", "--json"))
    assert found["settings"]["priority"] == 50
    assert found["events"][0]["detail"] == "submitted to queue default with priority 50"
    assert cli("show", "nope").exit_code == 1


def test_a_run_that_waits_for_its_next_attempt_does_not_run(cli: Cli, project: Project, ada: User) -> None:
    make_host()
    run = make_run(project, ada, "again", retry=True)
    place_all()
    attempts.end_job(start(placed_job(run)).pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=1)
    assert "running" not in next(line for line in words(cli.ok("show", "again")) if line.startswith("times"))


def test_show_fits_a_narrow_terminal(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "a-name-that-is-as-long-as-any-may-be", commands=["x" * 200, "y z " * 60])
    found = json.loads(cli.ok("show", "a-name-that-is-as-long-as-any-may-be", "--json"))
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=True, color_system=None)
    api = Api(Settings("http://x", "dw_x", "main", ""))
    watch_view(api, found, dict, details.view_of, lambda _run: True, console=console)
    output = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())  # the cursor's moves
    assert max(len(line) for line in output.splitlines()) <= 60
    assert "submitted" in output


def test_diff_shows_what_differs_and_all_on_request(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "a", commands=["prepare", "train 1"], priority=60)
    make_run(project, ada, "b", commands=["prepare", "train 2"])
    output = cli.ok("diff", "a", "b")
    assert "priority 60 50" in words(output)
    assert "commands:\n  prepare\n- train 1\n+ train 2\n" in output
    assert "status submitted submitted" in words(output)
    assert not any(line.startswith("queue") for line in words(output))
    assert "queue default default" in words(cli.ok("diff", "a", "b", "--all"))
    found = json.loads(cli.ok("diff", "a", "b", "--json"))
    assert [found["left"]["name"], found["right"]["name"]] == ["a", "b"]
    Run.objects.filter(name="a").update(exit_code=0)
    assert "exit code 0" in words(cli.ok("diff", "a", "b"))


def test_lines_of_one_run_have_a_colour_on_a_terminal_and_only_that(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_view([details._line({"of": of, "text": "a\x1b[2Jb"}) for of in ("both", "left", "right")])
    assert capsys.readouterr().out == "  a\ufffd[2Jb\n\x1b[31m- a\ufffd[2Jb\x1b[0m\n\x1b[32m+ a\ufffd[2Jb\x1b[0m\n"


def test_diff_of_one_run_is_with_the_one_before_of_its_name(cli: Cli, project: Project, ada: User) -> None:
    services.stop(make_run(project, ada, "a"), ada, "member")
    refused = cli("diff", "a")
    assert (refused.exit_code, "Name the run to compare with" in refused.stderr) == (1, True)
    make_run(project, ada, "a")
    output = cli("diff", "a")
    assert "Their settings are the same." in output.stderr
    assert "status terminated submitted" in words(output.stdout)


@pytest.mark.parametrize("name", ["b", ""])
def test_diff_names_a_run_that_is_not_there(cli: Cli, project: Project, ada: User, name: str) -> None:
    make_run(project, ada, "a")
    assert cli("diff", "a", *([name] if name else [])).exit_code == 1
