"""Whatever a client sends, the API answers with a status of its own, in the form that it describes, and goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import TOKEN, Server

pytestmark = [pytest.mark.slow, pytest.mark.both_sides]

# What exists, so that requests get past the first 404.
NAMED = """
[parameters]
project = "main"
[[operations]]
include-path-regex = "/queues/"
parameters = {"path.name" = "default"}
[[operations]]
include-path-regex = "/projects/.*/runs/"
parameters = {"path.name" = "target"}
[[operations]]
include-path-regex = "/hosts/"
parameters = {"path.name" = "box"}
[[operations]]
include-path-regex = "/backends/"
parameters = {"path.name" = "hosts"}
"""


@pytest.fixture
def server(open_home: Path) -> Iterator[Server]:
    """A deployment of its own: random requests hold its hosts, drain its queue, and more."""
    with Server(open_home) as server:
        yield server


def test_no_request_breaks_the_server_or_is_answered_in_another_form(server: Server, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(NAMED)
    server.submit("true", name="target")
    done = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"), "run", f"{server.url}/api/v1/openapi.json",
            "--checks", "not_a_server_error,response_schema_conformance",
            "--max-examples", "25" if "DATABASE_URL" in server.env else "8", "--phases", "examples,coverage,fuzzing",
            "--header", f"Authorization: Bearer {TOKEN}", "--suppress-health-check", "all", "--no-color",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=420, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
