"""Processes that end with their parent, with real processes and kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.support import REPO, eventually

CHAIN = """
import os, subprocess, sys, time
from dstackweb.lib.process import die_with_parent
die_with_parent()
report = lambda name, pid: os.write(1, f"{name} {pid}\\n".encode())
started = subprocess.Popen(["sleep", "60"], start_new_session=True)
if os.fork() == 0:
    if os.fork() == 0:
        report("grandchild", os.getpid())
    else:
        report("child", os.getpid())
else:
    report("first", os.getpid())
    report("started", started.pid)
time.sleep(60)
"""
STARTER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def chain() -> Iterator[dict[str, int]]:
    """The pids of a starter, of a first process that asked to die with it, of two forked below it, and of a program
    that the first one started."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, CHAIN], cwd=REPO, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        pids = {"starter": starter.pid}
        while len(pids) < 5:
            name, pid = starter.stdout.readline().split()
            pids[name] = int(pid)
        try:
            yield pids
        finally:
            starter.kill()
            for left in pids.values():
                if alive(left):
                    os.kill(left, signal.SIGKILL)


def test_kill_9_of_the_parent_ends_all_that_it_forked_but_no_program_that_was_started(chain: dict[str, int]) -> None:
    os.kill(chain["starter"], signal.SIGKILL)

    eventually(lambda: not any(alive(chain[name]) for name in ("first", "child", "grandchild")))
    assert alive(chain["started"])


def test_kill_9_of_a_process_ends_its_forks(chain: dict[str, int]) -> None:
    os.kill(chain["child"], signal.SIGKILL)

    eventually(lambda: not alive(chain["grandchild"]))
    assert alive(chain["first"])


def test_a_program_whose_supervisor_has_already_ended_does_not_start() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    code = "from dstackweb.lib.process import die_with_supervisor; die_with_supervisor(); print('started')"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, env={**os.environ, "DSTACKWEB_SUPERVISOR": str(gone.pid)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (1, "")


def test_a_program_without_a_supervisor_is_not_bound_to_its_parent() -> None:
    code = "import os; from dstackweb.lib import process; process.die_with_supervisor(); print(process._forking_pid)"

    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "0"
