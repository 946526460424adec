"""The language of what people read: Simplified Chinese, or English. What programs read stays English.

A text is marked where it stands: `_("Stopped {name}.", name=…)`, and `_n` where it counts. `N_` marks a text that is
translated later, where it is shown. `python -m tools.cli_messages` writes the catalogue below `locale/`.
"""

from __future__ import annotations

import gettext
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ENGLISH, CHINESE = "en", "zh_Hans"
DOMAIN = "dstackweb"
LOCALE = Path(__file__).parent / "locale"
VARIABLES = ("DSTACKWEB_LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
"""The first of these that is set decides."""
_CHINESE = re.compile(r"zh(_(cn|sg|my|hans)(_\w+)?)?", re.IGNORECASE)

_language = ENGLISH


def language_of(environ: Mapping[str, str]) -> str:
    """`zh_Hans` for `zh_CN.UTF-8`, `zh_SG`, `zh-Hans` …; English for anything else."""
    name = next((value for key in VARIABLES if (value := environ.get(key))), "")
    return CHINESE if _CHINESE.fullmatch(re.split("[.@]", name)[0].replace("-", "_")) else ENGLISH


def choose() -> str:
    """Speak the language of the environment from now on; English where the terminal's encoding has no Chinese."""
    global _language
    _language = language_of(os.environ)
    try:
        "中文".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        _language = ENGLISH
    if _language != ENGLISH:
        # The option parser's own texts are in the catalogue too. It looks them up in gettext's current domain.
        gettext.bindtextdomain(DOMAIN, str(LOCALE))
        gettext.textdomain(DOMAIN)
        os.environ["LANGUAGE"] = _language
    elif gettext.textdomain() == DOMAIN:
        gettext.textdomain("messages")
        os.environ.pop("LANGUAGE", None)
    return _language


def language() -> str:
    """The chosen one."""
    return _language


def tag() -> str:
    """The language as HTTP names it."""
    return _language.replace("_", "-")


@cache
def _catalogue(language: str) -> gettext.NullTranslations:
    return gettext.translation(DOMAIN, LOCALE, [language], fallback=True)


def _(text: str, /, **values: Any) -> str:
    """The text in the chosen language, with the values that it names."""
    found = _catalogue(_language).gettext(text) if text else ""
    return found.format(**values) if values else found


def _n(one: str, many: str, n: int, /, **values: Any) -> str:
    """The form of a text for a number, which it names `{n}` or `{n:,}`."""
    return _catalogue(_language).ngettext(one, many, n).format(n=n, **values)


def _p(context: str, text: str, /) -> str:
    """The text in the sense that the context names: a word that two things have may need two words elsewhere."""
    return _catalogue(_language).pgettext(context, text)


def N_(text: str) -> str:
    """Marks a text that `_` translates where it is shown."""
    return text
