"""How many of a machine's workers may ask clouds at the same time: a cloud that hangs keeps no pass from its turn."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from django.conf import settings


@contextlib.contextmanager
def cloud_turn() -> Iterator[bool]:
    """Whether this worker may ask clouds now. Where not, it leaves that to the next tick: all is found from rows.

    Where passes are the same cluster's work, one worker is left for them. A worker that dies leaves its turn.
    """
    folder = settings.DSTACKWEB_HOME / "locks"
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as held:
        for number in range(turns()):
            lock = held.enter_context(open(folder / f"cloud-{number}", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield True
            return
        yield False


def turns() -> int:
    """How many of them: all of a cluster of their own, else all but one."""
    shared = settings.DSTACKWEB_CLUSTERS["cloud"] == settings.DSTACKWEB_CLUSTERS["control"]
    return max(1, settings.DSTACKWEB_CLUSTER_WORKERS - shared)
