"""The first process of a machine: runs the user data, adopts its orphans, and takes the whole tree down with it.

Usage: machine_init.py SCRIPT CONSOLE EXIT GRACE_S. On its standard input, `stop` and end of file switch the machine
off in good order (SIGTERM, then SIGKILL); end of file alone, as when the cloud dies, at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
script, console, exit_file, grace_s = sys.argv[1:5]
user_data = 0


def reap(*_: object) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid == user_data:
            with open(exit_file + ".new", "w") as file:
                file.write(str(os.waitstatus_to_exitcode(status)))
            os.replace(exit_file + ".new", exit_file)


def descendants() -> list[int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state != b"Z":
                parents[int(name)] = int(parent)
    tree, more = set(), {os.getpid()}
    while more:
        tree |= more
        more = {pid for pid, parent in parents.items() if parent in tree} - tree
    return list(tree - {os.getpid()})


def send(number: int) -> bool:
    alive = descendants()
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(alive)


def main() -> None:
    global user_data
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, reap)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    user_data = os.fork()
    if not user_data:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null, out = os.open("/dev/null", os.O_RDONLY), os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        try:
            os.execv(script, [script])
        except OSError as error:
            os.write(2, f"cannot run the user data: {error}\n".encode())
            os._exit(127)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    said = b""
    while more := os.read(0, 64):
        said += more
    ends = time.monotonic() + (float(grace_s) if said else 0)
    if said:
        send(signal.SIGTERM)
    # Polled: only children can be waited for, and these are also grandchildren.
    while time.monotonic() < ends and descendants():
        time.sleep(0.01)
    while send(signal.SIGKILL):
        time.sleep(0.005)


main()
