"""Limits of wrong passwords and tokens from one address, so that nobody can try many."""

from __future__ import annotations

import time

from django.db.models import F

from dstackweb.accounts.models import AddressFailures
from dstackweb.lib.errors import TooMany
from dstackweb.lib.network import network_of

WINDOW_S = 600
MOST = 60
"""Within WINDOW_S, of one IPv4 address or one /64 of IPv6; beside the lock of a name (AXES_* in the settings)."""


def count_failure(address: str) -> None:
    """Count a wrong password or token."""
    row, _ = AddressFailures.objects.get_or_create(address=network_of(address), window=_window())
    AddressFailures.objects.filter(pk=row.pk).update(count=F("count") + 1)


def check(address: str) -> None:
    """Raises TooMany after too many failures from there."""
    if AddressFailures.objects.filter(address=network_of(address), window=_window(), count__gte=MOST).exists():
        wait_s = WINDOW_S - time.time() % WINDOW_S
        raise TooMany("there were too many wrong passwords or tokens from your address", retry_after=wait_s)


def forget_old() -> None:
    """Delete the counts of earlier windows."""
    AddressFailures.objects.filter(window__lt=_window() - 1).delete()


def _window() -> int:
    return int(time.time() // WINDOW_S)
