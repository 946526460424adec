from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstackweb.runner import tree
from tests.runner.conftest import lives
from tests.support import REPO, eventually

JOB = str(uuid.uuid4())


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test starts; they and what they printed as pids end with it."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[str]], script: str, *, marked: bool = True) -> subprocess.Popen[str]:
    env = {"PATH": os.environ["PATH"]} | ({tree.MARKER: JOB} if marked else {})
    process = subprocess.Popen(
        ["/bin/sh", "-c", script], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    started.append(process)
    return process


def pid_of(process: subprocess.Popen[str]) -> int:
    """The pid that a process prints as its first line."""
    assert process.stdout is not None
    return int(process.stdout.readline())


def marked_ones() -> set[int]:
    """As a runner sees them that comes after: nothing is below it."""
    code = f"from dstackweb.runner import tree; print(*tree.members({JOB!r}, None))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    return set(map(int, done.stdout.split()))


def test_a_daemon_is_found_by_its_mark_and_its_cleaned_child_below_it(started: list[subprocess.Popen[str]]) -> None:
    parent = start(started, "setsid sh -c 'env -i sh -c \"echo \\$\\$; exec sleep 60\" & wait' &")
    cleaned = pid_of(parent)
    eventually(lambda: parent.poll() == 0)
    found = eventually(marked_ones)
    assert cleaned in found
    tree.send(found, signal.SIGKILL)
    eventually(lambda: not marked_ones())


def test_a_process_that_overwrote_its_environment_is_found_by_its_session(
    started: list[subprocess.Popen[str]],
) -> None:
    shell = start(started, "sleep 60 & echo $!; exec sleep 61", marked=False)
    orphan = pid_of(shell)
    first = tree.identify(shell.pid)
    assert {shell.pid, orphan} <= tree.members("another-job", first)
    shell.kill()
    shell.wait()
    assert orphan in tree.members("another-job", first)
    tree.send([orphan], signal.SIGKILL)


def test_a_later_session_with_the_same_number_is_a_strangers(started: list[subprocess.Popen[str]]) -> None:
    stranger = start(started, "exec sleep 60", marked=False)
    first = tree.identify(stranger.pid)
    everything = {each.pid: each for each in tree.alive()}
    process = everything[stranger.pid]
    assert tree._in_session(process, first, everything)
    assert not tree._in_session(process, first._replace(start=first.start - 1), everything)
    assert not tree._in_session(process, first._replace(start=first.start + 1), everything)


def test_another_boot_or_container_makes_numbers_meaningless(started: list[subprocess.Popen[str]]) -> None:
    """The state directory may outlive both. The process is this one's child, so it is looked for from another."""
    stranger = start(started, "exec sleep 60", marked=False)
    first = tree.identify(stranger.pid)
    for shell, expected in ((first, True), (first._replace(system="another boot"), False)):
        code = f"from dstackweb.runner.tree import *; print({stranger.pid} in members('x', {shell!r}))"
        done = subprocess.run([sys.executable, "-S", "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(expected)


def test_a_zombie_is_dead(started: list[subprocess.Popen[str]]) -> None:
    zombie = start(started, "exit 0")
    eventually(lambda: not lives(zombie.pid))
    assert zombie.pid not in tree.members(JOB, None)


def test_a_job_whose_id_begins_alike_is_another(started: list[subprocess.Popen[str]]) -> None:
    marked = start(started, "echo $$; exec sleep 60")
    pid_of(marked)
    code = f"from dstackweb.runner import tree; print(*tree.members({JOB[:-1]!r}, None))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_a_command_name_may_hold_brackets_and_blanks(started: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    odd = start(started, f"cd {tmp_path} && cp /bin/sleep 'a) Z 1 (b' && echo $$ && exec './a) Z 1 (b' 60")
    assert pid_of(odd) in marked_ones()


def test_signals_to_what_has_ended_are_no_error() -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    tree.send([done.pid], signal.SIGTERM)


@pytest.mark.skipif(not os.path.exists("/bin/ps"), reason="there is no ps")
def test_without_proc_ps_tells_who_is_below(
    started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = start(started, "sleep 60 & echo $!; wait")
    child = pid_of(shell)
    monkeypatch.setattr(tree, "alive", tree._by_ps)
    assert {shell.pid, child} <= tree.members("x", None)
    tree.send([child], signal.SIGKILL)
