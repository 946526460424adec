"""What the commands of a run report of their tasks, on a whole deployment: real server, host, runner and shell."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.server import Server
from tests.support import REPO, eventually

pytestmark = [pytest.mark.nightly, pytest.mark.both_sides, pytest.mark.xdist_group("faults")]

BY_HTTP = """
import json, os, urllib.request
body = {"events": [{"key": "fit-1", "state": "done", "duration_s": 2}]}
headers = {"Authorization": "Bearer " + os.environ["DSTACKWEB_TASKS_TOKEN"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["DSTACKWEB_TASKS_URL"], json.dumps(body).encode(), headers)
print(urllib.request.urlopen(request).read().decode())
"""


def counted(server: Server, name: str) -> dict[str, dict[str, int]]:
    """The states of each prefix that have tasks."""
    prefixes: list[dict[str, Any]] = server.api("GET", f"runs/{name}/progress").json()["prefixes"]
    return {one["name"]: {state: n for state, n in one["states"].items() if n} for one in prefixes}


def test_the_example_counts_its_trainings_and_shows_which_failed(server: Server) -> None:
    text = (REPO / "examples" / "tasks.yaml").read_text().replace("PAUSE: 1", "PAUSE: 0.05")
    run = server.api("POST", "runs", json={"config": text}).json()
    assert server.wait(run["name"])["status"] == "done"
    assert counted(server, "tasks") == {"train": {"memory": 11, "erred": 1}}
    failures = server.api("GET", "runs/tasks/progress/failures").json()["items"]
    assert [(one["key"], one["message"]) for one in failures] == [("train-0.1-3", "the loss is not a number")]


def test_commands_report_tasks_by_http_and_their_token_is_in_no_log(server: Server) -> None:
    name = server.submit(f"python3 -c '{BY_HTTP}'", "echo token $DSTACKWEB_TASKS_TOKEN")
    assert server.wait(name)["status"] == "done"
    answer, found = server.log(name).decode().splitlines()
    assert json.loads(answer) == {"applied": 1, "outdated": 0, "refused": [], "attempt": 1}
    assert set(found.partition(" ")[2]) == {"*"}
    assert counted(server, name) == {"fit": {"memory": 1}}


def test_a_killed_runner_loses_no_task_and_duplicates_none(server: Server) -> None:
    lines = 'for n in $(seq 300); do echo "::task key=part-$n state=done"; done'
    name = server.submit(lines, "echo ::task key=last-1 state=running", "sleep 600")
    eventually(lambda: counted(server, name).get("last") == {"processing": 1})
    os.kill(server.runner_pid(server.run(name)), signal.SIGKILL)
    assert server.wait(name)["status"] == "failed"
    assert counted(server, name)["part"] == {"memory": 300}
    eventually(lambda: counted(server, name)["last"] == {"released": 1})
    assert server.manage("recount", "--check").returncode == 0
