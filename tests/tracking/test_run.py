"""A run on a real deployment, whose commands find by themselves where to report."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.server import Server
from tests.support import REPO

pytestmark = pytest.mark.nightly


def test_the_example_shows_on_its_runs_progress_while_it_works_and_after(open_home: Path) -> None:
    """Its Python has no dstackweb: it fetches the one file from the server."""
    config = yaml.safe_load((REPO / "examples" / "tracked.yaml").read_text())
    with Server(open_home) as server:
        name = server.api("POST", "runs", json={"config": config}).json()["name"]
        server.wait(name, "running", deadline=60)
        server.wait(name, "done", deadline=120)
        progress = server.api("GET", f"runs/{name}/progress").json()
        states = {
            prefix["name"]: {state: count for state, count in prefix["states"].items() if count}
            for prefix in progress["prefixes"]
        }
        assert states == {"train": {"memory": 31, "erred": 9}, "step": {"memory": 1636, "released": 364}}
        failures = server.api("GET", f"runs/{name}/progress/failures").json()["items"]
        assert len(failures) == 9
        assert all("diverges: loss" in failure["message"] for failure in failures)
        assert b"secret" not in server.log(name)
        assert server.manage("recount", "--check").returncode == 0
