"""What stand-ins need that are processes of this machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens on."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def until(is_so: Callable[[], bool], most_s: float, trouble: str) -> None:
    """Wait for it. Raises TimeoutError with `trouble` after so many seconds."""
    ends = time.monotonic() + most_s
    while not is_so():
        if time.monotonic() > ends:
            raise TimeoutError(trouble)
        time.sleep(0.1)
