"""The order in which the processes of a job are signalled."""

from __future__ import annotations

import subprocess

from hypothesis import given, strategies as st

from dstackweb.runner.tree import from_above, terminate
from tests.support import eventually

PIDS = st.integers(1, 30)


@given(st.dictionaries(PIDS, PIDS), st.sets(PIDS))
def test_parents_come_before_their_children(parents: dict[int, int], pids: set[int]) -> None:
    parents = {pid: parent for pid, parent in parents.items() if parent < pid}
    order = from_above(pids, parents)
    assert set(order) == pids
    assert len(order) == len(pids)
    assert all(order.index(parents[pid]) < order.index(pid) for pid in pids if parents.get(pid) in pids)


@given(st.dictionaries(PIDS, PIDS), st.sets(PIDS))
def test_a_loop_is_no_endless_one(parents: dict[int, int], pids: set[int]) -> None:
    assert set(from_above(pids, parents)) == pids


def test_a_shell_runs_its_trap_though_its_command_ends_by_the_same_signal() -> None:
    for _round in range(20):
        shell = subprocess.Popen(
            ["/bin/sh", "-c", 'set -e; trap "exit 3" TERM; echo up; while :; do sleep 9; done'],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert shell.stdout is not None
        shell.stdout.readline()
        with open(f"/proc/{shell.pid}/task/{shell.pid}/children") as children:
            sleep = eventually(lambda: children.seek(0) or children.read().split())  # called at once
        terminate({int(sleep[0]), shell.pid})
        assert shell.wait(10) == 3
        shell.stdout.close()
