"""Whatever a client sends, the API answers with a status of its own and goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import TOKEN, Server

pytestmark = [pytest.mark.slow, pytest.mark.db_sides]


def test_no_request_breaks_the_server(server: Server, tmp_path: Path) -> None:
    # A project that exists, so that requests get past the first 404; runs and queues are met by name now and then.
    (tmp_path / "schemathesis.toml").write_text('[parameters]\nproject = "main"\n"path.name" = ["default", "target"]\n')
    server.submit("true", name="target")
    done = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"), "run", f"{server.url}/api/v1/openapi.json",
            "--checks", "not_a_server_error", "--max-examples", "60", "--phases", "examples,coverage,fuzzing",
            "--header", f"Authorization: Bearer {TOKEN}", "--suppress-health-check", "all", "--no-color",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
