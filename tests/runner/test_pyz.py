"""The runner as one file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dstackweb.runner.pyz import build_pyz
from tests.runner.conftest import Box


def test_the_runner_runs_from_a_single_file(box: Callable[..., Box], open_home: Path) -> None:
    """Started by a relative path, in isolation from whatever else the machine has installed."""
    build_pyz(open_home / "runner.pyz")
    job = box("echo from one file")
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "runner.pyz"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=open_home,
        env={"PATH": os.defpath},
    ) as process:
        job.give_orders(process)
    assert job.end()["exit_code"] == 0
    assert job.lines() == ["from one file"]


def test_the_same_sources_make_the_same_file(tmp_path: Path) -> None:
    build_pyz(tmp_path / "a")
    build_pyz(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
