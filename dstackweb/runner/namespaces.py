"""Joining the namespaces of a job's processes.

No program does it, as `nsenter` would: it would be root, and look among the job's files for what it executes next.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from dstackweb.runner import tree

_libc = ctypes.CDLL(None, use_errno=True)


def join(namespace: int) -> None:
    """Move this thread to the namespace of an open descriptor; of processes, those that it starts. Raises OSError."""
    if _libc.setns(namespace, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@contextlib.contextmanager
def opened(pid: int, *names: str) -> Iterator[list[int]]:
    """Descriptors of these namespaces of a process. Raises ProcessLookupError if it has ended, OSError."""
    born = tree.born(pid)
    with contextlib.ExitStack() as stack:
        numbers = []
        for name in names if born else ():
            numbers.append(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC))
            stack.callback(os.close, numbers[-1])
        if not born or tree.born(pid) != born:  # another process may have got its number meanwhile
            raise ProcessLookupError(pid)
        yield numbers


@contextlib.contextmanager
def children_in(processes: int) -> Iterator[None]:
    """Have this thread start its children in a namespace of processes, as this process sees them all the same."""
    with opened(os.getpid(), "pid") as (own,):
        join(processes)
        try:
            yield
        finally:
            join(own)
