"""The first program in a sandbox: it gives up root's rights, and becomes the job's shell.

Only here does the job's environment begin. With it, whoever wrote a run file could have programs that still are root's
load code of theirs (`LD_PRELOAD`, `PATH`). Few imports: it runs for each start.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def stored(orders: dict[str, Any]) -> int:
    """A descriptor of `orders`, in memory alone, for `main`: `uid`, `gid`, `working_dir`, `env`, `argv`."""
    number = os.memfd_create("orders", 0)
    with open(number, "w", encoding="ascii", closefd=False) as file:
        json.dump(orders, file)
    os.lseek(number, 0, os.SEEK_SET)
    return number


def main(number: int) -> None:
    """Become the shell of the orders that the descriptor `number` has, or end with 127."""
    with open(number, encoding="ascii") as file:
        orders = json.load(file)
    try:
        os.setgroups([orders["gid"]])
        os.setgid(orders["gid"])
        os.setuid(orders["uid"])
        os.chdir(orders["working_dir"])
        os.execvpe(orders["argv"][0], orders["argv"], orders["env"])
    except OSError as error:
        os.write(2, f"{orders['argv'][0]} can't be started: {error}\n".encode(errors="surrogateescape"))
    sys.exit(127)
