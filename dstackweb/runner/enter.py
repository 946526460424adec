"""The first program in a sandbox: it gives up root's rights, and becomes the job's shell.

Only here does the job's environment begin. With it, the author of a run file could have programs that still are root's
load code of theirs (`LD_PRELOAD`, `PATH`). Few imports: it runs for each start.

What joins a job that runs is started outside, and loads all that it needs there. Among the job's mounts each path may
lead to something that the job has put there: nothing is opened or executed before root's rights are given up.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def stored(orders: dict[str, Any]) -> int:
    """A descriptor of `orders`, in memory alone, for `main`: `uid`, `gid`, `working_dir`, `env`, `argv`.

    Also, for what starts in the place of a job that runs: `groups`; `namespaces`, descriptors of those to join; `tty`,
    with a terminal as its input; and `dial`, to connect (`runner.dial`) instead of executing `argv`.
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
    # Loaded with root's rights and from root's files: the job's user may not be allowed to read them, and may have
    # others in their place.
    if orders.get("dial"):
        from dstackweb.runner import dial
    if "groups" in orders or "namespaces" in orders:
        from dstackweb.runner import namespaces, tree
    try:
        if orders.get("tty"):
            _take_terminal()
        for namespace in orders.get("namespaces", ()):
            namespaces.join(namespace)
            os.close(namespace)
        if orders["uid"] != os.getuid():
            os.setgroups(orders.get("groups", [orders["gid"]]))
            os.setgid(orders["gid"])
            os.setuid(orders["uid"])
        if "groups" in orders:
            tree.forbid_new_privileges()  # as a sandbox does from its start on
            tree.protect_memory()  # the job has the same user; what is executed has no such protection
        os.chdir(orders["working_dir"])
        if orders.get("dial"):
            dial.main()
            sys.exit(0)
        os.execvpe(orders["argv"][0], orders["argv"], orders["env"])
    except OSError as error:
        os.write(2, f"{orders['argv'][0]} can't be started: {error}\n".encode(errors="surrogateescape"))
    sys.exit(127)


def _take_terminal() -> None:
    """Make the standard input the terminal of this session, which the runner has begun: job control needs one."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
