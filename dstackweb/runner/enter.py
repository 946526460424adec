"""The first program in a sandbox: it gives up root's rights, and becomes the job's shell.

Only here does the job's environment begin. With it, the author of a run file could have programs that still are root's
load code of theirs (`LD_PRELOAD`, `PATH`). Few imports: it runs for each start.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def stored(orders: dict[str, Any]) -> int:
    """A descriptor of `orders`, in memory alone, for `main`: `uid`, `gid`, `working_dir`, `env`, `argv`.

    Also, for what starts in the place of a job that runs: `groups`; `tty`, with a terminal as its input; and `dial`,
    to connect (`runner.dial`) instead of executing `argv`.
    """
    return in_memory("orders", json.dumps(orders))


def in_memory(name: str, text: str) -> int:
    """A descriptor of a file that is nowhere else."""
    number = os.memfd_create(name, 0)
    with open(number, "w", encoding="utf-8", errors="surrogateescape", closefd=False) as file:
        file.write(text)
    os.lseek(number, 0, os.SEEK_SET)
    return number


def main(number: int) -> None:
    """Become the shell of the orders that the descriptor `number` has, or end with 127."""
    with open(number, encoding="ascii") as file:
        orders = json.load(file)
    # Read with root's rights: the job's user may not be allowed to.
    if orders.get("dial"):
        from dstackweb.runner import dial
    if "groups" in orders:
        from dstackweb.runner.tree import forbid_new_privileges
    try:
        if orders.get("tty"):
            _take_terminal()
        if orders["uid"] != os.getuid():
            os.setgroups(orders.get("groups", [orders["gid"]]))
            os.setgid(orders["gid"])
            os.setuid(orders["uid"])
        if "groups" in orders:
            forbid_new_privileges()  # as a sandbox does from its start on
        os.chdir(orders["working_dir"])
        if orders.get("dial"):
            dial.main()
            sys.exit(0)
        os.execvpe(orders["argv"][0], orders["argv"], orders["env"])
    except OSError as error:
        os.write(2, f"{orders['argv'][0]} can't be started: {error}\n".encode(errors="surrogateescape"))
    sys.exit(127)


def _take_terminal() -> None:
    """Begin a session whose terminal is the standard input: job control needs one of the same PID namespace."""
    import fcntl
    import termios

    if os.getsid(0) != os.getpid():  # else it has begun one
        os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
