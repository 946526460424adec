"""Sweeps on the command line: submitted by `apply`, shown, stopped, raised and retried as one."""

from __future__ import annotations

import csv
import json

from dstackweb.accounts.models import Project, User
from dstackweb.runs.models import Run, Sweep
from tests.cli.conftest import Cli
from tests.factories import make_host, make_run, place_all
from tests.runs.sweeps.test_sweeps import end, settle

FILE = """
type: task
name: lr
commands: [python train.py]
array:
  matrix: {LR: [0.1, 0.01], SEED: [1, 2]}
  max_parallel: 2
"""


def submit(cli: Cli) -> str:
    return cli.ok("apply", "-f", cli.file(FILE), "-y", "--no-code")


def test_apply_shows_how_many_runs_there_will_be_and_does_not_follow(cli: Cli, project: Project, ada: User) -> None:
    shown = cli("apply", "-f", cli.file(FILE), "-y", "--no-code")
    assert (shown.exit_code, shown.stdout.split()) == (0, ["lr"])
    assert "Sweep of 4 runs, at most 2 at once" in shown.stderr
    assert "Submitted sweep lr of 4 runs. To watch: dstackweb sweep -w lr" in shown.stderr
    assert Sweep.objects.get().size == 4


def test_sweep_shows_the_runs_with_parameters_and_outcome(cli: Cli, project: Project, ada: User) -> None:
    submit(cli)
    make_host()
    place_all()
    end("lr-1", code=3)
    settle()
    shown = cli("sweep", "lr")
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert lines[0] == ["lr:", "4", "runs,", "1", "running,", "1", "waiting,", "1", "failed,", "1", "to", "come"]
    assert lines[1] == ["NAME", "LR", "SEED", "STATUS", "EXIT", "TOOK", "MESSAGE"]
    assert lines[2][:4] == ["lr-0", "0.1", "1", "provisioning"]
    assert lines[3][:5] == ["lr-1", "0.1", "2", "failed", "3"]
    assert lines[5][:5] == ["lr-3", "0.01", "2", "to", "come"]
    assert "At most 2 at once." in shown.stderr
    assert [run["name"] for run in json.loads(cli.ok("sweep", "lr", "--json", "--status", "failed"))["runs"]] == [
        "lr-1"
    ]
    assert cli.ok("sweep", "lr", "-q", "--from", "2").split() == ["lr-2", "lr-3"]
    table = list(csv.DictReader(cli.ok("sweep", "lr", "--csv").splitlines()))
    assert [row["LR"] for row in table] == ["0.1", "0.1", "0.01", "0.01"]


def test_sweeps_are_listed(cli: Cli, project: Project, ada: User) -> None:
    assert "No sweeps" in cli("sweep").stderr
    submit(cli)
    head, line = (line.split() for line in cli.ok("sweep").splitlines())
    assert head[:3] == ["NAME", "RUNS", "ENDED"]
    assert line[:3] == ["lr", "4", "4"], "no bar yet, and four to wait for"
    assert cli("sweep", "--csv").exit_code == 2


def test_stop_priority_and_retry_take_a_sweep(cli: Cli, project: Project, ada: User) -> None:
    submit(cli)
    make_host()
    assert cli.ok("priority", "lr", "70") == "lr: priority 50 → 70 for all its runs\n"
    assert set(Run.objects.values_list("priority", flat=True)) == {70}
    place_all()
    end("lr-0", code=1)
    assert "1 failed" in cli.ok("sweep", "lr")
    assert "2 never started" in cli.ok("stop", "lr", "--abort")
    settle()
    assert "1 waiting" in cli.ok("retry", "lr")


def test_a_name_means_the_active_run_before_the_sweep_and_the_sweep_before_an_ended_run(
    cli: Cli, project: Project, ada: User
) -> None:
    old = make_run(project, ada, "lr")
    cli.ok("stop", "lr")
    old.refresh_from_db()
    assert old.status == "terminated"
    submit(cli)
    assert "4 runs" in cli.ok("stop", "lr")
    make_run(project, ada, "lr")
    assert cli.ok("stop", "lr") == "lr: terminated\n"
    assert "no run is called 'none'" in cli("stop", "none").stderr


def test_a_waiting_sweep_says_for_what_and_is_released_by_name(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "prepare")
    text = FILE.replace("name: lr", "name: lr\nafter: prepare")
    cli.ok("apply", "-f", cli.file(text), "-y", "--no-code")
    assert "Enters its queue after: prepare is done." in cli("sweep", "lr").stderr
    assert "waiting" in cli.ok("release", "lr")
    assert cli("release", "lr").exit_code == 1


def test_the_queue_has_a_sweep_on_one_line_and_all_of_its_runs_on_request(
    cli: Cli, project: Project, ada: User
) -> None:
    submit(cli)
    make_run(project, ada, "other")
    shown = cli.ok("queue").splitlines()
    assert shown[0].split()[:3] == ["#", "NAME", "PRIO"]
    assert "SWEEP ENDED" in shown[0]
    assert shown[1].split()[:4] == ["1", "lr", "(2", "runs)"]
    assert shown[2].split()[:2] == ["3", "other"]
    each = [line.split()[1] for line in cli.ok("queue", "--all").splitlines()[1:]]
    assert each == ["lr-0", "lr-1", "other"]
    assert len(json.loads(cli.ok("queue", "--json"))["items"]) == 3
    assert len(cli.ok("queue", "-q").split()) == 3
