"""A circuit breaker for APIs that throttle, shared by all processes.

Closed: all callers may call. A throttled call opens the circuit for a time that doubles with each one, with full
jitter. After that time one caller probes: success closes the circuit, another throttled call opens it for longer.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from typing import Any

from django.db.models import Q

from dstackweb.lib.backoff import full_jitter
from dstackweb.lib.models import Circuit

BASE_S, CAP_S = 2.0, 300.0
LEAST_S = 0.5
"""The minimum, whatever the jitter."""
PROBE_S = 30.0
"""The next probe may start after this time, if the process of a probe was killed."""


class Open(Exception):
    """`name` must not be called before `until`."""

    def __init__(self, name: str, until: dt.datetime) -> None:
        super().__init__(f"{name} is throttled until {until:%H:%M:%S} UTC")
        self.name, self.until = name, until


def enter(name: str, now: dt.datetime) -> bool:
    """True if the caller probes, False if the circuit is closed: both may call. Raises Open."""
    circuit = Circuit.objects.filter(pk=name).first()
    if circuit is None or circuit.open_until is None:
        return False
    if now < circuit.open_until <= now + dt.timedelta(seconds=CAP_S):
        raise Open(name, circuit.open_until)
    until = now + dt.timedelta(seconds=PROBE_S)
    free = Q(probe_until=None) | Q(probe_until__lte=now) | Q(probe_until__gt=until)
    if Circuit.objects.filter(free, pk=name, open_until=circuit.open_until).update(probe_until=until):
        return True
    raise Open(name, circuit.probe_until or until)


def succeeded(name: str) -> None:
    """The probe succeeded: close the circuit."""
    Circuit.objects.filter(pk=name).update(failures=0, open_until=None, probe_until=None)


def failed(name: str) -> None:
    """The probe failed, but was not throttled: another one may start at once."""
    Circuit.objects.filter(pk=name).update(probe_until=None)


def throttled(
    name: str, now: dt.datetime, told: dict[str, Any], rnd: Callable[[], float] = random.random
) -> dt.datetime:
    """Open the circuit for longer than the last time; returns until when. `told` is the API's error.

    If several callers are throttled at once, only the first one counts.
    """
    circuit, _ = Circuit.objects.get_or_create(pk=name)
    if circuit.open_until is not None and now < circuit.open_until <= now + dt.timedelta(seconds=CAP_S):
        return circuit.open_until
    wait_s = max(LEAST_S, full_jitter(circuit.failures, BASE_S, CAP_S, rnd))
    until = now + dt.timedelta(seconds=wait_s)
    Circuit.objects.filter(pk=name, failures=circuit.failures).update(
        failures=circuit.failures + 1, open_until=until, probe_until=None, told=told
    )
    return until
