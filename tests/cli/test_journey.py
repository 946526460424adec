"""The newcomer's path on the command line, against a whole deployment of real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, read
from tests.server import TOKEN, Server

pytestmark = pytest.mark.nightly

RUN_FILE = """
type: task
name: count
env: [STEPS]
commands:
  - sh count.sh
  - exit 7
"""
SCRIPT = 'for i in $(seq 1 "$STEPS"); do echo "line $i"; sleep 0.2; done\n'


def test_code_is_shipped_run_and_followed_through_a_killed_server_to_the_run_s_exit_code(
    open_home: Path, tmp_path: Path, work: Path
) -> None:
    """R26; no line is lost or doubled while every process of the server is killed and started again."""
    with Server(open_home) as server:
        cli = Cli(server.url, TOKEN, tmp_path / "config", work)
        try:
            cli.file(RUN_FILE)
            cli.file(SCRIPT, "count.sh")
            assert "as admin, project main" in cli.ok("login", server.url, "--token", TOKEN)
            applying = cli.spawn("apply", "-f", "run.yaml", STEPS="40")
            server.wait("count", "running")
            assert read(applying, 7) == b"line 1\n"
            server.stop(signal.SIGKILL)
            server.start()
            out, err = applying.communicate(timeout=60)
        finally:
            cli.close()
        assert out.decode() == "".join(f"line {number}\n" for number in range(2, 41))
        assert applying.returncode == 7, err
        assert b"Trying again" in err
        assert b"Connected again" in err
        assert "count" in cli.ok("ps", "-a")
