"""A story for every cluster of 8 CPUs, real ones included: runs start in the queue's order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.server import Server
from tests.support import eventually

CPUS = 8
GOES_ON = "echo $DSTACK_RUN_NAME >> {folder}/order; until [ -e {folder}/$DSTACK_RUN_NAME ]; do sleep 0.1; done"


def start_in_order(server: Server, folder: Path, **asks: Any) -> list[str]:
    """24 runs of a CPU and of three priorities, and an urgent one later, each of which goes on until it is let go.

    Returns their names in the order in which they started, which is the expected one. `folder` is empty, and runs may
    write there.
    """
    priorities = [10, 50, 90] * 8
    random.Random(1).shuffle(priorities)
    server.api("PATCH", "queues/default", json={"paused": True})
    command = GOES_ON.format(folder=folder)
    waiting = [
        (-priority, at, server.submit(command, priority=priority, **asks)) for at, priority in enumerate(priorities)
    ]
    server.api("PATCH", "queues/default", json={"paused": False})
    waiting.sort()

    def started() -> list[str]:
        file = folder / "order"
        return file.read_text().splitlines() if file.exists() else []

    def wait_for(count: int) -> list[str]:
        eventually(lambda: len(started()) >= count, deadline=120)
        assert len(started()) == count
        return started()

    first = {name for _priority, _at, name in waiting[:CPUS]}
    assert set(wait_for(CPUS)) == first, "those of the highest priority, which all fit"
    del waiting[:CPUS]
    for turn in range(25 - CPUS):
        if turn == 4:
            waiting.insert(0, (-100, 0, server.submit(command, priority=100, **asks)))
        (folder / started()[turn]).touch()
        assert wait_for(CPUS + turn + 1)[-1] == waiting.pop(0)[2]
    for name in started():
        (folder / name).touch()
    for name in started():
        run = server.wait(name)
        assert (run["status"], run["attempt"]) == ("done", 1), run
    return started()
