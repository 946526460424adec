"""A queue's list as it is at one version: read once in this process, and rendered once for all readers alike.

Hundreds of open pages poll a queue that changes each second. Two readers see the same unless one of them has other
rights, or runs of their own among the rows.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from django.utils.safestring import SafeString

SECONDS = 2.0
"""What changes without a version, such as the GPUs that hosts report, is as old at most."""
SNAPSHOTS, BODIES = 16, 8


@dataclass
class QueueSnapshot:
    """`values` are of all readers, `bodies` the rendered lists by what their readers differ in."""

    version: str
    until: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    values: dict[str, Any] = field(default_factory=dict)
    bodies: dict[Hashable, SafeString] = field(default_factory=dict)

    def body(self, key: Hashable, render: Callable[[], SafeString]) -> SafeString:
        """The list of readers of this kind, rendered by one thread for all."""
        with self.lock:
            if key not in self.bodies:
                if len(self.bodies) >= BODIES:
                    self.bodies.clear()
                self.bodies[key] = render()
            return self.bodies[key]


_snapshots: OrderedDict[Hashable, QueueSnapshot] = OrderedDict()
_lock = threading.Lock()


def snapshot(key: Hashable, version: str, read: Callable[[], dict[str, Any]]) -> QueueSnapshot:
    """The snapshot of the list `key` at this version. `read` is called by one thread for all, if there is none."""
    now = time.monotonic()
    with _lock:
        found = _snapshots.get(key)
        if found is None or found.version != version or now >= found.until:
            found = _snapshots[key] = QueueSnapshot(version, now + SECONDS)
            while len(_snapshots) > SNAPSHOTS:
                _snapshots.popitem(last=False)
        _snapshots.move_to_end(key)
    with found.lock:
        if not found.values:
            found.values = read()
    return found


def forget() -> None:
    _snapshots.clear()
