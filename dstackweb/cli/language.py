"""What people read, in their language, Simplified Chinese or English: texts, times, amounts and codes. What programs
read stays English, and so do the texts of the option parser's own: its errors and the headings of its help.

A text is marked where it stands: `_("Stopped {name}.", name=…)`, and `_n` where it counts. `N_` marks a text that is
translated later, where it is shown. `python -m tools.cli_messages` writes the catalogue below `locale/`.
"""

from __future__ import annotations

import gettext
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from dstackweb.spec import units

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
    return _language


choose()  # before other modules declare their options: help texts are translated as they are declared


def language() -> str:
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


SPANS = {"d": N_("{n} d"), "h": N_("{n} h"), "min": N_("{n} min"), "s": N_("{n} s")}
WORDS = (
    N_("pending"), N_("submitted"), N_("provisioning"), N_("running"), N_("terminating"), N_("done"), N_("failed"),
    N_("terminated"), N_("idle"), N_("available"), N_("busy"), N_("unknown"), N_("no_quota"), N_("not_available"),
    N_("default"), N_("viewer"), N_("member"), N_("manager"), N_("admin"), N_("ended"), N_("waiting"),
    N_("met"), N_("unmet"), N_("released"), N_("starting"), N_("healthy"), N_("unhealthy"),
)  # fmt: skip
"""Codes of the API that people read: statuses, availabilities, origins, roles, why runs wait, health."""


def word(code: object) -> str:
    """A code of the API as people read it; one that is not in WORDS, as it is."""
    text = "" if code is None else str(code)
    return _(text) if text in WORDS else text


def duration_text(seconds: float) -> str:
    """`12 s`, `4 min`, `1 h 30 min`: see `spec.units.duration_text`."""
    return " ".join(_(SPANS[unit], n=n) for n, unit in units.duration_parts(seconds))


def size_text(size: float) -> str:
    """`17 bytes`, `3.4 MB`: see `spec.units.size_text`."""
    return _n("{n} byte", "{n} bytes", round(size)) if round(size) < 1024 else units.size_text(size)


def run_count(n: int) -> str:
    return _n("{n:,} run", "{n:,} runs", n)


def gpu_count(n: int) -> str:
    return _n("{n:,} GPU", "{n:,} GPUs", n)


def job_count(n: int) -> str:
    return _n("{n:,} job", "{n:,} jobs", n)


def file_count(n: int) -> str:
    return _n("{n:,} file", "{n:,} files", n)


def listed(items: list[str]) -> str:
    """The items with commas between them."""
    return _(", ").join(items)


def clock_text(at: str, now: datetime | None = None) -> str:
    """An ISO time in the reader's time zone: `18:40` today, otherwise with its day: `Nov 6, 02:00`."""
    then, today = datetime.fromisoformat(at).astimezone(), (now or datetime.now(UTC)).astimezone()
    return f"{then:%H:%M}" if then.date() == today.date() else _("{at:%b} {at.day}, {at:%H:%M}", at=then)


def start_text(starts: dict[str, Any] | None) -> str:
    """When a run starts: `14:05 – 15:30`, `by 18:00`, or why that is unknown; empty for a run that does not wait."""
    if not starts:
        return ""
    if not starts["p50"]:
        return str(starts["detail"])
    from_, by = clock_text(starts["p50"]), clock_text(starts["p90"]) if starts["p90"] else "?"
    if from_ != by:
        return f"{from_} – {by}"
    return _("by {time}", time=by) if starts["basis"] == "max_duration" else by


def age_text(since: str | None) -> str:
    """How long ago an ISO time was: `12 s`, `1 h 5 min`. Empty without a time."""
    if not since:
        return ""
    return duration_text((datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds())
