"""Browsers that are signed in: rows that end after a time without use, and that their users can end.

A row has a digest of the key that the browser's cookie has: whoever reads the rows can't sign in with them.
What the list shows is part of the session's data: since when, its last use, the program and its address.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from allauth.account.signals import user_logged_in as signed_in_by_allauth
from allauth.mfa.signals import authenticator_added
from django.conf import settings
from django.contrib.auth import HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.signals import user_logged_in, user_logged_out
from django.contrib.sessions.backends import db
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.utils import timezone
from django.utils.crypto import constant_time_compare
from django.utils.translation import gettext as _

from dstackweb.accounts import adapters, attempts, sign_in
from dstackweb.accounts.models import Session, User
from dstackweb.lib.errors import NotFound
from dstackweb.lib.secrets import digest
from dstackweb.lib.times import to_moment

NOTED_S = min(300, settings.SESSION_COOKIE_AGE // 12)
"""A session's use is noted once in this time: most requests write nothing."""
PROGRAM_MAX = 200
BEGUN_S = 900
"""A session that only holds what a sign-in elsewhere or by passkey has begun with lasts so long."""
TWO_STEPS = "two_steps"
"""The session's key for whether it began with a second step, or had one set up."""
SET_UP = ("/account/two-step/", "/account/confirm/", "/logout/")
"""Where the second step is set up, and what that needs."""


class SessionStore(db.SessionStore):
    """Django's store, with digests for keys. Its methods for async views, which there are none of, are not adapted."""

    @classmethod
    def get_model_class(cls) -> type[Session]:
        return Session

    def create_model_instance(self, data: dict[str, Any]) -> Session:
        row = cast(Session, super().create_model_instance(data))
        row.session_key = _stored(row.session_key)
        row.user_id = int(data[SESSION_KEY]) if SESSION_KEY in data else None
        return row

    def _get_session_from_db(self) -> Session | None:
        row = Session.objects.filter(pk=_stored(self.session_key or ""), expire_date__gt=timezone.now()).first()
        if row is None:
            self._session_key = None
        return row

    def exists(self, session_key: str) -> bool:
        return super().exists(_stored(session_key))

    def delete(self, session_key: str | None = None) -> None:
        if key := session_key or self.session_key:
            super().delete(_stored(key))


def _stored(key: str) -> str:
    """Return what a row has of a cookie's key: of its SHA-256 what the column takes."""
    return digest(key)[:40]


def middleware(get_response: Callable[[HttpRequest], HttpResponseBase]) -> Callable[[HttpRequest], HttpResponseBase]:
    """Each use of a session puts off its end, and that of the browser's cookie.

    Where two-step sign-in is required of the user, they can do nothing else before it is set up.
    """

    def answer(request: HttpRequest) -> HttpResponseBase:
        now = int(time.time())
        if SESSION_KEY in request.session:
            if now - request.session.get("used", 0) >= NOTED_S:
                request.session["used"] = now
            if settings.DSTACKWEB_TWO_STEP_FOR_ADMINS and _lacks_second_step(request):
                return _to_set_up(request)
        return get_response(request)

    return answer


def _lacks_second_step(request: HttpRequest) -> bool:
    if request.session.get(TWO_STEPS) or request.path.startswith(SET_UP):
        return False
    return isinstance(request.user, User) and adapters.needs_second_step(request.user)


def _to_set_up(request: HttpRequest) -> HttpResponseBase:
    if request.headers.get("HX-Request"):
        return HttpResponse(status=403, headers={"HX-Redirect": SET_UP[0]})
    return redirect(SET_UP[0])


def note_second_step(sender: object, request: HttpRequest, **_signal: object) -> None:
    """Who has just set it up has shown that they have it."""
    request.session[TWO_STEPS] = True


def note_sign_in(sender: object, request: HttpRequest, user: User, **_signal: object) -> None:
    attempts.forget_passwords(request.META.get("REMOTE_ADDR", ""), user)
    request.session.set_expiry(None)
    now = int(time.time())
    program = request.META.get("HTTP_USER_AGENT", "")[:PROGRAM_MAX]
    request.session.update(
        {"since": now, "used": now, "program": program, "address": request.META.get("REMOTE_ADDR", "")}
    )
    request.session[TWO_STEPS] = sign_in.used_second_step(request, user)


def connect() -> None:
    user_logged_in.connect(note_sign_in, dispatch_uid="accounts.sessions")
    authenticator_added.connect(note_second_step, dispatch_uid="accounts.sessions")
    signed_in_by_allauth.connect(adapters.apply_roles, dispatch_uid="accounts.adapters")


@dataclass(frozen=True)
class SignedIn:
    """A browser that is signed in. `handle` is the key of its row."""

    handle: str
    since: dt.datetime
    used: dt.datetime
    program: str
    address: str
    is_this: bool


def of_user(user: User, this: str = "") -> list[SignedIn]:
    """The user's sessions that are valid, the last used first. `this` is the key of the reader's own."""
    wanted, own = user.get_session_auth_hash(), _stored(this)
    found = []
    for row in user.sessions.filter(expire_date__gt=timezone.now()):
        data = row.get_decoded()
        if constant_time_compare(data.get(HASH_SESSION_KEY, ""), wanted):
            since, used = (to_moment(1000 * data.get(name, 0)) for name in ("since", "used"))
            program, address = data.get("program", ""), data.get("address", "")
            found.append(SignedIn(row.session_key, since, used, program, address, row.session_key == own))
    return sorted(found, key=lambda one: one.used, reverse=True)


def end(user: User, handle: str, request: HttpRequest | None = None) -> None:
    """Sign a browser of this user out. Raises NotFound if it is signed out already."""
    if not _end(list(user.sessions.filter(pk=handle)), user, request):
        raise NotFound(_("This browser is signed out already."))


def end_others(user: User, this: str, request: HttpRequest | None = None) -> int:
    """Sign out all browsers of this user but one; returns how many."""
    return _end(list(user.sessions.exclude(pk=_stored(this))), user, request)


def _end(rows: list[Session], user: User, request: HttpRequest | None) -> int:
    ended = 0
    for row in rows:
        if Session.objects.filter(pk=row.pk).delete()[0]:
            user_logged_out.send(sender=User, request=request, user=user)
            ended += 1
    return ended
