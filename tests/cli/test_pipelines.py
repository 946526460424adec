"""A file with several runs on the command line: `apply` plans and submits all of them, and follows none."""

from __future__ import annotations

import json

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.runs.models import Run
from tests.cli.conftest import Cli
from tests.factories import make_host

FILE = """type: task
name: train
after: prepare
commands: [python train.py]
env: [TOKEN_A]
resources: {gpu: 1}
---
type: task
name: prepare
commands: [python prepare.py]
env: [TOKEN_B]
"""


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN_A", "TOKEN_B"):
        monkeypatch.setenv(name, "from the shell")


def test_apply_plans_each_run_and_submits_all(cli: Cli, project: Project, ada: User) -> None:
    make_host(gpus=1)
    planned = cli.ok("apply", "-f", cli.file(FILE), "--no-code", "--dry-run")
    rows = [line.split(maxsplit=1)[0] for line in planned.splitlines()[:3]]
    assert rows == ["RUN", "prepare", "train"]
    assert "Position 1 in queue default; can start now" in planned
    assert "Enters its queue after: prepare is done." in planned
    assert "Each run is planned by itself" not in planned, "only one can start now"
    assert not Run.objects.exists()
    shown = cli("apply", "-f", cli.file(FILE), "-y", "--no-code")
    assert (shown.exit_code, shown.stdout.split()) == (0, ["prepare", "train"])
    assert "Submitted 2 runs: prepare, train. To watch: dstackweb ps -w" in shown.stderr
    assert list(Run.objects.order_by("pk").values_list("name", "status")) == [
        ("prepare", "submitted"), ("train", "pending"),
    ]  # fmt: skip


def test_runs_that_can_each_start_now_may_not_fit_together(cli: Cli, project: Project, ada: User) -> None:
    make_host(gpus=1)
    one = "type: task\nname: {}\ncommands: [x]\nresources:\n  gpu: 1\n"
    planned = cli.ok("apply", "-f", cli.file(f"{one.format('a')}---\n{one.format('b')}"), "--no-code", "--dry-run")
    assert planned.count("can start now\n") == 2
    assert "Each run is planned by itself: those that can start now may not all fit at once." in planned


def test_a_warning_names_its_run_and_asks_once(cli: Cli, project: Project, ada: User) -> None:
    make_host()
    shown = cli("apply", "-f", cli.file(FILE), "-y", "--no-code")
    assert shown.exit_code == 1
    assert "train: no host has enough" in shown.stderr.lower()
    assert "nothing was submitted because of the warning above" in shown.stderr
    assert not Run.objects.exists()
    assert len(cli.ok("apply", "-f", cli.file(FILE), "-q", "-d", "--force", "--no-code").split()) == 2


def test_scripts_get_all_runs_as_json(cli: Cli, project: Project, ada: User) -> None:
    make_host(gpus=1)
    plan = json.loads(cli.ok("apply", "-f", cli.file(FILE), "--no-code", "--dry-run", "--json"))
    assert [one["settings"]["name"] for one in plan["plans"]] == ["prepare", "train"]
    made = json.loads(cli.ok("apply", "-f", cli.file(FILE), "--no-code", "-d", "-y", "--json"))
    assert [run["name"] for run in made["runs"]] == ["prepare", "train"]


def test_an_error_points_at_its_line_of_the_whole_file(cli: Cli, project: Project, ada: User) -> None:
    shown = cli("apply", "-f", cli.file(FILE.replace("name: prepare", "nam: prepare")), "-y", "--no-code")
    assert shown.exit_code == 1
    assert "9 | nam: prepare" in shown.stderr
    assert "^^^" in shown.stderr
