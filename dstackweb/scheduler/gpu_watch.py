"""The look at a host's GPUs, on it."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from django.conf import settings
from django.utils import timezone

from dstackweb.backends.hosts import nvml
from dstackweb.backends.models import Host
from dstackweb.gpus import intake
from dstackweb.gpus.judging import to_ms


def sample_host(name: str) -> None:
    """One sample of each GPU of this machine."""
    host = Host.joined.filter(name=name).first()
    if host is None:
        return
    with _alone(host) as mine:
        if not mine:
            return
        intake.of_host(host, nvml.read(), to_ms(timezone.now()))


@contextlib.contextmanager
def _alone(host: Host) -> Iterator[bool]:
    """Whether no other worker of the machine samples: one that hangs in a broken driver keeps no others with it.

    A worker that dies lets go.
    """
    folder = settings.DSTACKWEB_HOME / "locks"
    folder.mkdir(exist_ok=True)
    with open(folder / f"gpus-{host.pk}", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
