"""Limits of wrong passwords, codes and tokens from one address, so that they can't be guessed.

Wrong passwords lock the name for the network that they came from, long before that network is locked for all names.

What only its user may try, such as codes of the second step, counts for the user too, wherever it came from.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from contextlib import contextmanager

from django.core.exceptions import ValidationError
from django.db.models import F
from django.utils.translation import gettext as _

from dstackweb.accounts.models import AddressFailures, PasswordFailures, User
from dstackweb.lib import sql
from dstackweb.lib.errors import TooMany
from dstackweb.lib.network import network_of

WINDOW_S = 600
MOST = 60
"""Within WINDOW_S, of one IPv4 address or one /64 of IPv6."""
MOST_PASSWORDS = 10
"""Wrong passwords for one name from one such network, each within WINDOW_S of the one before."""
MOST_CODES = 20
"""Wrong codes of one user within WINDOW_S, from all addresses: of a million codes three are right at any time."""
MOST_MAILS = 3
"""Mails about a new password to one user within WINDOW_S."""
MOST_BEGUN = 300
"""Sign-ins by passkey or elsewhere that one address begins within WINDOW_S: each writes a session."""


def count_failure(address: str) -> None:
    """Count a wrong password or token."""
    _count(network_of(address))


def check(address: str) -> None:
    """Raises TooMany after too many failures from there."""
    _check(network_of(address), MOST, _("there were too many wrong passwords or tokens from your address"))


@contextmanager
def password_check(address: str, name: str) -> Iterator[None]:
    """Limit the check of this name's password in the block, which raises ValidationError for a wrong one.

    Raises TooMany, with the name if that is locked there: instead of the check, and after the last wrong password.
    The attempt counts before the check, so however many come at once, no more than MOST_PASSWORDS are checked.
    """
    check(address)
    name = name[:150]  # the form takes longer ones, which no one has
    network, now = network_of(address), dt.datetime.fromtimestamp(time.time(), dt.UTC)
    failures = PasswordFailures.objects.filter(name=name, network=network)
    locked = failures.filter(count__gte=MOST_PASSWORDS)
    text = _("there were too many wrong passwords or tokens from your address")
    failures.filter(last_at__lte=now - dt.timedelta(seconds=WINDOW_S)).delete()
    # The row may be created, deleted or locked by another request between any two of these statements.
    while not failures.filter(count__lt=MOST_PASSWORDS).update(count=F("count") + 1, last_at=now):
        if row := locked.first():
            raise TooMany(text, WINDOW_S - (now - row.last_at).total_seconds(), name=name)
        PasswordFailures.objects.bulk_create(
            [PasswordFailures(name=name, network=network, last_at=now)], ignore_conflicts=True
        )
    try:
        yield
    except ValidationError:
        count_failure(address)
        if locked.exists():
            raise TooMany(text, WINDOW_S, name=name) from None
        raise
    failures.delete()


def forget_passwords(address: str, user: User) -> None:
    """Forget the wrong passwords of who has signed in from there, in whatever way."""
    PasswordFailures.objects.filter(name=user.get_username(), network=network_of(address)).delete()


def count_wrong_code(address: str, user: User) -> None:
    """Count a wrong code of the second step."""
    count_failure(address)
    _count(f"codes of user {user.pk}")


def check_codes(address: str, user: User) -> None:
    """Raises TooMany after too many wrong codes of this user, or failures from this address."""
    check(address)
    _check(f"codes of user {user.pk}", MOST_CODES, _("there were too many wrong codes"))


def may_mail(user: User) -> bool:
    """Count a mail to this user; False if there were too many."""
    return _take(f"mails to user {user.pk}", MOST_MAILS)


def begin(address: str) -> None:
    """Count a sign-in that begins. Raises TooMany after too many from there."""
    if not _take(f"begun by {network_of(address)}", MOST_BEGUN):
        raise _too_many(_("there were too many sign-ins from your address"))


def forget_old() -> None:
    """Delete the counts of earlier windows."""
    AddressFailures.objects.filter(window__lt=_window() - 1).delete()
    old = dt.datetime.fromtimestamp(time.time() - WINDOW_S, dt.UTC)
    PasswordFailures.objects.filter(last_at__lte=old).delete()


def _count(key: str) -> None:
    sql.shift(AddressFailures, {"address": key, "window": _window()}, {"count": F("count") + 1})


def _take(key: str, most: int) -> bool:
    """Count one more if there are fewer than `most`; whether there were."""
    row, _ = AddressFailures.objects.get_or_create(address=key, window=_window())
    return bool(AddressFailures.objects.filter(pk=row.pk, count__lt=most).update(count=F("count") + 1))


def _check(key: str, most: int, text: str) -> None:
    if AddressFailures.objects.filter(address=key, window=_window(), count__gte=most).exists():
        raise _too_many(text)


def _too_many(text: str) -> TooMany:
    return TooMany(text, retry_after=WINDOW_S - time.time() % WINDOW_S)


def _window() -> int:
    return int(time.time() // WINDOW_S)
