"""`dstackweb hold` and `extend`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from django.db import connection

from dstackweb.accounts.models import Project, User
from dstackweb.cli.client import Api
from dstackweb.cli.config import Settings
from dstackweb.cli.holds import wait_for_start
from dstackweb.cli.language import clock_text
from dstackweb.runs import attempts, holds, services
from dstackweb.runs.models import Run
from dstackweb.runs.states import Reason
from tests.cli.conftest import Cli
from tests.factories import make_host, make_run, place_all, placed_job, start
from tests.support import eventually


@pytest.fixture
def scheduler(live_server: Any, project: Project) -> Any:
    """What places and starts whatever waits, once it is asked to, in a thread of its own."""
    threads: list[threading.Thread] = []

    def work(act: Callable[[Run], object]) -> None:
        def later() -> None:
            try:
                act(eventually(lambda: Run.objects.filter(status="submitted").first()))
            finally:
                connection.close()

        threads.append(threading.Thread(target=later))
        threads[-1].start()

    yield work
    for thread in threads:
        thread.join()


def begin(run: Run) -> None:
    place_all()
    start(placed_job(run))


def test_a_hold_waits_for_its_start_and_prints_how_to_connect(
    cli: Cli, project: Project, ada: User, scheduler: Any
) -> None:
    make_host(gpus=2, address="10.0.0.5")
    scheduler(begin)
    result = cli("hold", "--gpu", "A100:2", "--for", "3h", "--name", "mine", "--priority", "60")
    assert result.exit_code == 0, result.output
    run = Run.objects.get()
    assert (run.priority, run.is_hold) == (60, True)
    assert run.held_until is not None
    first, ssh, export = result.stdout.splitlines()
    assert first == f"mine: box-1 (10.0.0.5), 2 GPUs, held until {clock_text(run.held_until.isoformat())}"
    assert (ssh, export) == ("  ssh 10.0.0.5", "  export CUDA_VISIBLE_DEVICES=GPU-box-1-0,GPU-box-1-1")
    assert "dstackweb stop mine" in result.stderr
    assert "held until" in cli.ok("ps")


def test_cpus_can_be_held_on_the_servers_machine(cli: Cli, project: Project, ada: User, scheduler: Any) -> None:
    make_host()
    scheduler(begin)
    result = cli("hold", "--cpu", "2", "--for", "1h")
    assert "box-1, no GPU, held until" in result.stdout
    assert "ssh" not in result.stdout
    assert "shell on the dstackweb server" in result.stderr


def test_a_detached_hold_prints_only_its_name(cli: Cli, project: Project, ada: User) -> None:
    name = cli.ok("hold", "--gpu", "1", "--for", "1h", "-d").strip()
    assert Run.objects.get(name=name).status == "submitted"


def test_a_hold_that_is_stopped_while_it_waits_holds_nothing(
    cli: Cli, project: Project, ada: User, scheduler: Any
) -> None:
    scheduler(lambda run: services.stop(run, ada, "member"))
    result = cli("hold", "--gpu", "1", "--for", "1h")
    assert result.exit_code == 1
    assert "the hold did not start" in result.stderr


def test_a_followed_hold_blocks_until_its_end(cli: Cli, project: Project, ada: User, scheduler: Any) -> None:
    make_host(gpus=1)

    def whole(run: Run) -> None:
        begin(run)
        attempts.end_job(placed_job(run).pk, Reason.MAX_DURATION_EXCEEDED, exit_code=0, log_size=0)

    scheduler(whole)
    result = cli("hold", "--gpu", "1", "--for", "1h", "--follow")
    assert (result.exit_code, "hold ended" in result.stderr) == (0, True)


def test_both_commands_extend_a_hold(cli: Cli, project: Project, ada: User) -> None:
    make_host(gpus=1)
    run = holds.submit_hold(project, ada, "member", holds.HoldRequest("1h", gpu="1", name="mine"))
    begin(run)
    assert cli.ok("extend", "mine", "30m").startswith("mine: held until ")
    cli.ok("hold", "--extend", "mine", "--for", "1h")
    assert Run.objects.get().extended_s == 5400
    refused = cli("extend", "mine", "8d")
    assert (refused.exit_code, "7 days in all" in refused.stderr) == (1, True)


def test_an_ordinary_run_gets_more_time(cli: Cli, project: Project, ada: User) -> None:
    make_host()
    run = make_run(project, ada, "long", max_duration="1h")
    begin(run)
    assert cli.ok("extend", "long", "1h") == "long: extended by 1h\n"


def test_a_hold_without_resources_is_a_usage_error(cli: Cli, project: Project, ada: User) -> None:
    assert cli("hold", "--for", "1h").exit_code == 2
    assert cli("hold", "--gpu", "1").exit_code == 2
    assert not Run.objects.exists()


def test_a_hold_is_waited_for_through_an_outage_of_the_server() -> None:
    running = httpx.Response(200, json={"id": "1", "status": "running"})
    answers: list[httpx.Response | Exception] = [*[httpx.ConnectError("refused")] * 2, running]

    def answer(_request: httpx.Request) -> httpx.Response:
        given = answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    shown: list[str] = []
    api = Api(Settings("http://x", "t", "main", ""), transport=httpx.MockTransport(answer), sleep=lambda _s: None)
    run = wait_for_start(api, {"id": "1", "status": "submitted"}, lambda run: shown.append(run["status"]))
    assert (run["status"], shown) == ("running", ["submitted"])


def test_stopping_a_scheduled_run_warns_that_its_schedule_ends(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "nightly", schedule={"cron": "0 2 * * *"})
    assert "starts at" in cli.ok("ps")
    assert "schedule has ended" in cli("stop", "nightly").stderr


def test_a_time_has_its_day_unless_that_is_today() -> None:
    now = datetime(2026, 11, 3, 12, tzinfo=UTC)
    at = now.astimezone().replace(hour=9, minute=5)
    assert clock_text(at.isoformat(), now) == "09:05"
    assert clock_text(at.replace(day=9).isoformat(), now) == "Nov 9, 09:05"


@pytest.mark.parametrize("more", [("--gpu", "1"), ("--name", "x"), ("--follow",), ("--priority", "0"), ("-d",)])
def test_extend_excludes_the_options_of_a_new_hold(cli: Cli, more: tuple[str, ...]) -> None:
    refused = cli("hold", "--extend", "mine", "--for", "1h", *more)
    assert (refused.exit_code, "--extend" in refused.stderr) == (2, True)
