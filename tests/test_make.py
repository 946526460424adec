"""What `make help` lists, on a machine that has Python, git and make, and none of the programs that are a choice."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dstackweb.runner.nvml import read
from tests.bench.test_benches import SMALL
from tests.support import REPO, make

ALWAYS_THERE = """
    awk basename cat chmod cp cut date dirname env find git grep head id ln ls make mkdir mktemp mv od printf python3 rm
    sed sh sleep sort tail tee touch tr uname wc xargs
"""
"""Programs of a Debian with little more than its essential packages."""
NEEDS = {
    "bench": "Chromium and gcc: apt-get install chromium",
    "chaos": "PgBouncer: apt-get install pgbouncer",
    "demo-gpus": "gcc: apt-get install gcc libc6-dev",
    "demo-slurm": "Slurm( and root)?: apt-get install slurmctld slurmd slurm-client munge",
    "messages": "GNU gettext: apt-get install gettext",
    "screenshots": "Chromium: apt-get install chromium",
}
WITHOUT = """
    .env audit clean demo-cloud demo-dask demo-progress demo-ray dist docs fmt help lint load lock login mutations
    release-check run test test-bounds test-gpu test-nightly test-slow
"""
"""Targets that need no more than what is always there, and for some the network."""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a person on such a machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ALWAYS_THERE.split():
        if path := shutil.which(name):
            (folder / name).symlink_to(path)
    return {"HOME": str(tmp_path), "PATH": str(folder)}


def run(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(make(*words), cwd=REPO, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_each_target_is_known_to_need_a_program_or_none(bare: dict[str, str]) -> None:
    listed = re.findall(r"^make ([\w.-]+)", run(bare, "help").stdout, re.MULTILINE)
    assert sorted(listed) == sorted([*NEEDS, *WITHOUT.split()])


@pytest.mark.parametrize("target", NEEDS)
def test_a_target_names_in_one_sentence_what_is_missing(bare: dict[str, str], target: str) -> None:
    done = run(bare, target)
    assert done.returncode == 2
    [sentence, _that_of_make] = done.stderr.splitlines()
    assert re.match(f"make {target} needs {NEEDS[target]}", sentence)
    assert done.stdout == ""


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_told_so(bare: dict[str, str]) -> None:
    if read().samples:
        pytest.skip("this machine has a GPU")
    done = run(bare, "test-gpu")
    assert done.returncode == 2
    assert re.search("make test-gpu needs a machine with an NVIDIA GPU; here: ", done.stdout + done.stderr)
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_sign_in_before_the_first_start_says_to_start_the_server(bare: dict[str, str], tmp_path: Path) -> None:
    done = run(bare | {"DSTACKWEB_HOME": str(tmp_path / "home")}, "login")
    assert done.returncode == 2
    assert done.stderr.startswith(f"dstackweb: no database in {tmp_path}/home yet. Start the server with `make run`\n")


def test_all_benchmarks_are_started_as_modules(bare: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    done = run(bare, f"BIN={tmp_path}", "bench")
    assert re.findall(r"^-m bench\.(\w+)$", done.stdout, re.MULTILINE) == sorted(SMALL)
