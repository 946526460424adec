"""The processes of a job on this machine, whoever they run as and however they got away from their parent."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable
from uuid import UUID

import psutil

from dstackweb.runner.tree import MARKER

_VARIABLE = f"{MARKER}=".encode()


def job_of(pid: int) -> str | None:
    """The id of the job that a process was started for, by the marker in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return None
    return next(
        (line.removeprefix(_VARIABLE).decode(errors="replace") for line in variables if line.startswith(_VARIABLE)),
        None,
    )


def tree_of(job_id: UUID, runner: psutil.Process | None) -> list[psutil.Process]:
    """The living processes of a job without its runner: those with its marker and all below these and the runner.

    The second part finds what cleaned its environment: while the runner lives, it is the parent of the job's orphans.
    """
    everything = [process for process in psutil.process_iter(["pid", "ppid", "status"]) if _is_alive(process)]
    found = {process.pid for process in everything if job_of(process.pid) == str(job_id)}
    own = {runner.pid} if runner else set()
    above = found | own
    while below := {process.pid for process in everything if process.info["ppid"] in above} - above:
        above |= below
    return [process for process in everything if process.pid in above - own]


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Signal each; one that has ended meanwhile is no error, and another that got its pid is left alone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _is_alive(process: psutil.Process) -> bool:
    """A zombie runs nothing and holds nothing."""
    return process.info["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
