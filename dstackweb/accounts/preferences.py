"""What people choose from on their account page, and admins for them: languages and time zones."""

from __future__ import annotations

from functools import cache
from typing import Any
from zoneinfo import available_timezones

from django.conf import settings
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
