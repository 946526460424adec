"""Limits how many of a machine's workers call clouds at once, so that a hanging cloud never blocks a pass."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from django.conf import settings


@contextlib.contextmanager
def cloud_slot() -> Iterator[bool]:
    """Whether this worker may call clouds now; if not, the next tick does the work.

    The kernel releases a dead worker's slot.
    """
    folder = settings.DSTACKWEB_HOME / "locks"
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as held:
        for number in range(slot_count()):
            lock = held.enter_context(open(folder / f"cloud-{number}", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield True
            return
        yield False


def slot_count() -> int:
    """All workers of a cluster of its own; all but one where the cluster also runs passes."""
    shared = settings.DSTACKWEB_CLUSTERS["cloud"] == settings.DSTACKWEB_CLUSTERS["control"]
    return max(1, settings.DSTACKWEB_CLUSTER_WORKERS - shared)
