"""Languages and time zones: what people choose from, and admins for them, and the language of pages.

It is the reader's choice, else the browser's, else English. `LocaleMiddleware` knows the browser and the choice made
before signing in, which a cookie keeps; here the account's own choice takes their place. A page's later requests say
what language it is in, so that no page mixes two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from zoneinfo import available_timezones

from django.conf import settings
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils import translation
from django.utils.translation import gettext_lazy


def languages() -> list[tuple[Any, Any]]:
    """Codes of languages with their names; the first one is empty."""
    return [("", gettext_lazy("Browser language")), *settings.LANGUAGES]


@cache
def zones() -> list[tuple[Any, Any]]:
    """IANA's names of time zones; the first one is empty."""
    names = sorted(name for name in available_timezones() if "/" in name and not name.startswith("Etc/"))
    return [
        ("", gettext_lazy("Browser time zone")),
        ("UTC", "UTC"),
        *((name, name.replace("_", " ")) for name in names),
    ]


PAGE_HEADER = "DW-Language"
"""A page's requests have the code of its language in it."""


def is_known(code: str) -> bool:
    return code in dict(settings.LANGUAGES)


def middleware(get_response: Callable[[HttpRequest], HttpResponseBase]) -> Callable[[HttpRequest], HttpResponseBase]:
    """Answer in the language of the page that asks, else in that of the account."""

    def answer(request: HttpRequest) -> HttpResponseBase:
        wanted = request.headers.get(PAGE_HEADER, "") or str(getattr(request.user, "language", ""))
        if is_known(wanted):
            translation.activate(wanted)
            request.LANGUAGE_CODE = wanted
        return get_response(request)

    return answer


def keep(response: HttpResponseBase, code: str) -> None:
    """Have the browser keep a choice for the sign-in page; an empty code forgets it."""
    if code:
        response.set_cookie(
            settings.LANGUAGE_COOKIE_NAME,
            code,
            max_age=settings.LANGUAGE_COOKIE_AGE,
            secure=settings.LANGUAGE_COOKIE_SECURE,
            httponly=True,
            samesite="Lax",
        )
    else:
        response.delete_cookie(settings.LANGUAGE_COOKIE_NAME, samesite="Lax")
